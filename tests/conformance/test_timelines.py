"""What every backend records of an execution: spans, their order and number; nothing when off."""

from __future__ import annotations

import itertools

import pytest
import torch

import offload
from offload.load.options import delivering
from offload.timeline import Scheduling, SpanKind


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2 + 1).sin()


def test_off_it_reads_no_clock(load):
    run = load(chain, torch.ones(8))
    for _ in range(100):
        run(torch.randn(8))
    with run.timeline() as timeline:
        pass
    assert timeline.executions == ()
    assert timeline.clock_reads == 0


def test_spans_of_one_execution(load, scheduling):
    run = load(chain, torch.ones(8))
    run(torch.ones(8))
    with run.timeline() as timeline:
        run(torch.randn(8))
    (one,) = timeline.executions
    last = run.last_execution
    n_launches = len(run.program.launches)
    assert one.number == last.n_executions == 2
    assert one.scheduling == scheduling == run.scheduling
    assert (one.policy, one.slots_changed, one.words_patched, one.bytes_copied) == (
        last.policy,
        last.slots_changed,
        last.words_patched,
        last.bytes_copied,
    )
    stages = one.of_kind(SpanKind.STAGE)
    names = [stage.name for stage in stages]
    if last.drain_ns:  # in the middle of the conversion on the caller's thread
        assert names[:2] == ["convert", "drain"]
        del names[:2]
    assert names == ["convert", "convert", "policy", "patch", "submit"]
    assert one.m_l_t_ns == last.m_l_t_ns
    substages = one.of_kind(SpanKind.SUBSTAGE)
    assert {part.name: part.duration_ns for part in substages} == last.substages_ns
    assert not (substages and scheduling is Scheduling.HOST)
    if substages:  # in sequence they fill submit
        assert sum(last.substages_ns.values()) == last.submit_ns
        assert substages[0].begin_ns == stages[-1].begin_ns
        for earlier, later in itertools.pairwise(substages):
            assert earlier.end_ns == later.begin_ns
    launches = one.of_kind(SpanKind.LAUNCH)
    assert [span.launch for span in launches] == list(range(n_launches))
    assert [span.name for span in launches] == [one.name for one in run.program.launches]
    for earlier, later in itertools.pairwise(launches):
        assert earlier.end_ns <= later.begin_ns
    assert stages[-1].end_ns <= launches[0].begin_ns
    assert one.begin_ns == 0
    assert all(span.begin_ns <= span.end_ns for span in one.spans)
    assert list(one.spans) == sorted(one.spans, key=lambda span: span.begin_ns)


def test_host_scheduling_issues_every_launch_before_it_runs(backend, load, scheduling):
    run = load(chain, torch.ones(8))
    with run.timeline() as timeline:
        run(torch.randn(8))
    (one,) = timeline.executions
    issues = one.of_kind(SpanKind.ISSUE)
    if scheduling is Scheduling.OFFLOAD:
        assert issues == ()
        return
    launches = one.of_kind(SpanKind.LAUNCH)
    assert [span.launch for span in issues] == [span.launch for span in launches]
    assert [span.name for span in issues] == [one.name for one in run.program.launches]
    used = delivering(backend, scheduling)
    if used.dispatch is used and not used.capabilities.queues_work:  # seen as it is delivered
        assert [span.begin_ns for span in issues] == [span.begin_ns for span in launches]
    for issue, launch in zip(issues, launches, strict=True):
        assert issue.begin_ns <= launch.begin_ns
        assert issue.lane != launch.lane


def test_clock_reads_are_counted(backend, load, scheduling):
    run = load(chain, torch.ones(8))
    n_launches = len(run.program.launches)
    with run.timeline() as timeline:
        for _ in range(3):
            run(torch.randn(8))
    reads_of_launch = {Scheduling.OFFLOAD: 1, Scheduling.HOST: 4}[scheduling]
    used = delivering(backend, scheduling)
    if used.dispatch is used:
        reads_of_launch = 1  # the host sees only its delivery
    if run.device == "null" and scheduling is Scheduling.OFFLOAD:
        reads_of_launch = 0  # its clock is virtual
    if backend.capabilities.queues_work and scheduling is Scheduling.OFFLOAD:
        reads_of_launch = 0  # the host is not involved when a launch of a graph begins
    assert timeline.clock_reads == 3 * (1 + n_launches * reads_of_launch)
    assert timeline.clock_read_ns > 0
    assert timeline.recording_cost_ns == round(timeline.clock_reads * timeline.clock_read_ns)


def test_several_executions_and_submitted_ones(load):
    run = load(chain, torch.ones(8))
    run(torch.ones(8))
    with run.timeline() as timeline:
        run(torch.randn(8))
        for ticket in [run.submit(torch.randn(8)) for _ in range(3)]:
            ticket.wait()
    run(torch.ones(8))
    assert [one.number for one in timeline.executions] == [2, 3, 4, 5]
    for earlier, later in itertools.pairwise(timeline.executions):
        first_of = [one.of_kind(SpanKind.LAUNCH)[0].begin_ns for one in (earlier, later)]
        assert first_of[0] <= first_of[1]


def test_copies_are_transfers(load):
    run = load(chain, torch.ones(4, 2))
    with run.timeline() as timeline:
        run(torch.randn(4, 4)[:, ::2])
    (one,) = timeline.executions
    (copy,) = one.of_kind(SpanKind.TRANSFER)
    assert (copy.name, copy.size_bytes) == ("copy in", 4 * 2 * 4)
    assert one.bytes_copied == copy.size_bytes


def test_two_timelines_at_once_are_refused(load):
    run = load(chain, torch.ones(8))
    with run.timeline() as timeline:
        with pytest.raises(offload.ExecutionError, match="already"), run.timeline():
            pass
        run(torch.ones(8))
    assert len(timeline.executions) == 1


def test_an_error_in_the_block_keeps_what_was_recorded(load):
    run = load(chain, torch.ones(8))

    def block(recording):
        with recording as timeline:
            timelines.append(timeline)
            run(torch.ones(8))
            run(torch.ones(9))

    timelines = []
    with pytest.raises(offload.BindingError):
        block(run.timeline())
    (timeline,) = timelines
    assert len(timeline.executions) == 1


def test_timelines_of_two_executables_on_one_axis(backend):
    with offload.capture(chain) as captured:
        captured(torch.ones(8))
    recorded = []
    for one in Scheduling:
        run = captured.load(device=backend.name, scheduling=one)
        with run.timeline() as timeline:
            run(torch.ones(8))
        recorded.append(timeline)
    both = recorded[1].together(recorded[0])
    assert [one.scheduling for one in both.executions] == list(Scheduling)
    first, second = both.executions
    assert first.begin_ns == 0
    assert second.begin_ns == recorded[1].origin_ns - recorded[0].origin_ns >= first.end_ns
    assert second.m_l_t_ns == recorded[1].executions[0].m_l_t_ns
    assert both.clock_reads == sum(one.clock_reads for one in recorded)
    with pytest.raises(offload.TimelineError, match="one device"):
        both.together(offload.Timeline("another", "machine", {}))


@pytest.mark.parametrize("n_called", [2, 3, 4])
def test_a_timeline_of_so_many_executions(load, n_called):
    run = load(chain, torch.ones(8))
    timelines = []

    def block():
        with run.timeline(executions=3) as timeline:
            timelines.append(timeline)
            for _ in range(n_called):
                run(torch.randn(8))

    if n_called == 3:
        block()
    else:
        with pytest.raises(offload.errors.TimelineError, match=f"expected 3 .* got {n_called}"):
            block()
    assert len(timelines[0].executions) == n_called


def test_a_timeline_of_no_execution_is_refused(load):
    run = load(chain, torch.ones(8))
    with pytest.raises(offload.errors.TimelineError, match="at least 1, got 0"):
        run.timeline(executions=0).__enter__()
