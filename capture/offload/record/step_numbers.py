"""Numbers that torch's optimizers compute from their step counters, kept on the device.

Adam and similar optimizers read a step counter on the host (`_get_value` in
torch/optim/optimizer.py) and compute a few Python numbers from it (`1 - beta1**step`), which scale
tensors. Each execution would repeat such a number of the recorded step. Here the read returns the
counter as a float64 tensor instead, the precision of a Python number, and computations from it are
launched. Functions that take only numbers are replaced by others with the same arithmetic. Any
other use of such a tensor (a branch, `math`, text) reads it on the host, and is refused like every
such read.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch
from torch.optim.optimizer import _get_value, _stack_if_compiling
from torch.utils._python_dispatch import _disable_current_modes

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.record.reading_trainers import trainer_that_reads

_READ: Any = _get_value
_STACK = "_stack_if_compiling"
_ABSENT = object()


# The functions of torch.optim whose computations with a counter are made with a tensor here. Others
# branch on the counter, or pass it where torch takes only numbers.
_KNOWN = frozenset(
    {
        "_single_tensor_adam",
        "_multi_tensor_adam",
        "_single_tensor_adagrad",
        "_multi_tensor_adagrad",
        "_single_tensor_adamax",
        "_multi_tensor_adamax",
        "_single_tensor_nadam",
        "_multi_tensor_nadam",
        "_single_tensor_radam",
        "_multi_tensor_radam",
        "_multi_tensor_asgd",
    }
)

# The optimizers that call them.
READING: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.ASGD,
)

# Those functions that branch otherwise in their first steps, on numbers that grow with the
# counter; each execution checks that the counter has come as far (`step_counters`).
_GROWING = frozenset({"_single_tensor_radam", "_multi_tensor_radam"})

_ENDINGS = tuple(
    f"_tensor_{one}" for one in ("adam", "adagrad", "adamax", "nadam", "radam", "asgd")
)

# Python's operations on one or two numbers, by the names of torch's functions.
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add,
    "__radd__": lambda one, other: torch.add(other, one),
    "sub": torch.sub,
    "__rsub__": lambda one, other: torch.sub(other, one),
    "mul": torch.mul,
    "__rmul__": lambda one, other: torch.mul(other, one),
    "div": torch.div,
    "__rtruediv__": lambda one, other: torch.div(other, one),
    "__rdiv__": lambda one, other: torch.div(other, one),
    "pow": torch.pow,
    "__pow__": torch.pow,
    "__rpow__": lambda one, other: torch.pow(other, one),
}

_OF_LISTS = frozenset({"_foreach_add_", "_foreach_div_", "_foreach_mul", "_foreach_mul_"})

_SCALING: dict[str, Callable[[Any, Any], Any]] = {
    "mul": torch.mul,
    "mul_": torch.Tensor.mul_,
    "div": torch.div,
}


class StepNumbers:
    """The numbers of one recorded step.

    Owner: one Recorder, on whose thread it is called.
    """

    def __init__(
        self,
        counters: Iterable[torch.Tensor],
        alike: Callable[[torch.Tensor], Hashable | None] = lambda _: None,
    ) -> None:
        """Begin without numbers.

        Args:
            counters: the tensors of optimizers' state that may be read as step counters.
            alike: returns a key that counters share if they hold the same number in each execution;
                None: unknown.
        """
        self._counters = {id(one): one for one in counters if one.dim() == 0}
        self._alike = alike
        self._numbers: dict[int, torch.Tensor] = {}
        self._read: dict[Hashable, torch.Tensor] = {}
        self._made: dict[Hashable, torch.Tensor] = {}

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform a call of a torch function that concerns these numbers.

        Args:
            name: the function's name.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            NotImplemented where it does not concern them.

        Raises:
            CaptureError: the function is not known to compute the same with a tensor.
        """
        if name == "item" and id(args[0]) in self._counters:
            return self._of(args[0]) if _is_known_read() else NotImplemented
        if not self._numbers or not any(map(self._has, (*args, *kwargs.values()))):
            return NotImplemented
        if name in ("gt", "__gt__") and _function_of_optimizer() in _GROWING:
            return self._has_grown(*args)
        outcome = self._computed(name, args, kwargs)
        if outcome is NotImplemented:
            optimizer, advice = trainer_that_reads()
            raise CaptureError(
                f"{user_location()}: {optimizer or 'the optimizer'} computes {name} from a step "
                "counter that it reads on the host, which a replay cannot repeat: "
                f"{advice or 'leave its step out of the captured call'}"
            )
        return outcome

    def _has(self, argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(map(self._is_number, argument))
        return self._is_number(argument)

    def _is_number(self, argument: Any) -> bool:
        return id(argument) in self._numbers

    def _of(self, counter: torch.Tensor) -> torch.Tensor:
        """The counter as a Python number would be; shared by counters of equal content."""
        shared = self._alike(counter)
        key = (id(counter), counter._version) if shared is None else ("alike", shared)
        if key not in self._read:
            self._read[key] = self._number(counter.to(torch.float64))
        return self._read[key]

    def _number(self, tensor: torch.Tensor) -> torch.Tensor:
        self._numbers[id(tensor)] = tensor  # keeps it, and so its id
        return tensor

    @staticmethod
    def _has_grown(number: torch.Tensor, limit: float) -> bool:
        with _disable_current_modes():
            has_grown = number.item() > limit
        if not has_grown:
            raise CaptureError(
                f"{user_location()}: the optimizer takes another path in its first steps than "
                "later, and a replay takes the recorded one: make some steps before the capture "
                "(RAdam: five, as long as betas are the default ones)"
            )
        return True

    def _computed(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) == 1:
            return self._converted(name, args[0], kwargs)
        if name in {*_ARITHMETIC, *_SCALING} and len(args) == 2 and not kwargs:
            one, other = args
            first, second = self._operand(one), self._operand(other)
            if name in _ARITHMETIC and first is not None and second is not None:
                return self._once(name, _ARITHMETIC[name], first, second)
            if name in ("mul", "div", "mul_") and not self._is_number(one):
                return _SCALING[name](one, self._beside(one, other))
            if name == "div" and isinstance(other, torch.Tensor):  # as `Tensor.__rtruediv__` does
                return torch.mul(torch.reciprocal(other), self._beside(other, one))
        return self._scaled(name, args, kwargs)

    def _converted(self, name: str, one: Any, kwargs: dict[str, Any]) -> Any:
        """Perform a function of one argument besides its keywords."""
        if not self._is_number(one):
            return self._scaled(name, (one,), kwargs)
        if name in ("neg", "__neg__"):
            return self._once(name, lambda one, _: torch.neg(one), one, one)
        if name == "clamp" and kwargs.keys() == {"min"}:
            return self._number(torch.clamp(one, **kwargs))
        if name == "as_tensor" and kwargs.keys() <= {"device"}:
            return one.to(torch.get_default_dtype())  # as of a Python number
        return NotImplemented

    def _operand(self, argument: Any) -> torch.Tensor | None:
        """A Python number as a tensor; None for a tensor that is not one of these numbers."""
        if self._is_number(argument):
            return argument  # type: ignore[no-any-return]
        if not isinstance(argument, (int, float)):
            return None
        key = "number", float(argument)
        if key not in self._made:
            self._made[key] = torch.full((), float(argument), dtype=torch.float64)
        return self._made[key]

    def _once(
        self,
        name: str,
        function: Callable[[Any, Any], Any],
        one: torch.Tensor,
        other: torch.Tensor,
    ) -> torch.Tensor:
        """Compute a result of the same numbers once: they are never written."""
        key = name, id(one), id(other)  # both are kept, and so their ids
        if key not in self._made:
            self._made[key] = self._number(function(one, other))
        return self._made[key]

    def _scaled(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform a function that scales tensors by these numbers."""
        if name == "addcdiv_" and len(args) == 3 and list(kwargs) == ["value"]:
            one, first, second = args
            scalars = kwargs["value"].reshape(1)
            torch._foreach_addcdiv_([one], [first], [second], scalars)
            return one
        if kwargs:
            return NotImplemented
        if name == "stack":
            return self._number(torch.stack(args[0]))
        return self._scaled_list(name, args)

    def _scaled_list(self, name: str, args: tuple[Any, ...]) -> Any:
        """Perform a function that scales each tensor of a list by its own number."""
        *tensors, numbers = args
        in_one = self._is_number(numbers)
        if not in_one and not (
            isinstance(numbers, (list, tuple)) and all(map(self._is_number, numbers))
        ):
            return NotImplemented
        function: Any = getattr(torch, name, None)
        if name == "_foreach_addcdiv_" and in_one:
            return function(*args)
        if name in _OF_LISTS and len(args) == 2 and not in_one:
            return function(*tensors, list(map(self._beside, *args)))
        return NotImplemented

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Let torch's optimizers compute with these numbers where they take only Python's.

        Most stack numbers that are tensors when they are compiled (`_stack_if_compiling`), to scale
        lists of tensors. Adamax stacks none, and ASGD compares one with Python's `max`, which
        would branch. These functions are replaced in the optimizers' modules, and treat everything
        but these numbers as before.
        """
        names = [
            *((module, _STACK, self._stacked) for module in _modules_that_stack()),
            (sys.modules["torch.optim.asgd"], "max", self._largest),
            (sys.modules["torch.optim.adamax"], "torch", _TorchWithStacks(self)),
        ]
        before = [vars(module).get(name, _ABSENT) for module, name, _ in names]
        for module, name, replacement in names:
            setattr(module, name, replacement)
        try:
            yield
        finally:
            for (module, name, _), one in zip(names, before, strict=True):
                if one is _ABSENT:
                    delattr(module, name)
                else:
                    setattr(module, name, one)

    def _stacked(self, given: Any) -> Any:
        return torch.stack(given) if self.are_numbers(given) else _stack_if_compiling(given)

    def _largest(self, *given: Any) -> Any:
        if len(given) == 2 and self._is_number(given[1]):
            return torch.clamp(given[1], min=given[0])
        return max(*given)

    def are_numbers(self, given: Any) -> bool:
        """Whether it is a list of these numbers alone."""
        return isinstance(given, list) and bool(given) and all(map(self._is_number, given))

    @staticmethod
    def _beside(one: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """A number as an operand beside a tensor, whose dtype it must not change."""
        return number if one.dim() else number.to(one.dtype)


class _TorchWithStacks:
    """torch, except that `_foreach_addcdiv_` takes a list of step numbers."""

    def __init__(self, numbers: StepNumbers) -> None:
        self._numbers = numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def _foreach_addcdiv_(self, *args: Any, **kwargs: Any) -> Any:
        *tensors, scalars = args
        if self._numbers.are_numbers(scalars):
            args = (*tensors, torch.stack(scalars))
        return torch._foreach_addcdiv_(*args, **kwargs)


def _is_known_read() -> bool:
    """Whether the current torch function reads a counter inside a known function."""
    frame = sys._getframe(3)  # below `call` and the mode's `__torch_function__`
    return frame.f_code is _READ.__code__ and _function_of_optimizer() in _KNOWN


def _function_of_optimizer() -> str:
    """The function of torch.optim that computes the current step; empty outside a step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_name.endswith(_ENDINGS):
        frame = frame.f_back
    return "" if frame is None else frame.f_code.co_name


def _modules_that_stack() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.optim.") and _STACK in vars(module)
    ]
