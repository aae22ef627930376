"""Sizes that may vary, as torch's symbolic integers while a call is recorded a second time.

With `watched_numbers` the only user of torch's private symbolic shapes
(torch/fx/experimental/symbolic_shapes.py). Nothing is computed: all tensors are fake, and their
sizes are expressions. A question about a size (`if n > 5`) is answered by torch from the size of
the recorded call, and the answer is kept as a guard. Unlike in torch.compile, sizes 0 and 1 are not
special, and two sizes that happen to be equal stay distinct.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.program.expressions import SIZE, Instruction
from offload.program.family import Dim
from offload.record.fake_weights import FakeWeights
from offload.record.size_expressions import to_expression
from offload.record.symbolic_functions import layer_by_steps
from offload.record.watched_numbers import WatchedEnvironment, is_watched, watching

Axes = Mapping[int, int]
"""The axes of a tensor that may vary, each with the position of its Dim."""


class _PlacedGuards(list[Any]):
    """The guards of a ShapeEnv, each with the user's line that caused it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def append(self, guard: Any) -> None:
        self.places.append(user_location())
        super().append(guard)


class _Environment(WatchedEnvironment):
    """torch's environment of symbolic sizes for one recording.

    Attributes:
        operations: for each symbol that `derived` made, its operation and operands, in the order in
            which they were made.
    """

    def __init__(self) -> None:
        super().__init__(duck_shape=False, specialize_zero_one=False)
        self.guards: _PlacedGuards = _PlacedGuards()
        self.operations: dict[Any, tuple[str, Any, Any]] = {}
        self._derived: dict[tuple[str, Any, Any], torch.SymInt] = {}

    def new_symbol(
        self, name: str, value: int, least: int, most: int | None
    ) -> tuple[Any, torch.SymInt]:
        """Return a symbol, and the integer that stands for it.

        Args:
            name: shown in torch's messages.
            value: in the recorded call.
            least: its least value.
            most: its greatest value; None: it has none.
        """
        source = ConstantSource(name)
        symbol = self.create_symbol(
            value,
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=None,
            positive=least > 0 or None,  # sympy's assumptions are not guarded
        )
        size = self.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(size, torch.SymInt)
        self.constrain_symbol_range(symbol, least, sympy.oo if most is None else most)
        return symbol, size

    def derived(self, operation: str, own: Callable[..., int], one: Any, other: Any) -> Any:
        """An integer that follows from two, by an operation that torch does not know.

        To torch it is a further symbol, which is at least 0.

        Args:
            operation: of an Expression.
            own: Python's function.
            one: an integer, or a symbol for one.
            other: likewise.
        """
        (first, first_value), (second, second_value) = map(_expression_and_value, (one, other))
        key = (operation, first, second)
        if key not in self._derived:
            name = f"{operation}_{len(self.operations)}"
            value = own(first_value, second_value)
            symbol, self._derived[key] = self.new_symbol(name, value, 0, None)
            self.operations[symbol] = key
        return self._derived[key]


def _expression_and_value(number: Any) -> tuple[Any, int]:
    """An integer, or a symbol for one, as sympy's, and its value in the recorded call."""
    if is_watched(number):
        return number.node.expr, number.node.hint
    return sympy.Integer(int(number)), int(number)


class _SymbolicMode(FakeTensorMode):
    """torch's mode of fake tensors over symbolic sizes, with remembered results of whole operators.

    Nested operators run only where a result is not remembered, and remembering them costs more than
    it saves.
    """

    def _dispatch_impl(self, *given: Any) -> Any:
        remembers, self.cache_enabled = self.cache_enabled, False
        try:
            return super()._dispatch_impl(*given)
        finally:
            self.cache_enabled = remembers


class VariedSizes(FakeWeights):
    """The fake tensors of a recording at sizes other than the call's.

    Owner: one Recorder. Thread: that of the recording.

    Attributes:
        sizes: of the Dims, in order.
    """

    def __init__(
        self,
        axes: Sequence[Axes],
        device: torch.device,
        sizes: Sequence[int | torch.SymInt] = (),
        mode: FakeTensorMode | None = None,
    ) -> None:
        """Begin without fake tensors.

        Args:
            axes: the varying axes of each input, in order.
            device: of the recording.
            sizes: of the Dims, in order.
            mode: the mode under which everything runs; None: a mode in which sizes are known.
        """
        super().__init__({}, device, lambda one, other: one == other)
        self.sizes = tuple(sizes)
        self._axes = axes
        if mode is not None:
            self.mode = mode

    def at(self, sizes: Sequence[int]) -> VariedSizes:
        """The fake tensors of another recording, which shares this one's tensors of the model.

        Args:
            sizes: of the Dims, in order.
        """
        other = copy.copy(self)
        other.sizes = tuple(sizes)
        return other

    def input(self, tensor: torch.Tensor, leaf: int) -> torch.Tensor:
        """A fake tensor like an argument with varying sizes, on separate memory.

        Raises:
            CaptureError: its strides do not follow from its sizes.
        """
        axes = self._axes[leaf]
        if not axes:
            return super().input(tensor, leaf)
        shape = [self.sizes[axes[at]] if at in axes else one for at, one in enumerate(tensor.shape)]
        with self.mode, self.deciding():
            fake = self._placed(tensor, shape, leaf)
            if tensor.is_conj():
                fake = torch._conj(fake)
            if tensor.is_neg():
                fake = torch._neg_view(fake)
        self._keep(fake)
        return fake.requires_grad_(tensor.requires_grad)

    def layer_by_steps(self, name: str, args: tuple[Any, ...]) -> Any:
        """Replace a recurrent layer that is not recorded as one launch."""
        return NotImplemented

    def _placed(self, tensor: torch.Tensor, shape: Sequence[Any], leaf: int) -> torch.Tensor:
        """A fake tensor of another shape with the memory layout of a given tensor."""
        order = _memory_order(tensor)
        if order is None:
            strides = _strides_with_gaps(tensor, self._axes[leaf], leaf)
            return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=self.device)
        placed = torch.empty(
            [shape[axis] for axis in order], dtype=tensor.dtype, device=self.device
        )
        if order == list(range(tensor.dim())):
            return placed
        return placed.permute([order.index(axis) for axis in range(tensor.dim())])


class SymbolicSizes(VariedSizes):
    """The fake tensors of a recording in which sizes are symbols.

    Attributes:
        dims: the sizes that vary.
    """

    def __init__(self, dims: Sequence[Dim], axes: Sequence[Axes], device: torch.device) -> None:
        """Begin with a symbol for each Dim.

        Args:
            dims: the sizes that vary, with their values in the recorded call.
            axes: the varying axes of each input, in order.
            device: of the recording.
        """
        self._environment = _Environment()
        mode = _SymbolicMode(shape_env=self._environment, allow_non_fake_inputs=True)
        super().__init__(axes, device, mode=mode)
        self.dims = dims
        self._symbols: list[Any] = []
        self.sizes = tuple(self._size(one) for one in dims)

    def _size(self, dim: Dim) -> torch.SymInt:
        symbol, size = self._environment.new_symbol(
            dim.name, dim.recorded, dim.minimum, dim.maximum
        )
        self._symbols.append(symbol)
        return size

    @property
    def positions(self) -> dict[Any, int]:
        """For each symbol, the position of its Dim."""
        return {symbol: at for at, symbol in enumerate(self._symbols)}

    @property
    def codes(self) -> dict[Any, tuple[Instruction, ...]]:
        """The code of each symbol: a Dim, or an operation on others."""
        codes: dict[Any, tuple[Instruction, ...]] = {
            symbol: ((SIZE, at),) for symbol, at in self.positions.items()
        }
        for symbol, (operation, one, other) in self._environment.operations.items():
            operands = to_expression(one, codes).code, to_expression(other, codes).code
            codes[symbol] = (*operands[0], *operands[1], (operation, 0))
        return codes

    def rule(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the rule of an operator, by torch's Python dispatcher: its rules keep sizes.

        This includes operators that the rule calls. Those in C++ would ask sizes for numbers.
        """
        rule = super().rule(func)

        def ruled(*args: Any, **kwargs: Any) -> Any:
            with enable_python_dispatcher():
                return rule(*args, **kwargs)

        return ruled

    def deciding(self) -> contextlib.AbstractContextManager[None]:
        """A context that answers questions about sizes by the recorded ones, without guards."""
        found: contextlib.AbstractContextManager[None] = self._environment.suppress_guards()
        return found

    def recording(self) -> contextlib.AbstractContextManager[None]:
        """Watch uses of sizes by the call that torch does not follow."""
        return watching()

    def layer_by_steps(self, name: str, args: tuple[Any, ...]) -> Any:
        """As `symbolic_functions.layer_by_steps`."""
        return layer_by_steps(name, args, is_watched)

    def expression_of(self, number: torch.SymInt | torch.SymFloat) -> Any:
        """The sympy expression of a number, with sizes that a guard equates merged."""
        return self._environment.replace(number.node._expr)

    def fixed(self, symbol: Any) -> int | None:
        """The only possible size of a symbol, if the call's questions fixed it."""
        found = self._environment.replace(symbol)
        return int(found) if found.is_Integer else None

    def recorded(self, number: Any) -> Any:
        """The value of a number in the recorded call."""
        is_symbolic = isinstance(number, (torch.SymInt, torch.SymFloat))
        return number.node.hint if is_symbolic else number

    def guards(self) -> list[tuple[Any, str]]:
        """The call's questions about sizes, as sympy conditions that hold, with the user's lines.

        Raises:
            CaptureError: torch would defer a check to run time; or a number was refused, and the
                call swallowed the refusal.
        """
        environment = self._environment
        if environment.refusal is not None:
            raise environment.refusal
        if environment.deferred_runtime_asserts:
            raise CaptureError(
                "the call checks a size that depends on data, which is not known before it runs: "
                "leave out dynamic_shapes, or compute it outside of the model"
            )
        placed = environment.guards
        guards = [(one.expr, at) for one, at in zip(placed, placed.places, strict=True)]
        known = {one for one, _ in guards}
        for symbol, other in environment.replacements.items():
            equal = sympy.Eq(symbol, other)
            is_own = symbol in self.positions or symbol in environment.operations
            if is_own and equal not in known:
                guards.append((equal, ""))
        guards += [(one, "") for one in self._ranges()]
        return guards

    def _ranges(self) -> Iterator[Any]:
        """Yield conditions for symbols whose range torch has narrowed."""
        ranges: dict[Any, tuple[int, int | None]] = {
            symbol: (self.dims[at].minimum, self.dims[at].maximum)
            for symbol, at in self.positions.items()
        }
        ranges |= dict.fromkeys(self._environment.operations, (0, None))
        for symbol, (least, most) in ranges.items():
            found = self._environment.var_to_range.get(symbol)
            if found is None:
                continue
            if found.lower > least:
                yield sympy.Ge(symbol, found.lower)
            if found.upper.is_Integer and (most is None or found.upper < most):
                yield sympy.Le(symbol, found.upper)


def _memory_order(tensor: torch.Tensor) -> list[int] | None:
    """The axes of a tensor from the outermost in memory to the innermost; None: it has gaps."""
    if tensor.is_contiguous():
        return list(range(tensor.dim()))
    order = _by_stride(tensor)
    return order if tensor.permute(order).is_contiguous() else None


def _by_stride(tensor: torch.Tensor) -> list[int]:
    strides = tensor.stride()
    return sorted(range(tensor.dim()), key=lambda axis: -strides[axis])


def _strides_with_gaps(tensor: torch.Tensor, axes: Axes, leaf: int) -> tuple[int, ...]:
    """The strides of a tensor with gaps, fixed at all sizes.

    Raises:
        CaptureError: the strides may depend on sizes, as a varying axis lies within another axis;
            or elements share memory.
    """
    order = _by_stride(tensor)
    strides, n_items = tensor.stride(), 1
    for place, axis in reversed(list(enumerate(order))):
        is_within = place > 0 and axis in axes
        if strides[axis] < n_items or is_within:
            raise CaptureError(
                f"input {leaf} has the shape {list(tensor.shape)} with strides {list(strides)}: "
                "expected one without gaps where sizes vary, or with gaps in which only the "
                "outermost axis in memory varies, since its strides follow from no size; pass its "
                ".contiguous()"
            )
        n_items = strides[axis] * tensor.shape[axis]
    return strides
