"""A captured model whose kernels' arguments are patched: the words of a Plan, proof, notes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from offload.backends.ascend.captured_table import patched_tasks
from offload.backends.ascend.torch_relocation import BoundModel
from offload.backends.captured.opaque_weights import device_weights
from offload.backends.captured.relocation.proof import prove
from offload.backends.captured.relocation.proof_bases import Placed
from offload.backends.captured.relocation.touches import relocations_of
from offload.backends.loaded import Prepared
from offload.interpreter.device_failures import failure_of_torch
from offload.native import _native
from offload.plan import Plan
from offload.program import Program, Role


@dataclasses.dataclass(frozen=True, slots=True)
class PatchedArguments:
    """The words that a resident patches in the arguments of kernels.

    Attributes:
        blocks: (address, content) of each argument block that holds a word.
        words: (block, offset in bytes) of each word.
        places: (slot, offset in bytes) of each word.
        home: stands for the feature map at its captured address; 0 where it does not move.
    """

    blocks: Sequence[tuple[int, bytes]] = ()
    words: Sequence[tuple[int, int]] = ()
    places: Sequence[tuple[int, int]] = ()
    home: int = 0


def patched_arguments(bound: BoundModel, plan: Plan) -> PatchedArguments:
    """Return the words of a bound model as a Plan places them; empty if it copies everything."""
    if bound.words is None:
        return PatchedArguments()
    discovery = bound.words.discovery
    tasks = patched_tasks(bound.words)
    block_of = {task: block for block, task in enumerate(tasks)}
    return PatchedArguments(
        [(bound.tasks[task].address, bound.tasks[task].arguments) for task in tasks],
        [(block_of[word.node], word.offset_bytes) for word in discovery.words],
        [(slot, offset_bytes) for _, slot, offset_bytes in relocations_of(discovery, plan)],
        next((address for _, _, address in _pieces(bound, plan)), 0),
    )


def _pieces(bound: BoundModel, plan: Plan) -> list[tuple[int, int, int]]:
    """Return (offset in the feature map, bytes, captured address) of the pool's moving pieces."""
    if bound.words is None:
        return []
    n_pieces = len(bound.words.discovery.scratch_bytes)
    first = len(plan.places) - n_pieces
    pool = bound.model.log.pool[:n_pieces]
    return sorted(
        (place.offset_bytes, size_bytes, address)
        for place, (address, size_bytes) in zip(plan.places[first:], pool, strict=True)
        if place is not None
    )


# ---- the proof ----------------------------------------------------------------------------------


def prove_relocation(
    prepared: Prepared, plan: Plan, bound: BoundModel, device: int, stream: int
) -> None:
    """Execute the loaded resident itself: twice where it was captured, then with all slots moved.

    A twin would patch the same argument blocks. The first execution patches all words again.

    Raises:
        CaptureError: results or written state differ, or memory of the capture was written.
        OutOfMemory: the device has no memory for the proof.
        ExecutionError: the device failed.
    """
    program = prepared.program
    resident = bound.residents[-1]()
    assert resident is not None  # it is being loaded
    assert bound.words is not None  # checked by `prove`
    relocations = relocations_of(bound.words.discovery, plan)
    relocations += [
        (len(relocations) + index, plan.slot_of(one.value), 0)
        for index, one in enumerate(bound.model.moving)
    ]
    home = {
        plan.slot_of(value): address
        for value, address in bound.model.log.places.items()
        if program.values[value].role in (Role.INPUT, Role.OUTPUT)
        and value not in bound.words.copied
    }
    pieces = _pieces(bound, plan)
    if pieces:
        home[plan.feature_map.index] = pieces[0][2]
    shared = frozenset() if pieces else frozenset(slot.index for slot in plan.slots)
    outputs = {plan.slot_of(value.index) for value in program.of_role(Role.OUTPUT)}
    states = _states(bound)

    def draw(state: int) -> None:
        resident.set_stream(stream)
        resident.set_random(states[state])

    placed = Placed(
        plan,
        _Provable(resident, stream),
        relocations,
        home=home,
        shared=shared & outputs,
        draw=draw,
    )
    written = {index for launch in program.launches for index in launch.writes}
    fixed = [value for value in device_weights(program) if value.index in written]
    torch.get_device_module("npu").synchronize(device)
    streamed = {index: one.data_ptr() for index, one in bound.streamed.storages.items()}
    memory = ProofMemory(device, pieces)
    steadiness = prove(prepared.bound, placed, placed, memory, fixed=fixed, streamed=streamed)
    bound.proved[:] = steadiness.notes()
    if bound.streamed.stream is not None:
        bound.streamed.stream.forget_transfers()


def _states(bound: BoundModel) -> list[list[int]]:
    """Return the seeds and offsets of the next two executions; generators do not advance.

    Raises:
        ExecutionError: the device failed.
    """
    generators = bound.model.random_states
    try:
        return [[one for state in generators for one in state.numbers(n)] for n in range(2)]
    except RuntimeError as error:
        raise failure_of_torch(error, "reading the state of a generator failed") from error


class _Provable:
    """The resident as the proof drives it."""

    def __init__(self, resident: _native.AscendCapturedResident, stream: int) -> None:
        self._resident = resident
        self._stream = stream

    def patch(self, patches: list[tuple[int, int]]) -> None:
        self._resident.patch(patches)

    def overwrite(self, word: tuple[int, int, int], content: bytes) -> None:
        raise AssertionError("a captured model has no words that are noise")

    def execute(self) -> None:
        self._resident.set_stream(self._stream)
        self._resident.execute()

    def finish(self) -> None:
        self._resident.finish()

    def close(self) -> None:
        """Do nothing: its loader closes it."""


class ProofMemory:
    """torch's memory for executions that are not the user's, such as those of the proof.

    The pool of a capture consists of pieces, and counts as one block.
    """

    def __init__(self, device: int, pieces: Sequence[tuple[int, int, int]] = ()) -> None:
        self._device = device
        self._pieces = pieces
        self._home = pieces[0][2] if pieces else 0
        self._blocks: dict[int, torch.Tensor] = {}

    def allocate(self, size_bytes: int) -> int:
        """Allocate zeros.

        Raises:
            OutOfMemory: there is no memory; the message says how to load without the proof.
            ExecutionError: the device failed.
        """
        block = self.take(max(size_bytes, 512))
        self._blocks[block.data_ptr()] = block
        self.fill(block.data_ptr(), block.nbytes)
        return block.data_ptr()

    def take(self, size_bytes: int) -> torch.Tensor:
        """Allocate bytes that earlier users have finished with; errors as `allocate`."""
        on_npu = torch.device("npu", self._device)
        try:
            block = torch.empty(size_bytes, dtype=torch.uint8, device=on_npu)
        except RuntimeError as error:
            raise failure_of_torch(
                error,
                f"the proof needs another {size_bytes} bytes of device memory (load(verify=False) "
                "leaves it out)",
            ) from error
        torch.get_device_module("npu").synchronize(self._device)  # its former users have ended
        return block

    def free(self, address: int) -> None:
        """Free one block."""
        del self._blocks[address]

    def fill(self, address: int, size_bytes: int) -> None:
        """Write zeros."""
        self.write(address, bytes(size_bytes))

    def write(self, address: int, content: bytes) -> None:
        """Copy from the host."""
        for at, begin, size_bytes in self._ranges(address, len(content)):
            part = content[begin : begin + size_bytes]
            _native.ascend_write_memory(self._device, at, part)

    def chunks(self, address: int, size_bytes: int, chunk_bytes: int) -> Iterator[torch.Tensor]:
        """Yield its bytes (uint8) in order, in chunks of at most `chunk_bytes`, on the host."""
        for begin in range(0, size_bytes, chunk_bytes):
            end = min(begin + chunk_bytes, size_bytes)
            content = b"".join(
                _native.ascend_read_memory(self._device, at + from_ - first, to - from_)
                for at, first, part_bytes in self._ranges(address, size_bytes)
                for from_, to in [(max(begin, first), min(end, first + part_bytes))]
                if from_ < to
            )
            yield torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        """Copy on the device."""
        for at, begin, part_bytes in self._ranges(source, size_bytes):
            _native.ascend_copy_memory(self._device, destination + begin, at, part_bytes)

    def _ranges(self, address: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (address, offset, bytes) of the memory at an address: only the pool has pieces."""
        if address != self._home:
            yield address, 0, size_bytes
            return
        for offset_bytes, piece_bytes, at in self._pieces:
            if offset_bytes < size_bytes:
                yield at, offset_bytes, min(piece_bytes, size_bytes - offset_bytes)


# ---- notes --------------------------------------------------------------------------------------


def notes_of(
    bound: BoundModel, program: Program, resident: _native.AscendCapturedResident
) -> tuple[str, ...]:
    """Describe the memory, what is patched and what is copied, why, and the cost so far."""
    model = bound.model
    if bound.words is None:
        return (
            "one model, captured by torch_npu: activations, and copies of inputs and outputs, "
            f"stay in {model.pool_bytes} bytes of its pool",
            f"inputs and outputs: {_who_copies(model.copies, resident)}; kernels' own arguments "
            f"are not relocated: {bound.why_copied}",
        )
    words = bound.words
    counts = resident.refresh_counts
    blocks = {word.node for word in words.discovery.words}
    notes = [
        f"one model, captured by torch_npu in {model.pool_bytes} bytes of its pool; the feature "
        + (f"map stays there: {words.why_fixed}" if words.why_fixed else "map can move"),
        f"addresses of kernel arguments: {len(words.discovery.words)} words in {len(blocks)} "
        f"blocks {bound.arguments}; {counts['copies']} copies of {counts['bytes_copied']} bytes so "
        "far",
    ]
    notes += [
        f"{program.values[value].name} is copied: {why}"
        for value, why in sorted(words.copied.items())
    ]
    if model.moving:
        notes.append(f"copied: {_who_copies(model.copies, resident)}")
    return (*notes, *bound.proved)


def _who_copies(
    copies: _native.AscendMovingCopies | None, resident: _native.AscendCapturedResident
) -> str:
    counts: Mapping[str, int] = resident.copy_counts
    if copies is not None and copies.form == "captured":
        return (
            f"tasks of the model copy them, with addresses from a table ({counts['refreshes']} "
            f"refreshes of {counts['bytes_refreshed']} bytes so far)"
        )
    return f"the host copies them around the model ({counts['enqueued']} copies so far)"
