"""The table from which kernels read their arguments: its words, and its model."""

from __future__ import annotations

from offload.backends.ascend.kernels import GatherKernel, KernelCapture
from offload.backends.ascend.refresh import Gather
from offload.backends.ascend.streaming import StreamedWeights
from offload.backends.native_kinds import slot_triggers
from offload.errors import CaptureError
from offload.native import _native
from offload.plan import Plan
from offload.program import Program


def make_resident(
    captured: KernelCapture,
    program: Program,
    plan: Plan,
    *,
    device: int,
    arena_bytes: int,
    form: str | None,
    gather: Gather | None,
    copies_on_device: bool,
    streamed: StreamedWeights,
) -> _native.AscendResident:
    """Return a model of the kernels, which read their arguments from its table.

    Args:
        captured: the kernels of `program`, which `plan` places.
        program: the program, whose launches are counted.
        plan: where each Value lies.
        device: its index.
        arena_bytes: of its own feature map; 0 where executions provide one.
        form: how the model is made: see `AscendBackend`.
        gather: gathers the table's words on the device; None: the host writes them.
        copies_on_device: tensors lie in the device's memory.
        streamed: the weights that it streams.

    Raises:
        CaptureError: a kernel takes the address of a Value without a place.
        BackendUnavailable: the runtime cannot make a model in this form.
        ExecutionError: the runtime failed; the message says whether memory or streams ran out.
    """
    words, relocations = table_words(captured, program, plan)
    return _native.AscendResident(
        device=device,
        arena_bytes=arena_bytes,
        kernels=[
            (one.function, one.n_blocks, one.launch, one.arguments) for one in captured.kernels
        ],
        words=words,
        relocations=relocations,
        triggers=slot_triggers(plan),
        n_launches=len(program.launches),
        form=form,
        copies_on_device=copies_on_device,
        gather=(gather.function, gather.n_blocks) if isinstance(gather, GatherKernel) else gather,
        steps=streamed.steps_of_model(),
        for_next_pass=streamed.for_next_pass,
        own_addresses=[
            (block, own.offset_bytes, own.target_bytes)
            for block, one in enumerate(captured.kernels)
            for own in one.own_addresses
        ],
        keep=(captured.keep, gather),
    )


def table_words(
    captured: KernelCapture, program: Program, plan: Plan
) -> tuple[list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Return (block, offset in bytes) of each word that is an address; its (word, slot, offset).

    Raises:
        CaptureError: a kernel takes the address of a Value without a place.
    """
    words: list[tuple[int, int]] = []
    relocations: list[tuple[int, int, int]] = []
    for block, kernel in enumerate(captured.kernels):
        for address in kernel.addresses:
            place = plan.places[address.value]
            if place is None:
                launch = program.launches[kernel.launch]
                raise CaptureError(
                    f"{launch.source}: a kernel of {launch.name} takes the address of "
                    f"{program.values[address.value].name}, which has no place: the capturer has "
                    "to name Values that the launch reads or writes"
                )
            offset_bytes = place.offset_bytes + address.value_offset_bytes
            relocations.append((len(words), place.slot, offset_bytes))
            words.append((block, address.offset_bytes))
    return words, relocations
