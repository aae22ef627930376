"""Programs that contradict themselves are refused; what a Program's launches touch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from small_parts import ROLES, launch, leaves, make, value, view

import offload
from offload.errors import ProgramError
from offload.program import (
    Effect,
    EffectKind,
    Kernel,
    Launch,
    Opaque,
    Operator,
    Overlap,
    Program,
    Result,
    Role,
    Symbol,
    check_program,
    rewrite,
)
from offload.program.structure import Structure


def cut(one: Launch, **changes: object) -> Launch:
    return dataclasses.replace(one, **changes)


WRONG = {
    "launches\\[0\\] uses %4 .*no earlier launch writes": lambda a, b, c: [c],
    "the result contains %5 .*no earlier launch writes": lambda a, b, c: [b],
    "before it is made": lambda a, b, c: [a, c, b],
    "a second time": lambda a, b, c: [a, b, b, c],
    "not declared to read or write": lambda a, b, c: [cut(b, reads=(2,)), c],
    "not declared to write exactly what it makes": lambda a, b, c: [b, cut(c, writes=(5, 0))],
    "name %99, and there are 6 values": lambda a, b, c: [b, cut(c, reads=(4, 1, 99))],
    "covers bytes 16 to 48": lambda a, b, c: [
        b, cut(c, results=(dataclasses.replace(view(5), offset_bytes=16),))
    ],
    "makes the input": lambda a, b, c: [
        cut(b, results=(view(1),), writes=(1,)), launch(0, (2, 3), 4), c
    ],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_what_makes_no_program_is_refused(message):
    program = make()
    launches = WRONG[message](*program.launches)
    with pytest.raises(ProgramError, match=message):
        rewrite(program, launches)


BROKEN = {
    "begins 16 bytes before %1": {
        "launches": (
            launch(0, (1,), 0, arguments=(dataclasses.replace(view(1), offset_bytes=-16),)),
        )
    },
    "has the shape .*expected as many of both": {
        "values": (dataclasses.replace(value(0, Role.ACTIVATION), strides=()), *make().values[1:])
    },
    "has the unknown dtype 'foo'": {
        "values": (dataclasses.replace(value(0, Role.ACTIVATION), dtype="foo"), *make().values[1:])
    },
    "expected an Operator, an Opaque, a Kernel or a TritonKernel as its callee": {
        "launches": (launch(0, (1,), 0, callee="aten::add.Tensor"),)
    },
    "has the index %3": {"values": tuple(value(3, role) for role in ROLES)},
    "has the index 7": {"launches": (launch(7, (2, 3), 4),)},
    "spans 32 bytes, and its size is 4": {
        "values": (dataclasses.replace(value(0, Role.ACTIVATION), size_bytes=4), *make().values[1:])
    },
    "the values of role weight are not those": {"weight_views": {}},
    "the holders of %3 are missing": {"weight_views": {3: ()}},
    "arguments_structure does not hold each input once": {
        "arguments_structure": Structure(
            "tuple", (Structure("tuple", leaves(1)), Structure("dict"))
        )
    },
    "is the activation %0": {"results": (Result(view(0)), Result(view(5)))},
    "is not a pair of the 2 inputs": {"overlaps": (Overlap(0, 2, 0),)},
    "lists inputs that do not overlap": {"overlaps": (Overlap(0, 1, 32),)},
}


@pytest.mark.parametrize("message", BROKEN)
def test_parts_that_contradict_each_other_are_refused(message):
    with pytest.raises(ProgramError, match=message):
        check_program(make(**BROKEN[message]))


def of_kernels(*packed: int) -> Program:
    """A kernel that packs its weight, %1, into %2, and one that reads %2 in its place."""

    def call_of(n_inputs: int) -> Structure:
        return Structure("tuple", (Structure("tuple", leaves(n_inputs)), Structure("dict")))

    def replaced(n_inputs: int) -> Program:
        inputs = tuple(range(n_inputs))
        roles = (*(Role.INPUT for _ in inputs), Role.OUTPUT)
        return make(
            values=tuple(value(index, role) for index, role in enumerate(roles)),
            launches=(launch(0, inputs, n_inputs),),
            inputs=tuple(view(one) for one in inputs),
            results=(Result(view(n_inputs)),),
            arguments_structure=call_of(n_inputs),
            result_structure=Structure("tensor", leaf=0),
            overlaps=(),
            weight_views={},
        )

    def kernel(index: int, reads: tuple[int, ...], makes: int, callee: Kernel) -> Launch:
        return launch(
            index, reads, makes, callee=callee, arguments=tuple(view(one) for one in reads)
        )

    roles = (Role.INPUT, Role.WEIGHT, Role.DERIVED, Role.OUTPUT)
    packs, uses = Kernel(0, replaced(1), derives=True), Kernel(1, replaced(2), packed=packed)
    return make(
        values=tuple(value(index, role) for index, role in enumerate(roles)),
        launches=(kernel(0, (1,), 2, packs), kernel(1, (0, 1, 2), 3, uses)),
        inputs=(view(0),),
        results=(Result(view(3)),),
        arguments_structure=call_of(1),
        result_structure=Structure("tensor", leaf=0),
        overlaps=(),
        weight_views={1: (view(1),)},
    )


@pytest.mark.parametrize(
    ("packed", "said"),
    [
        ((1, 2), "has no derived values in place of"),
        ((1, 9), "has no derived values in place of"),
        ((0,), "does not read a value that is not a weight"),
    ],
)
def test_a_kernel_reads_derived_values_in_place_of_weights(packed, said):
    check_program(of_kernels(1))
    check_program(of_kernels())
    with pytest.raises(ProgramError, match=said):
        check_program(of_kernels(*packed))


def test_memory_that_begins_without_content_is_no_lost_content():
    """As from torch.empty: no launch makes it, and the first launch that uses it writes it."""
    filling = launch(0, (0,), 0, arguments=(view(0),), results=(None,))
    program = make(launches=(filling, launch(1, (2, 3), 4), launch(2, (4, 0), 5)))
    assert len(rewrite(program, list(program.launches)).program.launches) == 3
    with pytest.raises(ProgramError, match=r"uses %0 .*no earlier launch writes"):
        rewrite(program, program.launches[1:])


def test_memory_that_is_read_before_it_is_written_has_no_content_to_lose():
    reading = launch(0, (2, 0), 4)
    filling = launch(1, (0,), 0, arguments=(view(0),), results=(None,))
    program = make(launches=(reading, filling, launch(2, (4, 1), 5)))
    found = rewrite(program, [reading, filling, launch(2, (4, 0), 5)]).program
    assert len(found.launches) == 3


def test_a_captured_program_is_whole():
    with torch.no_grad():
        captured = offload.capture(torch.nn.GRU(4, 4, 2), torch.randn(3, 1, 4))
    check_program(captured.program)


def effects(**changes: object) -> set[Effect]:
    return set(launch(0, (1,), 0, **changes).effects)


def test_a_launch_knows_what_it_touches_besides_bytes():
    assert effects() == set()
    assert effects(random=True) == {Effect(EffectKind.GENERATOR, "0")}
    own = (view(1), Symbol("generator", "2"))
    assert effects(random=True, arguments=own) == {Effect(EffectKind.GENERATOR, "2")}
    assert effects(guard=False) == effects(guards_shape=True) == {Effect(EffectKind.GUARD)}
    assert effects(callee=Operator("mine::op")) == {Effect(EffectKind.UNSEEN)}
    assert effects(callee=Opaque(0, "said so")) == {Effect(EffectKind.UNSEEN)}
    reduce = Operator("_c10d_functional::all_reduce")
    assert effects(callee=reduce, arguments=(view(1), "sum", "world")) == {
        Effect(EffectKind.GROUP, "world")
    }
    wait = Operator("_c10d_functional::wait_tensor")
    assert effects(callee=wait, arguments=(view(1),)) == {Effect(EffectKind.GROUP)}
