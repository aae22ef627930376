"""The checker of Steps, on lanes that no planner makes yet: launches on two of them."""

import dataclasses

import pytest

from offload.errors import PlanError
from offload.plan.check_steps import Touch, check_steps
from offload.plan.steps import Lane, LaneKind, Record, Run, Wait

ARENA, GENERATOR = "arena", "generator 0"


@dataclasses.dataclass
class Launches:
    """For each launch what it reads and writes, as (value, begin, end), and its effects."""

    reads: list[list[tuple[str, int, int]]]
    writes: list[list[tuple[str, int, int]]]
    effects: dict[int, str] = dataclasses.field(default_factory=dict)

    def at_first(self):
        return iter(())

    def of_launch(self, launch, execution):
        for is_write, touched in ((False, self.reads), (True, self.writes)):
            for value, begin, end in touched[launch]:
                yield Touch(ARENA, begin, end, (value, execution), is_write)
        if launch in self.effects:
            yield Touch(self.effects[launch], 0, 1, None, True)

    def of_copy(self, copy, execution):
        raise AssertionError(copy)

    def launch_name(self, launch):
        return f"launch {launch}"

    def copy_name(self, copy):
        return f"the copy of {copy.piece}"


A, B, C, D = ("a", 0, 10), ("b", 10, 20), ("c", 20, 30), ("d", 30, 40)

DIAMOND = Launches(
    reads=[[], [A], [A], [B, C]],
    writes=[[A], [B], [C], [D]],
)
"""Launch 0, then 1 beside 2, then 3 after both."""

FIRST = (Run(0, 1), Record(0), Run(1, 2), Wait(1), Run(3, 4), Record(2))
SECOND = (Wait(2, age=1), Wait(0), Run(2, 3), Record(1))


def check(touches, first=FIRST, second=SECOND, n_launches=4):
    lanes = [Lane(LaneKind.LAUNCHES, tuple(one)) for one in (first, second)]
    check_steps(lanes, n_launches, touches)


def test_a_diamond():
    check(DIAMOND)
    check(DIAMOND, FIRST, SECOND[1:])  # the next launch 0 implies that launch 3 has ended


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, (SECOND[0], *SECOND[2:])),
        ((*FIRST[:3], *FIRST[4:]), SECOND),
        ((*FIRST[:3], Run(3, 4), Wait(1), Record(2)), SECOND),
    ],
    ids=["launch 2", "launch 3", "launch 3"],
)
def test_a_diamond_without_one_of_its_waits(first, second, request):
    with pytest.raises(PlanError, match=request.node.callspec.id[:8]):
        check(DIAMOND, first, second)


@pytest.mark.parametrize("by", [-10, -1, 1, 10])
def test_a_moved_value(by):
    """C shares bytes with a value that exists at the same time, on another lane."""
    moved = ("c", C[1] + by, C[2] + by)
    touches = dataclasses.replace(
        DIAMOND, reads=[[], [A], [A], [B, moved]], writes=[[A], [B], [moved], [D]]
    )
    with pytest.raises(PlanError):
        check(touches)
    free = ("c", 50, 60)
    check(
        dataclasses.replace(
            DIAMOND, reads=[[], [A], [A], [B, free]], writes=[[A], [B], [free], [D]]
        )
    )


def test_a_result_over_what_its_launch_reads():
    with pytest.raises(
        PlanError, match="launch 1 writes bytes 0 to 10 of arena, which launch 1 reads"
    ):
        check(dataclasses.replace(DIAMOND, writes=[[A], [("b", 0, 10)], [C], [D]]))
    in_place = dataclasses.replace(DIAMOND, writes=[[A], [B], [C], [B]])
    check(in_place)  # the same value, which it also reads


def test_a_part_that_nobody_has_written():
    longer = ("a", 0, 11)
    with pytest.raises(PlanError, match="launch 1 would not find what it reads at bytes 10 to 11"):
        check(dataclasses.replace(DIAMOND, reads=[[], [longer], [A], [B, C]]))


def test_the_next_execution_waits_for_what_is_read_now():
    """The next execution's first lane first writes what the second lane reads last."""
    touches = Launches(reads=[[], [A]], writes=[[A], [B]])
    first, second = (Run(0, 1), Record(0)), (Wait(0), Run(1, 2), Record(1))
    with pytest.raises(
        PlanError, match="launch 0 writes bytes 0 to 10 of arena, which launch 1 reads"
    ):
        check(touches, first, second, n_launches=2)
    check(touches, (Wait(1, age=1), *first), second, n_launches=2)


def test_effects_keep_their_order():
    both = dataclasses.replace(DIAMOND, effects={1: GENERATOR, 2: GENERATOR})
    with pytest.raises(PlanError, match=r"launch 2 writes .* launch 1 writes"):
        check(both)
    check(dataclasses.replace(DIAMOND, effects={1: GENERATOR, 3: GENERATOR}))
    check(dataclasses.replace(DIAMOND, effects={1: GENERATOR, 2: "generator 1"}))
