"""Reports of an executable: its latest execution and its memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from offload.console.amounts import show_bytes
from offload.native import _native
from offload.plan import Plan, SlotKind


@dataclasses.dataclass(frozen=True, slots=True)
class LastExecution:
    """What one execution did.

    Attributes:
        convert_ns: arguments checked, outputs allocated, addresses bound.
        drain_ns: waiting until torch has delivered its own queue, where it has one (torch_npu).
        policy_ns: deciding what changed.
        patch_ns: writing the words that depend on it.
        submit_ns: until the first launch began, or on a device that queues work until the program
            was given to it; by host scheduling, until delivery began.
        device_ns: the launches, by host scheduling with their delivery; on a device that queues
            work only the host's remaining work.
        policy: `none`, `io` (inputs or outputs moved) or `all` (feature map or weights too).
        slots_changed, words_patched: how much of the header changed.
        bytes_copied: copied because a tensor could not be used in place, or because a copy is
            cheaper than re-setting the nodes that hold its address.
        outputs_allocated: results without a given buffer.
        n_executions: of this executable, this one included.
        bytes_streamed: of weights, transferred for this execution, partly while the previous one
            ran: every streamed byte exactly once per execution, and the gathered rows.
        stream_timed_bytes: those of bytes_streamed whose transfers were timed. This and the
            following are None where they were not measured, or no weights are streamed: a CUDA
            device measures only executions inside `run.timeline()`, and an Ascend device only
            pass_ns of these.
        stream_busy_ns: the duration of their transfers.
        stream_wait_ns: the part of pass_ns in which launches waited for weights, gathering
            included.
        pass_ns: the launches and their waits, until the outputs were ready; on a device that queues
            work from the device's begin of the execution, by its own clock.
        stream_waits: for each launch that waited (launch, ns), in the order of launches; only
            inside `run.timeline()`.
        substages_ns: the parts of submit, in the device's own words and order: the substages in
            which this execution had work, together submit_ns. Empty where the device does not
            report them, and with host scheduling.
        launches_proved: launches that it ran by two routes and compared before it used the faster
            one: on the CPU in the first execution, 0 later and on other devices.
        proof_ns: the part of device_ns that the proof took beyond the launches themselves.
        sizes_were_ready: where sizes vary, whether the instance of these sizes was kept; None
            elsewhere.
        prepare_sizes_ns: the part of convert_ns that made the instance.
        resize_ns: the part of convert_ns that changed the program's sizes from those of the
            previous execution; 0 where they are the same.
        was_promoted: the sizes have their own executable, which has executed.
    """

    convert_ns: int
    policy_ns: int
    patch_ns: int
    submit_ns: int
    device_ns: int
    policy: str
    slots_changed: int
    words_patched: int
    bytes_copied: int
    outputs_allocated: int
    n_executions: int
    bytes_streamed: int = 0
    stream_timed_bytes: int | None = None
    stream_busy_ns: int | None = None
    stream_wait_ns: int | None = None
    pass_ns: int | None = None
    stream_waits: tuple[tuple[int, int], ...] | None = None
    drain_ns: int = 0
    substages_ns: Mapping[str, int] = dataclasses.field(default_factory=dict)
    launches_proved: int = 0
    proof_ns: int = 0
    sizes_were_ready: bool | None = None
    prepare_sizes_ns: int = 0
    resize_ns: int = 0
    was_promoted: bool = False

    @classmethod
    def of(cls, native: _native.LastExecution, substages: Sequence[str]) -> LastExecution:
        """Convert the native record; the substages of submit are those of its device."""
        kept = {
            field.name: getattr(native, field.name)
            for field in dataclasses.fields(cls)
            if field.name not in ("substages_ns", "was_promoted")
        }
        if kept["stream_waits"] is not None:
            summed = Counter[int]()
            for launch, wait_ns in kept["stream_waits"]:
                summed[launch] += wait_ns
            kept["stream_waits"] = tuple(sorted(summed.items()))
        times = {name: end - begin for name, begin, end in substages_of(native, substages)}
        return cls(**kept, substages_ns=times)

    @property
    def m_l_t_ns(self) -> int:
        """The header's duration: convert, drain, policy, patch and submit."""
        return self.convert_ns + self.drain_ns + self.policy_ns + self.patch_ns + self.submit_ns

    @property
    def stream_bytes_per_second(self) -> float | None:
        """The transfer rate of weights during transfers; None where unknown."""
        if not self.stream_timed_bytes or not self.stream_busy_ns:
            return None
        return 1e9 * self.stream_timed_bytes / self.stream_busy_ns

    def __str__(self) -> str:
        drain = f"drain {self.drain_ns / 1e3:.2f} + " if self.drain_ns else ""
        submit = ", ".join(f"{name} {ns / 1e3:.2f}" for name, ns in self.substages_ns.items())
        header = (
            f"m_l_t {self.m_l_t_ns / 1e3:.2f} us = convert {self.convert_ns / 1e3:.2f} + "
            f"{drain}policy {self.policy_ns / 1e3:.2f} + patch {self.patch_ns / 1e3:.2f} + submit "
            f"{self.submit_ns / 1e3:.2f}{f' ({submit})' if submit else ''}; "
            f"device {self.device_ns / 1e3:.2f} us; policy "
            f"{self.policy}: {self.slots_changed} slots changed, {self.words_patched} words "
            f"patched, {self.bytes_copied} bytes copied"
        )
        if self.was_promoted:
            header += "; sizes promoted"
        elif self.sizes_were_ready is not None:
            ready = "ready" if self.sizes_were_ready else "new"
            taken = f", prepared in {self.prepare_sizes_ns / 1e3:.2f} us"
            header += f"; sizes {ready}{'' if self.sizes_were_ready else taken}"
            header += f", resized in {self.resize_ns / 1e3:.2f} us" if self.resize_ns else ", kept"
        if self.launches_proved:
            header += f"; proved {self.launches_proved} launches, {self.proof_ns / 1e3:.2f} us"
        if not self.bytes_streamed:
            return header
        text = f"{header}; {show_bytes(self.bytes_streamed)} of weights streamed"
        if self.stream_bytes_per_second is not None:
            text += f" at {show_bytes(round(self.stream_bytes_per_second))}/s"
        if self.stream_wait_ns is not None:
            text += f", waited for {self.stream_wait_ns / 1e3:.2f} us"
        elif self.pass_ns is not None:
            text += f", launches and waits {self.pass_ns / 1e3:.2f} us"
        return text


def substages_of(
    native: _native.LastExecution, substages: Sequence[str]
) -> Iterator[tuple[str, int, int]]:
    """Yield (name, begin, end) of each substage of submit in which an execution had work."""
    begin_ns = native.patched_ns
    for name, end_ns in zip(substages, native.substage_ends_ns, strict=False):
        if end_ns:
            yield name, begin_ns, end_ns
            begin_ns = end_ns


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """The proof by the first execution of the routes that later ones use.

    Attributes:
        n_launches: launches that it ran by two routes and compared.
        n_failed: those whose faster variant failed; they run as recorded.
        ns: the duration beyond the launches themselves.
    """

    n_launches: int
    n_failed: int
    ns: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """The memory of an executable, in bytes.

    Attributes:
        feature_map_bytes: the arena.
        lower_bound_bytes: a lower bound for any arena of these activations.
        unshared_bytes: their size without sharing.
        outside_bytes: allocated by operators at each execution, outside the arena, results
            included; None before the first execution counted it.
        buffer_bytes: buffers of inputs and outputs that are always copied.
        weight_bytes: all weights, held by reference or streamed under a budget.
        derived_bytes: values made from weights and kept beside them: packed for kernels.
        discarded_bytes: the part of `weight_bytes` whose memory (of weights in files) was freed, as
            only packed copies are needed; 0 before the first execution has proved the kernels.
        graph_bytes: memory that the device took to make the graph executable, by its free memory
            before and after: 0 before the first execution, and where it does not report it.
    """

    feature_map_bytes: int
    lower_bound_bytes: int
    unshared_bytes: int
    outside_bytes: int | None
    buffer_bytes: int
    weight_bytes: int
    derived_bytes: int
    discarded_bytes: int
    graph_bytes: int = 0

    @classmethod
    def of(
        cls,
        plan: Plan,
        copied: Iterable[int],
        *,
        outside_bytes: int | None,
        discarded_bytes: int,
        graph_bytes: int,
    ) -> MemoryReport:
        """The memory of an executable with this plan; `copied`: slots that are always copied."""
        return cls(
            feature_map_bytes=plan.feature_map_bytes,
            lower_bound_bytes=plan.lower_bound_bytes,
            unshared_bytes=plan.unshared_bytes,
            outside_bytes=outside_bytes,
            buffer_bytes=sum(plan.slots[slot].size_bytes for slot in copied),
            weight_bytes=sum(slot.size_bytes for slot in plan.of_kind(SlotKind.WEIGHT)),
            derived_bytes=sum(slot.size_bytes for slot in plan.of_kind(SlotKind.DERIVED)),
            discarded_bytes=discarded_bytes,
            graph_bytes=graph_bytes,
        )
