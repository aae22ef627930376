"""Executables of a few sizes of a Family: calls are padded to the next, and results cut."""

from __future__ import annotations

import bisect
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch

from offload.errors import BindingError, CopyError, ExecutionError
from offload.host.call_sizes import CallSizes, with_arguments
from offload.host.pad_values import input_names, pad_values
from offload.host.padding_proof import PaddingProof
from offload.host.promoter import Promoter, new_promoter
from offload.host.promotion import PromotionReport
from offload.host.promotion_work import Promoting
from offload.host.sizes import Sizes
from offload.interpreter.outside_graphs import outside_graphs
from offload.interpreter.torch_names import dtype_name
from offload.program import BoundProgram, TensorView
from offload.program.family import BoundFamily, Family
from offload.program.structure import flatten, unflatten
from offload.program.varying_numbers import varying_of, varying_program
from offload.run import Executable
from offload.run.arguments import tensors_of_call

LoadAt = Callable[[Mapping[str, int]], Executable]


@dataclasses.dataclass(frozen=True, slots=True)
class PaddingReport:
    """A report on the calls of a padded executable.

    Attributes:
        loaded: the end sizes of each bucket that occurred.
        calls: the number of calls.
        elements, padded_elements: of inputs whose sizes vary, as given and as executed.
        promotion: the promotion of repeated buckets; None without promotion.
    """

    loaded: tuple[tuple[int, ...], ...]
    calls: int
    elements: int
    padded_elements: int
    promotion: PromotionReport | None = None

    def __str__(self) -> str:
        share = 1 - self.elements / self.padded_elements if self.padded_elements else 0.0
        return (
            f"{len(self.loaded)} buckets loaded, {self.calls:,} calls, {share:.1%} of the elements "
            "of inputs were padding" + (f"; {self.promotion}" if self.promotion is not None else "")
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """The tensors of a call, its sizes and its bucket's, and the numbers of both."""

    tensors: Sequence[torch.Tensor]
    sizes: tuple[int, ...]
    bucket: tuple[int, ...]
    own: Sequence[int | float]
    ends: Sequence[int | float]


class PaddedExecutable:
    """A Family that is executed only at the ends of buckets.

    A call's tensors are padded to the least bucket that holds its sizes, and the results are views
    of that execution's results, with the bucket's strides. The first padded call of each bucket is
    also executed at its own sizes, and the results must be equal within rounding, also with negated
    and doubled floating-point inputs (`padding_proof`). Where all elements of an input equal its
    padding, such as zeros in a warm-up, this proves little: then the following calls are compared,
    too, up to the eighth.

    Owner of the Executables of its buckets. Calls from several threads are safe. Made by
    `Captured.load(sizes=Sizes(buckets=, pad=))`.

    Calls are those of an Executable, without `out` and `feature_map`. It raises the errors of an
    Executable, and:
        BindingError: a size is beyond the last bucket, or the Family does not accept it.
        CaptureError: results with padding differ from those without: the model does not mask the
            padding.

    Attributes:
        family: the Family.
        sizes: the buckets, and the padding values of inputs.
    """

    def __init__(
        self,
        bound: BoundFamily,
        sizes: Sizes,
        load_at: LoadAt,
        promoting: Promoting | None = None,
        note: str = "",
    ) -> None:
        """Begin without loaded buckets.

        Args:
            bound: the Family.
            sizes: with buckets for each Dim, and a value for each input whose sizes vary.
            load_at: loads the Program of one choice of sizes.
            promoting: makes executables of repeated buckets; None: no promotion.
            note: a sentence on loading, for people.

        Raises:
            BindingError: a Dim has no buckets, they end at a size outside the Family, an input that
                varies has no value, or the program leaves more than results: padding would also be
                written, and random numbers drawn for it.
        """
        if bound.family.program.leaves_something:
            raise BindingError(
                "sizes.pad: the program writes inputs or weights, or draws random numbers, which "
                "padding would change: load without pad="
            )
        self.family: Family = bound.family
        self.sizes = sizes
        self._bound = BoundProgram(bound.family.program, bound.bindings)
        self._load_at = load_at
        self._find = CallSizes(self.family)
        self._ends = _ends(self.family, sizes)
        program = varying_program(self.family)
        self._inputs = [(view, varying_of(view)) for view in program.inputs]
        self._results = [(one.view, varying_of(one.view)) for one in program.results]
        self._values = pad_values(self.family, sizes.pad)
        self._runs: dict[tuple[int, ...], Executable] = {}
        self._bucket_numbers: dict[tuple[int, ...], Sequence[int | float]] = {}
        self._proof = PaddingProof(
            program,
            input_names(self.family),
            [
                value if varying else None
                for (_, varying), value in zip(self._inputs, self._values, strict=True)
            ],
        )
        self._loading = threading.Lock()
        self._counting = threading.Lock()
        self._n_calls = self._n_elements = self._n_padded = 0
        self._closed = False
        self._note = note
        self._promoter = None if promoting is None else self._new_promoter(promoting)

    def _new_promoter(self, promoting: Promoting) -> Promoter:
        runs = self._runs  # not self, to which it would refer

        def publish(bucket: tuple[int, ...], run: Executable) -> Executable:
            run._native.join(runs[bucket]._native)
            return run

        budget_bytes = self.sizes.promoted_bytes
        return new_promoter(self, promoting, self.family.names, budget_bytes, publish)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise CopyError(
            "an executable lies in its device's memory, and cannot be copied or pickled: load the "
            "captured program once more"
        )

    @outside_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Execute at the sizes of the call's bucket."""
        for name in ("out", "feature_map"):
            if kwargs.pop(name, None) is not None:
                raise BindingError(
                    f"{name}: results of a padded execution are cut from larger ones, in memory of "
                    f"their own: leave {name}= out, or load without pad="
                )
        named = dict(zip(self.family.names, self._find.of(args, kwargs), strict=True))
        sizes = self.family.checked(named)
        bucket = self._bucket_of(sizes)
        own = self.family.numbers_at(sizes)
        tensors = tensors_of_call(with_arguments(self._bound, self.family, own), args, kwargs)
        self._check(tensors, own)
        if bucket not in self._runs:
            self._load(bucket)
        call = _Call(tensors, sizes, bucket, own, self._bucket_numbers[bucket])
        found = self._executed(call)
        if sizes != bucket and not self._proof.is_proved(bucket):
            self._prove(call, found)
        return found

    def _load(self, bucket: tuple[int, ...]) -> None:
        with self._loading:
            if self._closed:
                raise ExecutionError("the executable is closed: load the captured program again")
            if bucket not in self._runs:
                named = dict(zip(self.family.names, bucket, strict=True))
                self._bucket_numbers[bucket] = self.family.numbers_at(bucket)
                self._runs[bucket] = self._load_at(named)

    def _prove(self, call: _Call, found: Any) -> None:
        """Compare the result of a padded call with the result without padding.

        Raises:
            CaptureError: they differ.
        """
        names = self.family.names

        def padded(tensors: Sequence[torch.Tensor]) -> Any:
            given = dataclasses.replace(call, tensors=tensors)
            args, kwargs = self._arguments(self._padded_inputs(given), call.ends)
            return self._cut(self._runs[call.bucket](*args, **kwargs), call.own)

        with self._load_at(dict(zip(names, call.sizes, strict=True))) as run:

            def exact(tensors: Sequence[torch.Tensor]) -> Any:
                args, kwargs = self._arguments(tensors, call.own)
                return run(*args, **kwargs)

            texts = _sizes_text(names, call.sizes), _sizes_text(names, call.bucket)
            self._proof.compare(
                call.bucket, call.tensors, found, padded=padded, exact=exact, sizes=texts
            )

    def _executed(self, call: _Call) -> Any:
        """Execute a call at the sizes of its bucket, and cut the result to its own."""
        padded = self._padded_inputs(call)
        args, kwargs = self._arguments(padded, call.ends)
        result = self._run(call.bucket, args, kwargs)
        self._count(call.tensors, padded)
        return self._cut(result, call.own)

    def _padded_inputs(self, call: _Call) -> list[torch.Tensor]:
        return [
            _padded(tensor, _shape(*described, call.ends), value)
            for tensor, described, value in zip(
                call.tensors, self._inputs, self._values, strict=True
            )
        ]

    def _arguments(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with these inputs."""
        arguments = self.family.arguments_at(self._bound.arguments_structure, numbers)
        args, kwargs = unflatten(arguments, list(tensors))
        return args, kwargs

    def _cut(self, result: Any, own: Sequence[int | float]) -> Any:
        """Cut a bucket's result to the result of a call of other sizes."""
        leaves, _ = flatten(result, _is_tensor, share_same=True)
        cut = [
            _cut(tensor, _shape(*described, own))
            for tensor, described in zip(leaves, self._results, strict=True)
        ]
        return unflatten(self.family.results_at(self._bound.result_structure, own), cut)

    def _run(self, bucket: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Execute a bucket, by its promoted executable where there is one."""
        if self._promoter is None:
            return self._runs[bucket](*args, **kwargs)
        accounts = self._promoter.accounts
        promoted = accounts.find(bucket, args, kwargs)
        run = self._runs[bucket] if promoted is None else cast(Executable, promoted)
        begin_ns = time.perf_counter_ns()
        result = run(*args, **kwargs)
        accounts.charge(bucket, time.perf_counter_ns() - begin_ns, promoted is not None)
        return result

    def _count(self, given: Sequence[torch.Tensor], padded: Sequence[torch.Tensor]) -> None:
        pairs = [
            (one.numel(), other.numel())
            for one, other, (_, varying) in zip(given, padded, self._inputs, strict=True)
            if varying
        ]
        with self._counting:
            self._n_calls += 1
            self._n_elements += sum(n_given for n_given, _ in pairs)
            self._n_padded += sum(n_padded for _, n_padded in pairs)

    def _bucket_of(self, sizes: Sequence[int]) -> tuple[int, ...]:
        found = []
        for name, size, ends in zip(self.family.names, sizes, self._ends, strict=True):
            at = bisect.bisect_left(ends, size)
            if at == len(ends):
                raise BindingError(
                    f"{name} = {size}: expected at most {ends[-1]}, where the last bucket ends; "
                    "load with a larger one"
                )
            found.append(ends[at])
        return tuple(found)

    def _check(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int | float]) -> None:
        for tensor, described in zip(tensors, self._inputs, strict=True):
            view, shape = described[0], _shape(*described, numbers)
            if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (shape, view.dtype):
                name = self.family.program.values[view.value].name
                raise BindingError(
                    f"{name}: expected {view.dtype}{list(shape)}, got "
                    f"{dtype_name(tensor.dtype)}{list(tensor.shape)}"
                )

    @property
    def padding(self) -> PaddingReport:
        """A report on the calls so far."""
        return PaddingReport(
            tuple(sorted(self._runs)),
            self._n_calls,
            self._n_elements,
            self._n_padded,
            None if self._promoter is None else self._promoter.report(),
        )

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def rebind_weights(self) -> None:
        """Use the storages that the parameters have now, as `Executable.rebind_weights`.

        Raises:
            BindingError: a new storage has another layout than the recorded one.
        """
        for run in list(self._runs.values()):
            run.rebind_weights()
        if self._promoter is not None:
            self._promoter.rebind_weights()

    @outside_graphs
    def explain(self) -> str:
        """Describe what varies, and what was loaded."""
        padding = self.padding
        promotion = () if padding.promotion is None else padding.promotion.explain()
        return "\n".join(filter(None, [str(self.family), str(padding), self._note, *promotion]))

    def close(self) -> None:
        """Wait for executions in flight and free the memory; idempotent."""
        with self._loading:
            self._closed = True
        for run in list(self._runs.values()):
            run.close()
        if self._promoter is not None:
            self._promoter.close()

    @outside_graphs
    def __enter__(self) -> PaddedExecutable:
        return self

    @outside_graphs
    def __exit__(self, *_: object) -> None:
        self.close()


def _ends(family: Family, sizes: Sizes) -> list[list[int]]:
    """Return the ends of buckets, by Dim, ascending.

    Raises:
        BindingError: a Dim has no buckets, or a bucket ends at a size outside the Dim.
    """
    given = sizes.ends_for(family.dims, lambda dim, ends: sorted(set(ends)))
    for dim, ends in zip(family.dims, given, strict=True):
        if not ends:
            raise BindingError(
                f"sizes.pad: expected buckets for each Dim, got none for {dim.name}: give "
                f"buckets={{{dim.name!r}: [...]}}"
            )
        for end in (ends[0], ends[-1]):
            if end < dim.minimum or (dim.maximum is not None and end > dim.maximum):
                raise BindingError(
                    f"sizes.buckets[{dim.name!r}]: expected ends within {dim}, got {end}"
                )
    return given


def _shape(
    view: TensorView, varying: Sequence[tuple[int, int]], numbers: Sequence[int | float]
) -> tuple[int, ...]:
    shape = list(view.shape)
    for position, expression in varying:
        if position < len(shape):
            shape[position] = int(numbers[expression])
    return tuple(shape)


def _padded(tensor: torch.Tensor, shape: tuple[int, ...], value: float) -> torch.Tensor:
    if tuple(tensor.shape) == shape:
        return tensor
    larger = tensor.new_full(shape, value)
    larger[tuple(slice(size) for size in tensor.shape)] = tensor
    return larger


def _cut(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(size) for size in shape)] if tuple(tensor.shape) != shape else tensor


def _sizes_text(names: Sequence[str], sizes: Sequence[int]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in zip(names, sizes, strict=True))


def _is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)
