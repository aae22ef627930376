"""The streamed weights of an executable: the plan in words, counts, new content."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from offload.backends import managed_weights, native_source
from offload.console.amounts import show_bytes
from offload.console.progress import stage
from offload.errors import BindingError, ExecutionError
from offload.interpreter.torch_names import dtype_name
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.program import ITEM_BYTES, BoundProgram, Program, StoredTensor, is_dense
from offload.run.launch_waits import beyond_launches_ns, launch_waits
from offload.run.reports import LastExecution

_SHOWN_WAITS = 10


class WeightStreaming:
    """The weights of one executable that lie in its own memory, and the transfers into it.

    Owner: an Executable. Thread: any.

    Attributes:
        plan: where weights lie, and the transfers of a pass.
    """

    def __init__(
        self,
        bound: BoundProgram,
        plan: Streaming,
        stream: _native.WeightStream | _native.DeviceWeightStream,
        check_stored: Callable[[], None],
        executions: Callable[[], tuple[LastExecution, LastExecution]],
        *,
        wait_for_submitted: Callable[[], None],
    ) -> None:
        """Made at load; `executions` returns the latest execution, and the latest in a timeline."""
        self.plan = plan
        self._wait_for_submitted = wait_for_submitted
        self._executions = executions
        self._program = bound.program
        self._stored = bound.bindings.stored
        self._stream = stream
        self._check_stored = check_stored
        self._replaced: set[str] = set()
        self._numbers = {value: number for number, value in enumerate(managed_weights(bound))}

    @property
    def bytes_moved(self) -> int:
        """Bytes moved by transfers and as gathered rows since the executable was loaded."""
        return self._stream.bytes_moved

    @property
    def replaced(self) -> frozenset[str]:
        """The names of the weights whose content `replace` has changed."""
        return frozenset(self._replaced)

    @property
    def wait_ns(self) -> int | None:
        """The time that launches have waited for weights since the executable was loaded.

        None on a device that queues work, which measures only executions in a timeline.
        """
        return self._stream.wait_ns

    @property
    def discarded_bytes(self) -> int:
        """Freed bytes of weights of which only packed copies are needed."""
        return self._stream.discarded_bytes

    @property
    def store_bytes(self) -> int | None:
        """Bytes of host memory that the device copies from; None where files are read.

        Bytes shared with other executables of the same files count as well: see
        `shared_store_bytes`. 0 once the executable is closed.
        """
        return self._stream.store_bytes

    @property
    def shared_store_bytes(self) -> int | None:
        """The part of `store_bytes` shared with other executables; None where files are read."""
        return self._stream.shared_store_bytes

    def refresh(self) -> None:
        """Read all weights again, after their stored content has changed.

        What executions have written to weights in files is replaced by the stored content.
        Executions submitted before begin before it; the next one waits for all in flight and sees
        the new content. Other executables that share the same bytes in host memory keep them: this
        one gets separate memory where the content differs. On an NPU, where a model's copies read
        from their captured addresses, such an execution is an ExecutionError instead.

        Raises:
            FileError: a file is missing, or its tensors lie at other offsets than when the model
                was captured.
            ExecutionError: the executable is closed, or one of its launches calls this.
        """
        self._wait_for_submitted()
        self._check_stored()
        self._stream.refresh()

    def replace(self, weights: Mapping[str, torch.Tensor | StoredTensor]) -> None:
        """Replace the content of weights from the next execution on, without loading again.

        Executions submitted before have the old content: this waits until the last of them has
        begun. Other executables keep their content: this one gets separate host memory where they
        share it.

        Args:
            weights: by the weight's name, as the program prints it, or as it is stored, a tensor
                (copied) or its place in a file.

        Raises:
            BindingError: the name matches no weight or several; the new content is not a plain
                tensor, has no content (on the meta device), freed or shrunk memory, or another
                shape or dtype; or the weight's layout is not that of a tensor of its shape. No
                weight was replaced.
            FileError: a file cannot be read; no weight was replaced.
            ExecutionError: on an NPU, another executable has the bytes of a streamed weight in the
                same memory (`load(share_store=False)`); the executable is closed; or one of its
                launches calls this. No weight was replaced.
        """
        if not isinstance(weights, Mapping):
            raise BindingError(
                "expected tensors or places in files by the names of weights, got a "
                f"{type(weights).__qualname__}"
            )
        values = {name: self._value_of(name) for name in weights}
        sources = {
            self._numbers[values[name]]: native_source(
                _laid_out_like(self._program, values[name], name, content)
            )
            for name, content in weights.items()
        }
        if len(sources) < len(weights):
            raise BindingError(f"{', '.join(weights)}: several of these name one weight")
        self._wait_for_submitted()
        self._stream.replace(sources)
        self._replaced.update(self._program.values[value].name for value in values.values())

    def _value_of(self, name: str) -> int:
        names: dict[str, set[int]] = {}
        for value in self._numbers:
            names.setdefault(self._program.values[value].name, set()).add(value)
            if value in self._stored:
                names.setdefault(self._stored[value].name, set()).add(value)
        found = names.get(name, set())
        if len(found) != 1:
            raise BindingError(
                f"{name}: {'several weights' if found else 'no weight'} of this name "
                f"{'are' if found else 'is'} streamed or resident here; there are "
                f"{', '.join(sorted(names))}"
            )
        return found.pop()

    def explain(self) -> str:
        """Describe what is resident or streamed, and passes: predicted, why, and measured."""
        plan = self.plan
        if plan.is_resident:  # without transfers there is nothing to predict or measure
            return (
                f"weights: {show_bytes(self._weight_bytes)}, all of which stay\n"
                f"budget {show_bytes(plan.budget_bytes)}: {show_bytes(plan.taken_bytes)} used\n"
                f"least budget: {show_bytes(plan.floor.required_bytes)}, set by {plan.floor.name}"
            )
        streamed = [piece for piece in plan.pieces if piece.streamed]
        lines = [
            f"weights: {show_bytes(self._weight_bytes)}, of which {show_bytes(plan.resident_bytes)}"
            f" stay and {show_bytes(plan.transfer_bytes)} are streamed at each execution"
            + self._tables_text(),
            f"budget {show_bytes(plan.budget_bytes)}: {show_bytes(plan.taken_bytes)} used, "
            f"{show_bytes(plan.ring_bytes)} of it as the ring of {len(plan.transfers)} transfers",
            f"link: {show_bytes(plan.link.bytes_per_second)}/s and "
            f"{plan.link.overhead_ns / 1e3:.1f} us for each copy{self._row_text()}, as measured",
            f"predicted: {plan.period_ns / 1e6:.3f} ms; all weights resident "
            f"{plan.compute_ns / 1e6:.3f} ms; no plan is quicker than {plan.roofline_ns / 1e6:.3f} "
            f"ms ({plan.roofline_ns / plan.period_ns:.1%})"
            if plan.period_ns
            else "predicted: nothing to compute",
            self._measured(),
            f"least budget: {show_bytes(plan.floor.required_bytes)}, set by {plan.floor.name} "
            f"(ring {show_bytes(plan.floor.ring_bytes)}, resident "
            f"{show_bytes(plan.floor.resident_bytes)}), at which {plan.floor.period_ns / 1e6:.3f} "
            "ms are predicted",
        ]
        lines.append(
            f"  times of launches are estimates from their bytes: {plan.estimated}"
            if plan.estimated
            else "  times of launches were measured, on made-up inputs"
            + (f": {plan.timing}" if plan.timing else "")
        )
        lines += self._store_lines()
        lines += self._waits_by_launch()
        n_copies = Counter(plan.pieces[one.piece].value for one in plan.transfers)
        for piece in sorted(streamed, key=lambda one: -one.size_bytes):
            value = self._program.values[piece.value]
            lines.append(
                f"  streamed: {value.name} {show_bytes(piece.size_bytes)}"
                + f" of {show_bytes(value.size_bytes)}" * (piece.size_bytes < value.size_bytes)
                + f", {n_copies[piece.value]} times" * (n_copies[piece.value] > 1)
            )
        return "\n".join([*lines, *self._gathered_lines()])

    def _store_lines(self) -> Iterator[str]:
        if self.store_bytes:
            yield (
                f"store: {show_bytes(self.store_bytes)} of the host's memory, of which "
                f"{show_bytes(self.shared_store_bytes or 0)} are shared with other executables"
            )

    def _tables_text(self) -> str:
        tables = {one.value for one in self.plan.gathers}
        if not tables:
            return ""
        tables_bytes = sum(self._program.values[value].size_bytes for value in tables)
        return (
            f"; of {show_bytes(tables_bytes)} of tables {show_bytes(self.plan.gathered_bytes)} "
            "of rows are gathered"
        )

    def _row_text(self) -> str:
        link = self.plan.link
        if not self.plan.gathers or link.row_overhead_ns is None:
            return ""
        return f", {link.row_overhead_ns / 1e3:.1f} us for each row"

    def _gathered_lines(self) -> Iterator[str]:
        """Yield for each table how many rows an execution reads, and how they are read."""
        modes: list[str] = []
        with contextlib.suppress(ExecutionError):  # closed, and no longer reading
            modes = self._stream.read_modes
        for value, reads in itertools.groupby(self.plan.gathers, lambda one: one.value):
            gathers, table = list(reads), self._program.values[value]
            mode = modes[self._numbers[value]] if modes else ""
            way = {"memory": " from memory", "buffered": " through the page cache"}.get(mode, "")
            n_rows, row_bytes = sum(one.n_rows for one in gathers), gathers[0].row_bytes
            yield (
                f"  gathered: {table.name} {n_rows} rows of {show_bytes(row_bytes)}, "
                f"{show_bytes(n_rows * row_bytes)} of {show_bytes(table.size_bytes)}{way}"
            )

    def _measured(self) -> str:
        last, traced = self._executions()
        if not last.n_executions:
            return "measured: nothing has been executed yet"
        which = "the last execution"
        if last.pass_ns is None and traced.pass_ns is not None:
            which = f"execution {traced.n_executions} of {last.n_executions}, last in a timeline"
            last = traced
        if last.pass_ns is None:
            return (
                f"measured: {show_bytes(last.bytes_streamed)} streamed for the last execution; how "
                "long copies and launches take here is measured only inside run.timeline(), if at "
                "all, and not with scheduling by the host"
            )
        text = f"measured: {last.pass_ns / 1e6:.3f} ms by {which}, "
        if last.stream_wait_ns is None:
            return text + self._beyond_launches(last.pass_ns)
        text += f"of which launches waited {last.stream_wait_ns / 1e6:.3f} ms for weights; "
        if last.stream_bytes_per_second is None:
            return f"{text}{show_bytes(last.bytes_streamed)} streamed"
        rate = f"at {show_bytes(last.stream_bytes_per_second)}/s"
        if last.stream_timed_bytes == last.bytes_streamed:
            return f"{text}{show_bytes(last.bytes_streamed)} streamed {rate}"
        return (
            f"{text}{show_bytes(last.bytes_streamed)} streamed, of which "
            f"{show_bytes(last.stream_timed_bytes or 0)} were timed, {rate}"
        )

    def _beyond_launches(self, pass_ns: int) -> str:
        """Describe the waits where the device reports only the duration of the whole pass."""
        why = (
            "which launches wait, and how long copies take, is not measured: events inside a "
            "captured model report no times"
        )
        if (exposed_ns := beyond_launches_ns(self.plan, pass_ns)) is None:
            return (
                f"how much of it is waiting is not known, as times of launches are estimates; {why}"
            )
        relation = "more" if exposed_ns >= 0 else "less"
        return (
            f"{abs(exposed_ns) / 1e6:.3f} ms {relation} than the {self.plan.compute_ns / 1e6:.3f} "
            f"ms of its launches when they were timed one by one without copies; {why}"
        )

    def _waits_by_launch(self) -> Iterator[str]:
        """Yield the longest waits of the last execution in a timeline, beside predicted ones."""
        _, traced = self._executions()
        waits = launch_waits(self._program, self.plan, traced)
        for one in waits[:_SHOWN_WAITS]:
            yield (
                f"  waited in execution {traced.n_executions}: launch {one.launch} {one.operator} "
                f"{one.measured_ns / 1e6:.3f} ms, {one.predicted_ns / 1e6:.3f} ms predicted"
            )
        if rest := waits[_SHOWN_WAITS:]:
            yield (
                f"  waited in execution {traced.n_executions}: {len(rest)} other launches "
                f"{sum(one.measured_ns for one in rest) / 1e6:.3f} ms, "
                f"{sum(one.predicted_ns for one in rest) / 1e6:.3f} ms predicted"
            )

    @property
    def _weight_bytes(self) -> int:
        return sum(self._program.values[value].size_bytes for value in self._numbers)


def read_weights(stream: _native.WeightStream | _native.DeviceWeightStream) -> None:
    """Read the weights that stay on the device; report the progress."""
    with stage("reading weights", stream.load_bytes) as current:
        stream.load(current.reach if current.is_reported else None)


def _is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a dense tensor has the memory order of files."""
    used = [stride for size, stride in zip(shape, strides, strict=True) if size > 1]
    return used == sorted(used, reverse=True)


def _laid_out_like(
    program: Program, value: int, name: str, content: torch.Tensor | StoredTensor
) -> torch.Tensor | StoredTensor:
    """Return new content of a weight; a tensor is copied into the weight's layout.

    Raises:
        BindingError: the content is not a plain tensor with content, its memory was freed or
            shrunk, its shape or dtype differs, or the weight's layout is not dense.
    """
    expected = program.values[value]
    if isinstance(content, StoredTensor):
        dtype = content.dtype
    elif not isinstance(content, torch.Tensor):
        raise BindingError(
            f"{name}: expected a tensor or a StoredTensor, got a {type(content).__qualname__}"
        )
    elif content.is_meta or content.layout != torch.strided:
        raise BindingError(
            f"{name}: expected a dense tensor with content, got one on {content.device} of layout "
            f"{content.layout}"
        )
    else:
        _native.check_memory(name, content)
        dtype = dtype_name(content.dtype)
    same = tuple(content.shape) == expected.shape and dtype == expected.dtype
    n_bytes = math.prod(content.shape) * ITEM_BYTES.get(dtype, 0)
    view = program.weight_views[value][0]
    is_whole = is_dense(view.shape, view.strides) and not (view.conjugate or view.negative)
    if isinstance(content, StoredTensor):
        is_whole = is_whole and _is_row_major(view.shape, view.strides)
    if not same or not is_whole or n_bytes != expected.size_bytes:
        raise BindingError(
            f"{name}: expected {expected.dtype}{list(expected.shape)} with strides "
            f"{list(view.strides)} in {expected.size_bytes} bytes, got {dtype}{list(content.shape)}"
        )
    if isinstance(content, StoredTensor):
        return content
    copy = torch.empty_strided(view.shape, view.strides, dtype=content.dtype)
    return copy.copy_(content.detach())
