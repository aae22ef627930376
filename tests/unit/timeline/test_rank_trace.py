"""Timelines of ranks in one trace: a process for each rank, times on the first rank's clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from timelines import both_schedulings, offloaded, timeline

from offload.distributed.clocks import DRIFT_PPM, ClockOffset
from offload.errors import ExecutionError, TimelineError
from offload.timeline import Timeline
from offload.timeline.rank_timelines import RankTimeline, RankTimelines, gather_timelines

OFFSET_NS = 5_000_000
ERROR_NS = 700


def at(origin_ns: int, made: Timeline) -> Timeline:
    made.origin_ns = origin_ns
    return made


def of_ranks(*, is_same_clock: bool = True) -> RankTimelines:
    """Rank 1 began 3 us after rank 0, and its clock is 5 ms ahead."""
    first = at(1_000_000, both_schedulings(3))
    second = at(1_003_000 + OFFSET_NS, timeline([offloaded(4)]))
    return RankTimelines(
        (
            RankTimeline(0, first, ClockOffset(0, 0.0, 0.0, 1_000_000, is_same_clock=True)),
            RankTimeline(1, second, ClockOffset(1, OFFSET_NS, ERROR_NS, 1_000_000, is_same_clock)),
        ),
        world_size=2,
    )


def saved(found: RankTimelines, folder: Path) -> dict[str, Any]:
    found.save(folder / "ranks.json")
    trace: dict[str, Any] = json.loads((folder / "ranks.json").read_text())
    return trace


def alone(made: Timeline, folder: Path) -> list[dict[str, Any]]:
    made.save(folder / "alone.json")
    events = json.loads((folder / "alone.json").read_text())["traceEvents"]
    return [one for one in events if one["ph"] != "M"]


def test_each_rank_is_a_process_with_its_own_events(tmp_path: Path) -> None:
    found = of_ranks()
    trace = saved(found, tmp_path)
    events = [one for one in trace["traceEvents"] if one["ph"] != "M"]
    for one, shift_us in zip(found.ranks, (0.0, 3.0), strict=True):
        expected = alone(one.timeline, tmp_path)
        here = [event for event in events if event["pid"] == one.rank]
        assert [event["name"] for event in here] == [event["name"] for event in expected]
        shifts = [got["ts"] - own["ts"] for got, own in zip(here, expected, strict=True)]
        assert shifts == pytest.approx([shift_us] * len(shifts), abs=1e-6)
    named = [one for one in trace["traceEvents"] if one["name"] == "process_name"]
    assert [(one["pid"], one["args"]["name"][:6]) for one in named] == [
        (0, "rank 0"),
        (1, "rank 1"),
    ]
    threads = [one for one in trace["traceEvents"] if one["name"] == "thread_name"]
    assert {one["pid"] for one in threads} == {0, 1}
    assert all(": " in one["args"]["name"] for one in threads)


def test_numbers_of_flows_and_calls_are_of_one_rank(tmp_path: Path) -> None:
    trace = saved(of_ranks(), tmp_path)
    for kind in ("flow", "call"):
        ranks: dict[int, set[int]] = {}
        for one in trace["traceEvents"]:
            number = one.get("id") if kind == "flow" else one.get("args", {}).get("correlation")
            if number is not None:
                ranks.setdefault(number, set()).add(one["pid"])
        assert len(ranks) > 4
        assert all(len(one) == 1 for one in ranks.values())


def test_the_file_says_how_exact_it_is(tmp_path: Path) -> None:
    alignment = saved(of_ranks(), tmp_path)["clockAlignment"]
    assert alignment["reference_rank"] == 0
    assert [one["offset_ns"] for one in alignment["ranks"]] == [0, OFFSET_NS]
    assert [one["error_ns"] for one in alignment["ranks"]] == [0, ERROR_NS]


def test_clocks_of_two_machines_drift() -> None:
    found = of_ranks(is_same_clock=False)
    last = max(one.end_ns for one in found.ranks[1].timeline.executions)
    age_ns = 3_000 + last
    assert found.error_ns == pytest.approx(ERROR_NS + age_ns * DRIFT_PPM / 1e6)


def test_empty_timelines_and_other_names_are_refused(tmp_path: Path) -> None:
    found = of_ranks()
    empty = RankTimelines(
        tuple(RankTimeline(one.rank, timeline([]), one.offset) for one in found.ranks), 2
    )
    with pytest.raises(TimelineError, match="of all ranks are empty"):
        empty.save(tmp_path / "ranks.json")
    with pytest.raises(TimelineError, match=r"must end in \.json"):
        found.save(tmp_path / "ranks.txt")
    assert not list(tmp_path.iterdir())


def test_without_a_group_there_is_nothing_to_gather_through() -> None:
    with pytest.raises(ExecutionError, match="init_process_group"):
        gather_timelines(timeline([offloaded(1)]))


@pytest.mark.filterwarnings("ignore")
def test_hta_reads_it(tmp_path: Path) -> None:
    from hta.trace_analysis import TraceAnalysis

    whole = of_ranks()
    few = RankTimeline(0, at(1_000_000, timeline([offloaded(3)])), whole.ranks[0].offset)
    found = RankTimelines((few, whole.ranks[1]), 2)  # HTA numbers events in one byte
    found.save(tmp_path / "ranks.json.gz")
    analysis = TraceAnalysis(trace_files={0: str(tmp_path / "ranks.json.gz")})
    events = analysis.t.get_trace(0)
    assert set(events["pid"]) == {0, 1}
    n_launches = sum(
        sum(span.kind == "launch" for span in one.spans)
        for rank in found.ranks
        for one in rank.timeline.executions
    )
    assert int((events["stream"] >= 0).sum()) == n_launches
