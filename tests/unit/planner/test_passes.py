"""Passes on hand-made programs: no device, nothing recorded."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from small_programs import ACT, IN, MACHINE, OUT, WEIGHT, launch, program

from offload.errors import PlanError
from offload.plan import Lifetime, Place, SlotKind, check_plan, place_values, value_lifetimes
from offload.program import Operator, span_bytes
from offload.program.dead_launches import remove_dead_launches


def test_dead_launch_and_its_values_go():
    dead = program(
        [IN, ACT, ACT, OUT], [launch(0, [0], 1), launch(1, [1], 2), launch(2, [0], 3)], 3
    )
    alive = remove_dead_launches(dead).program
    assert [one.name for one in alive.launches] == ["aten::relu"]
    assert [one.role for one in alive.values] == [IN, OUT]
    assert alive.launches[0].writes == (1,)
    assert alive.results[0].view.value == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"random": True},
        {"guard": True},
        {"guards_shape": True},
        {"writes": (), "results": (None,)},
        {"callee": Operator("mine::custom")},
    ],
)
def test_launches_with_effects_stay(changes):
    kept = program([IN, ACT, OUT], [launch(0, [0], 1, **changes), launch(1, [0], 2)], 2)
    assert len(remove_dead_launches(kept).program.launches) == 2


def test_writes_to_inputs_and_weights_stay():
    writer = launch(0, [0, 1], 1, results=(None,))
    kept = program([IN, WEIGHT, OUT], [writer, launch(1, [0], 2)], 2)
    assert len(remove_dead_launches(kept).program.launches) == 2


def test_write_into_a_value_that_is_read_later_stays():
    """v1 is made, written in place, then read: the write must not be dropped."""
    write = launch(1, [1], 1, results=(None,))
    kept = program([IN, ACT, OUT], [launch(0, [0], 1), write, launch(2, [1], 2)], 2)
    assert len(remove_dead_launches(kept).program.launches) == 3


def test_lifetimes():
    chain = program(
        [IN, ACT, ACT, OUT], [launch(0, [0], 1), launch(1, [1], 2), launch(2, [2], 3)], 3
    )
    assert value_lifetimes(chain) == (
        Lifetime(0, 3),
        Lifetime(0, 2),
        Lifetime(1, 3),
        Lifetime(0, 3),
    )


def test_chain_needs_two_places():
    roles = [IN, *[ACT] * 9, OUT]
    chain = program(roles, [launch(index, [index], index + 1) for index in range(10)], 10)
    plan = place_values(chain, MACHINE)
    check_plan(chain, plan)
    assert plan.feature_map_bytes == plan.lower_bound_bytes == 128
    assert plan.unshared_bytes == 9 * 64
    offsets = [plan.places[index].offset_bytes for index in range(1, 10)]
    assert all(one != other for one, other in itertools.pairwise(offsets))


def test_operator_allocated_values_get_slots_of_their_own():
    chain = program(
        [IN, ACT, ACT, OUT], [launch(0, [0], 1), launch(1, [1], 2), launch(2, [2], 3)], 3
    )
    plan = place_values(chain, MACHINE, frozenset({1, 3}))
    assert plan.slots[plan.places[1].slot].kind is SlotKind.OPERATOR
    assert plan.slots[plan.places[3].slot].kind is SlotKind.OUTPUT
    assert plan.feature_map_bytes == 64


def test_same_program_same_plan():
    chain = program(
        [IN, ACT, ACT, OUT], [launch(0, [0], 1), launch(1, [1], 2), launch(2, [2], 3)], 3
    )
    assert place_values(chain, MACHINE) == place_values(chain, MACHINE)


@pytest.mark.parametrize(
    ("index", "place", "message"),
    [
        (1, None, "has no place"),
        (1, Place(1, 1 << 20), "covers bytes"),
        (1, Place(2, 4), "not aligned"),
        (0, Place(2, 0), "in the feature map"),
    ],
)
def test_checker_refuses_a_broken_plan(index, place, message):
    chain = program(
        [IN, ACT, ACT, OUT], [launch(0, [0], 1), launch(1, [1], 2), launch(2, [2], 3)], 3
    )
    plan = place_values(chain, MACHINE)
    assert plan.slots[2].kind is SlotKind.FEATURE_MAP
    places = list(plan.places)
    places[index] = place
    with pytest.raises(PlanError, match=message):
        check_plan(chain, dataclasses.replace(plan, places=tuple(places)))


@pytest.mark.parametrize("by_bytes", [0, 64, -64, 128])
def test_checker_refuses_a_moved_value(by_bytes):
    """Three values, of which two exist at a time: any other place overlaps another value."""
    chain = program(
        [IN, ACT, ACT, ACT, OUT], [launch(index, [index], index + 1) for index in range(4)], 4
    )
    plan = place_values(chain, MACHINE)
    places = list(plan.places)
    places[2] = dataclasses.replace(places[2], offset_bytes=places[2].offset_bytes + by_bytes)
    moved = dataclasses.replace(plan, places=tuple(places))
    if by_bytes == 0:
        check_plan(chain, moved)
    else:
        with pytest.raises(PlanError):
            check_plan(chain, moved)


def test_program_prints_itself():
    chain = program([IN, ACT, OUT], [launch(0, [0], 1), launch(1, [1], 2)], 2)
    text = str(chain)
    assert "2 launches" in text
    assert "%1:float32[16] = aten::relu(%0:float32[16])  # test.py:1" in text
    assert text.endswith("return %2:float32[16]")


def test_span_bytes():
    assert span_bytes((2, 3), (3, 1), "float32") == 24
    assert span_bytes((2, 3), (8, 1), "float16") == 22
    assert span_bytes((0, 3), (3, 1), "float32") == 0
    assert span_bytes((), (), "complex128") == 16
