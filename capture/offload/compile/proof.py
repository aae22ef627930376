"""Proof of a compiled kernel against the launches that it replaces, on an execution's Values."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.compile.widened import widened
from offload.errors import CaptureError
from offload.interpreter.eager_run import EagerRun
from offload.interpreter.outside_graphs import outside_graphs
from offload.interpreter.torch_names import find_dtype
from offload.native import _native
from offload.program import BoundProgram, Program, TensorView

GUARD_BYTES = 4096
"""Before and behind each range that a kernel writes; a loop that overruns writes there."""

ERROR_RATIO = 4.0
"""A kernel's error against float64 may be this many times that of the replaced launches."""

ROUNDINGS = 16.0
"""Plus this many units in the last place of the largest number in a row."""

_ROW = 16
"""Shorter rows have too few numbers to estimate an error: all rows then count as one."""

_FILL = 0xFF  # floating-point numbers of these bytes are NaN


class KernelProof:
    """Proves one compiled function.

    Attributes:
        name: of the kernel, for messages.
        failure: why the proof failed; empty if it did not fail, or was not made yet.

    The function's words are the addresses of the replaced program's inputs, of the Values that it
    reads in place of weights among these, of its results, and of its scratch memory.
    """

    def __init__(
        self,
        name: str,
        address: int,
        replaces: Program,
        scratch_bytes: Sequence[int],
        *,
        n_derived: int = 0,
        sums: int = -1,
    ) -> None:
        """Keep what a proof needs.

        Args:
            name: of the kernel, for messages.
            address: of the function.
            replaces: the launches that it replaces.
            scratch_bytes: of each range of scratch memory.
            n_derived: the number of Values that it reads in place of weights.
            sums: the launch whose result the others add to and clamp; -1: there is none.
        """
        self._sums = sums
        self._n_given = len(replaces.inputs) + n_derived
        self.name = name
        self._address = address
        self._replaces = replaces
        self._scratch_bytes = tuple(scratch_bytes)
        self.failure = ""

    @outside_graphs
    def prove(self, addresses: Sequence[int]) -> bool:
        """Whether the function does at these addresses what the replaced launches do.

        Run on separate memory, it must write only that, and give their results: the same bits
        unless these are floating-point numbers, else with an error against the same launches in
        float64 of at most ERROR_RATIO times theirs plus ROUNDINGS. Infinities and NaN must all be
        equal. Sums that are added to or clamped were rounded before: ROUNDINGS then refer to the
        larger of both.

        Without memory for this, nothing is proved; without memory for numbers in float64, the
        launches' own results count as exact.

        Raises:
            Whatever the replaced launches raise.
        """
        with plain_torch():
            try:
                return self._prove(addresses)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                self.failure = "there is no memory for a proof beside the execution"
                return False

    def _prove(self, addresses: Sequence[int]) -> bool:
        inputs = self._inputs(addresses)
        recorded = run(self._replaces, inputs)
        ranges = [_Guarded(one.end_bytes) for one in self._results()]
        ranges += [_Guarded(size_bytes) for size_bytes in self._scratch_bytes]
        words = [*addresses[: self._n_given], *(one.address for one in ranges)]
        try:
            _native.call_kernel(self._address, words)
        except RuntimeError as error:
            self.failure = f"it raises where the launches do not: {error}"
            return False
        if not all(one.is_intact() for one in ranges):
            self.failure = "it wrote outside its results"
            return False
        found = [_on(one.content, view) for one, view in zip(ranges, self._results(), strict=False)]
        self.failure = compare(self._replaces, inputs, found, recorded, self._sums)
        return not self.failure

    def _results(self) -> list[TensorView]:
        return [result.view for result in self._replaces.results]

    def _inputs(self, addresses: Sequence[int]) -> list[torch.Tensor]:
        """The bytes of each input, in place."""
        views = self._replaces.inputs
        return [
            _bytes_at(address, view.end_bytes)
            for address, view in zip(addresses, views, strict=False)
        ]


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Run torch without the caller's modes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


class _Guarded:
    """Memory between guards, filled with NaN."""

    def __init__(self, size_bytes: int) -> None:
        self._all = torch.full((size_bytes + 2 * GUARD_BYTES,), _FILL, dtype=torch.uint8)
        self.content = self._all[GUARD_BYTES : GUARD_BYTES + size_bytes]
        self.address = self.content.data_ptr() if size_bytes else self._all.data_ptr() + GUARD_BYTES

    def is_intact(self) -> bool:
        guards = (self._all[:GUARD_BYTES], self._all[GUARD_BYTES + self.content.numel() :])
        return all(bool((guard == _FILL).all()) for guard in guards)


def _bytes_at(address: int, size_bytes: int) -> torch.Tensor:
    content = (ctypes.c_char * size_bytes).from_address(address)
    return torch.frombuffer(content, dtype=torch.uint8)


def _on(content: torch.Tensor, view: TensorView) -> torch.Tensor:
    """A view of a Value with these bytes."""
    tensor = torch.empty(0, dtype=find_dtype(view.dtype), device=content.device)
    offset = int(content.storage_offset()) // tensor.element_size()
    return tensor.set_(content.untyped_storage(), offset, view.shape, view.strides)


def run(
    program: Program, inputs: Sequence[torch.Tensor], besides: Sequence[TensorView] = ()
) -> list[torch.Tensor]:
    """The results of a program without weights, run by plain torch, and some further views."""
    bases = {
        view.value: (content.untyped_storage(), int(content.storage_offset()))
        for view, content in zip(program.inputs, inputs, strict=True)
    }
    run = EagerRun(BoundProgram(program), bases, fill=None)
    for launch in program.launches:
        run.keep(launch, run.call(launch)())
    return [run.tensor(view) for view in (*(one.view for one in program.results), *besides)]


def compare(
    replaces: Program,
    inputs: Sequence[torch.Tensor],
    found: Sequence[torch.Tensor],
    recorded: Sequence[torch.Tensor],
    sums: int,
) -> str:
    """How results of compiled code differ from those of launches; empty if within the tolerance.

    Args:
        replaces: the launches.
        inputs: the bytes of each input.
        found: the results of the code.
        recorded: the results of the launches.
        sums: as of `KernelProof`.
    """
    if all(_same_bits(*one) for one in zip(found, recorded, strict=True)):
        return ""  # whatever the result in float64
    exact, of_sums = _exact(replaces, inputs, sums)
    for number, (one, launched) in enumerate(zip(found, recorded, strict=True)):
        of_this = None if exact is None else exact[number]
        if difference := _difference(one, launched, of_this, of_sums):
            return f"result {number} {difference}"
    return ""


def _exact(
    program: Program, inputs: Sequence[torch.Tensor], sums: int
) -> tuple[list[torch.Tensor] | None, torch.Tensor | None]:
    """The results in float64, and the sums; None if some launch gives another dtype."""
    wide = widened(program)
    if wide is None:
        return None, None
    besides = [next(wide.launches[sums].made())] if sums >= 0 else []
    try:
        found = run(wide, _widened_inputs(program, wide, inputs), besides)
    except CaptureError:  # as for divided integers, which give the default dtype
        return None, None
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        return None, None
    n_results = len(wide.results)
    return found[:n_results], next(iter(found[n_results:]), None)


def _is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether memory ran out.

    torch's allocator of host memory has no exception class of its own (alloc_cpu.cpp of c10).
    """
    is_plain = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return is_plain or "DefaultCPUAllocator: " in str(error)


def _widened_inputs(
    program: Program, wide: Program, inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The same inputs in the dtypes of the wide program, as bytes."""
    found = []
    for view, wide_view, content in zip(program.inputs, wide.inputs, inputs, strict=True):
        if view.dtype == wide_view.dtype:
            found.append(content)
            continue
        values = torch.empty_strided(
            view.shape, view.strides, dtype=find_dtype(wide_view.dtype), device=content.device
        )
        values.copy_(_on(content, view))
        flat = torch.empty(0, dtype=torch.uint8, device=content.device)
        found.append(flat.set_(values.untyped_storage(), 0, (wide_view.end_bytes,), (1,)))
    return found


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of the same layout hold the same bytes."""
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in (one, other)]
    return torch.equal(*(tensor.view(torch.uint8) for tensor in flat))


@dataclasses.dataclass(frozen=True, slots=True)
class _Errors:
    """By row, the distance of numbers from the exact ones, and the largest exact number."""

    of_found: torch.Tensor
    of_recorded: torch.Tensor
    largest: torch.Tensor


def _difference(
    found: torch.Tensor,
    recorded: torch.Tensor,
    exact: torch.Tensor | None,
    sums: torch.Tensor | None,
) -> str:
    """How a kernel's result differs beyond the tolerance; empty if it does not."""
    if not found.dtype.is_floating_point:
        return "" if torch.equal(found, recorded) else "differs in its bits"
    finite = recorded.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return "has infinities or NaN in other places"
    others = [one.where(~finite, 0.0).nan_to_num() for one in (found, recorded)]
    if not torch.equal(*others):
        return "has other infinities or NaN"
    if exact is None or not bool((exact.isfinite() | ~finite).all()):
        exact = recorded.double()
    errors = _errors(found.double(), recorded.double(), exact, finite)
    largest = errors.largest
    if sums is not None:
        numbers = sums.reshape(found.shape).nan_to_num(0.0, 0.0, 0.0)
        largest = largest.maximum(_largest(numbers, finite))
    roundings = ROUNDINGS * torch.finfo(found.dtype).eps * largest
    tolerance = ERROR_RATIO * errors.of_recorded + roundings
    if bool((errors.of_found <= tolerance).all()):
        return ""
    worst = (errors.of_found / tolerance.clamp_min(1e-300)).max()
    return f"is {float(worst):.3g} times as far from float64 as is tolerated"


def _errors(
    found: torch.Tensor, recorded: torch.Tensor, exact: torch.Tensor, finite: torch.Tensor
) -> _Errors:
    return _Errors(
        _largest(found - exact, finite), _largest(recorded - exact, finite), _largest(exact, finite)
    )


def _largest(of: torch.Tensor, finite: torch.Tensor) -> torch.Tensor:
    """By row, the largest of the numbers that are finite in the result."""
    rows = (-1, of.shape[-1]) if of.dim() and of.shape[-1] >= _ROW else (1, -1)
    return of.abs().where(finite, 0.0).reshape(rows).amax(-1)
