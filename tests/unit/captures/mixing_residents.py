"""Residents written in Python whose memory is the host's, and the proof of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from offload.backends.captured.relocation.proof import apart, prove
from offload.backends.captured.relocation.proof_bases import Placed
from offload.backends.captured.relocation.steadiness import Steadiness
from offload.plan import Lifetime, Plan, place_values
from offload.plan.topology import CostTable, Machine
from offload.program import (
    Bindings,
    BoundProgram,
    Launch,
    Operator,
    Program,
    Result,
    Role,
    TensorView,
    Value,
)
from offload.program.structure import Structure

IN, ACT, OUT, WEIGHT = Role.INPUT, Role.ACTIVATION, Role.OUTPUT, Role.WEIGHT

MACHINE = Machine("cuda", "test", 0, 256, CostTable())

N_BYTES = 64


class HostMemory:
    """No address is allocated twice, so that a missed word points to no address in use."""

    def __init__(self) -> None:
        self.blocks: dict[int, object] = {}
        self.freed: list[object] = []

    def allocate(self, size_bytes: int) -> int:
        block = ctypes.create_string_buffer(max(size_bytes, 1))
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int) -> None:
        self.freed.append(self.blocks.pop(address))

    def fill(self, address: int, size_bytes: int) -> None:
        ctypes.memset(address, 0, size_bytes)

    def write(self, address: int, content: bytes) -> None:
        ctypes.memmove(address, content, len(content))

    def chunks(self, address: int, size_bytes: int, chunk_bytes: int) -> Iterator[torch.Tensor]:
        for begin in range(0, size_bytes, chunk_bytes):
            n_bytes = min(chunk_bytes, size_bytes - begin)
            content = (ctypes.c_ubyte * n_bytes).from_address(address + begin)
            yield torch.frombuffer(content, dtype=torch.uint8)

    def copy(self, destination: int, source: int, size_bytes: int) -> None:
        ctypes.memmove(destination, source, size_bytes)


class MixingResident:
    """Each node mixes its sources and its number byte by byte into its destination.

    `frozen` words keep their first address.
    """

    def __init__(self, nodes: Sequence[tuple[Sequence[int], int]], frozen: Sequence[int] = ()):
        self.nodes = nodes
        self.frozen = frozen
        self.words: dict[int, int] = {}
        self.noise: dict[tuple[int, int, int], bytes] = {}
        self.n_executions = 0

    def draw(self, state: int) -> None:
        """Nothing is random."""

    def overwrite(self, word: tuple[int, int, int], content: bytes) -> None:
        self.noise[word] = content

    def patch(self, patches: list[tuple[int, int]]) -> None:
        for word, address in patches:
            if word not in self.frozen or word not in self.words:
                self.words[word] = address

    def execute(self) -> None:
        for number, (sources, destination) in enumerate(self.nodes):
            mixed = [number + 1] * N_BYTES
            for source in sources:
                content = ctypes.string_at(self.words[source], N_BYTES)
                mixed = [(3 * one + other) % 256 for one, other in zip(mixed, content, strict=True)]
            ctypes.memmove(self.words[destination], bytes(mixed), N_BYTES)
        self.n_executions += 1

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


def make_bound(roles: Sequence[Role], dtype: str = "float32", **changes: object) -> BoundProgram:
    """Return a Program of values with these roles; a launch writes each that is no input."""
    items = {"float32": 16, "int64": 8}[dtype]
    values = tuple(
        Value(index, role, (items,), (1,), dtype, N_BYTES, f"{role}{index}")
        for index, role in enumerate(roles)
    )
    views = [TensorView(one.index, 0, one.shape, one.strides, dtype) for one in values]
    launches = tuple(
        Launch(
            index, Operator("sim::xor"), (), (), (one.index,), (one.index,), False, None, False, ""
        )
        for index, one in enumerate(values)
        if one.role is not IN
    )
    fields = {
        "device": "cuda",
        "values": values,
        "launches": launches,
        "inputs": tuple(views[one.index] for one in values if one.role is IN),
        "results": tuple(Result(views[one.index]) for one in values if one.role is OUT),
        "arguments_structure": Structure("tuple"),
        "result_structure": Structure("tuple"),
    }
    live = {name: changes.pop(name) for name in ("weights", "input_samples") if name in changes}
    return BoundProgram(Program(**{**fields, **changes}), Bindings(**live))


# input 0 -> activation 1 -> activation 2 -> output 3, which reads activation 1 as well
ROLES = (IN, ACT, ACT, OUT)

WORDS = (0, 1, 1, 2, 1, 2, 3)  # the Value of each word

NODES = (((0,), 1), ((2,), 3), ((4, 5), 6))

LIFETIMES = (Lifetime(0, 3), Lifetime(0, 3), Lifetime(1, 3), Lifetime(0, 3))


def placed(plan: Plan, resident: MixingResident, words: Sequence[int] = WORDS) -> Placed:
    """Return the resident in the plan's places; `words`: the Value of each word."""
    relocations = [
        (word, plan.places[value].slot, plan.places[value].offset_bytes)
        for word, value in enumerate(words)
    ]
    return Placed(plan, resident, relocations, draw=resident.draw)


def run_proof(
    bound: BoundProgram,
    loaded: MixingResident,
    unshared: MixingResident | None = None,
    *,
    lifetimes: Sequence[Lifetime] = LIFETIMES,
    words: Sequence[int] = WORDS,
    plan: Plan | None = None,
    **options: object,
) -> Steadiness:
    """Prove that `loaded` can move, and that the proof keeps no memory.

    Args:
        bound: the Program.
        loaded: the resident that moves.
        unshared: the resident in which no Values share memory; None: one that mixes, of the
            same nodes.
        lifetimes: those of the Values, for the plan.
        words: the Value of each word.
        plan: the places of `loaded`; None: those by `lifetimes`.
        **options: more arguments of `prove`.
    """
    plan = plan or place_values(bound.program, MACHINE, lifetimes=lifetimes)
    unshared = unshared or MixingResident(loaded.nodes)
    memory = HostMemory()
    found = prove(
        bound,
        placed(plan, loaded, words),
        placed(apart(bound.program, plan), unshared, words),
        memory,
        describe=lambda one: f"kernel {one.node} word {one.offset_bytes}",
        **options,
    )
    assert memory.blocks == {}
    return found
