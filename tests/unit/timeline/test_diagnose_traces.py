"""Idle time of devices: the rule, Kineto trace files, and Holistic Trace Analysis's results."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from offload.errors import DiagnosisError, FileError
from offload.observe.diagnosis import (
    Confidence,
    DeviceWork,
    LaneIdle,
    Verdict,
    diagnose_timeline,
    diagnose_trace,
    split_idle,
)
from offload.observe.diagnosis.kineto import read_kineto
from offload.timeline import HOST_LANE, ExecutionTimeline, Span, SpanKind, Timeline

Event = dict[str, Any]


class Trace:
    """A Kineto trace under construction; times in us."""

    def __init__(self) -> None:
        # A first event without times: Holistic Trace Analysis takes row 0 as the launch of kernels
        # without a launch.
        self.events: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}}
        ]
        self._correlation = 100_000  # pandas 3 fails in the peer where ids fit into 8 bits

    def complete(self, category: str, name: str, ts: float, dur: float, **args: Any) -> None:
        where = {"pid": 0, "tid": 7} if "stream" in args else {"pid": 99, "tid": 99}
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, **where, "args": args}
        )

    def kernel(
        self,
        ts: float,
        dur: float,
        *,
        launched: float | None,
        stream: int = 7,
        category: str = "kernel",
    ) -> None:
        """A kernel; `launched` is the beginning of the host's call for it, which takes 2 us."""
        self._correlation += 1
        if launched is not None:
            self.complete(
                "cuda_runtime", "cudaLaunchKernel", launched, 2, correlation=self._correlation
            )
        self.complete(
            category, "gemm", ts, dur, stream=stream, device=0, correlation=self._correlation
        )

    def save(self, path: Path) -> Path:
        # Holistic Trace Analysis expects the rank on a separate line.
        document = {"schemaVersion": 1, "distributedInfo": {"rank": 0}, "traceEvents": self.events}
        path.write_text(json.dumps(document, indent=1))
        return path


def parts_us(lane: LaneIdle) -> dict[str, float]:
    return {
        "busy": lane.busy_ns / 1000,
        "host_wait": lane.host_wait_ns / 1000,
        "kernel_wait": lane.kernel_wait_ns / 1000,
        "other": lane.other_ns / 1000,
    }


def three_gaps() -> Trace:
    """One gap of each kind: 40 us host wait, 10 us kernel wait, 100 us other."""
    trace = Trace()
    trace.kernel(100, 20, launched=50)
    trace.kernel(160, 20, launched=150)
    trace.kernel(190, 20, launched=155)
    trace.kernel(310, 20, launched=160)
    return trace


# ---- the rule -----------------------------------------------------------------------------------


def test_each_kind_of_gap(tmp_path: Path) -> None:
    idle = split_idle(read_kineto(three_gaps().save(tmp_path / "t.json")).work)
    assert parts_us(idle.whole) == {"busy": 80, "host_wait": 40, "kernel_wait": 10, "other": 100}
    assert idle.whole.span_ns == 230_000
    assert [lane.lane for lane in idle.lanes] == ["stream 7"]


def work(begin: int, end: int, issued: int | None, lane: str = "a") -> DeviceWork:
    return DeviceWork(lane, begin, end, issued)


def test_the_limits_of_the_rule() -> None:
    """A launch begun exactly when the lane became idle is no host wait; the limit is excluded."""
    assert split_idle([work(0, 10, 0), work(20, 30, 10)], 11).whole.kernel_wait_ns == 10
    assert split_idle([work(0, 10, 0), work(20, 30, 10)], 10).whole.other_ns == 10
    assert split_idle([work(0, 10, 0), work(20, 30, 11)], 11).whole.host_wait_ns == 10


def test_work_without_a_launch_record_is_never_host_wait() -> None:
    idle = split_idle([work(0, 10, None), work(20, 30, None), work(100, 110, None)], 15).whole
    assert (idle.n_unlinked, idle.host_wait_ns) == (3, 0)
    assert (idle.kernel_wait_ns, idle.other_ns) == (10, 70)


def test_overlapping_work_on_one_lane_is_not_idle() -> None:
    """The long kernel is busy until 100, though a short one began and ended within it."""
    idle = split_idle([work(0, 100, 0), work(10, 20, 5), work(110, 120, 90)]).whole
    assert (idle.busy_ns, idle.kernel_wait_ns, idle.host_wait_ns) == (110, 10, 0)


def test_lanes_fill_each_others_gaps() -> None:
    idle = split_idle(
        [work(0, 10, 0), work(50, 60, 40), work(5, 45, 0, "b"), work(60, 70, 0, "b")], 1
    )
    assert idle.whole.host_wait_ns == 0
    assert idle.whole.other_ns == 5
    assert [(lane.lane, lane.host_wait_ns, lane.other_ns) for lane in idle.lanes] == [
        ("a", 40, 0),
        ("b", 0, 15),
    ]


def test_no_work_at_all() -> None:
    idle = split_idle([])
    assert idle.lanes == ()
    assert (idle.whole.n_work, idle.whole.span_ns) == (0, 0)


def test_the_parts_make_up_the_span() -> None:
    rng = random.Random(0)
    for _ in range(50):
        begins = [rng.randrange(1000) for _ in range(20)]
        works = [
            work(one, one + rng.randrange(60), rng.choice([None, one - rng.randrange(80)]))
            for one in begins
        ]
        whole = split_idle(works, 20).whole
        covered = set().union(*(range(one.begin_ns, one.end_ns) for one in works))
        assert whole.busy_ns == len(covered)
        idle_ns = whole.host_wait_ns + whole.kernel_wait_ns + whole.other_ns
        assert whole.span_ns == whole.busy_ns + idle_ns


# ---- verdicts -----------------------------------------------------------------------------------


def regular(n: int, *, kernel_us: float, launch_every_us: float) -> Trace:
    """A host that launches at a fixed rate, and a device that runs kernels as soon as it can."""
    trace, free = Trace(), 0.0
    for index in range(n):
        launched = index * launch_every_us
        begin = max(free, launched + 3)
        trace.kernel(begin, kernel_us, launched=launched)
        free = begin + kernel_us
    return trace


@pytest.mark.parametrize(
    ("kernel_us", "launch_every_us", "verdict"),
    [
        (1, 10, Verdict.HOST_BOUND),
        (6, 10, Verdict.BALANCED),
        (100, 10, Verdict.DEVICE_BOUND),
    ],
)
def test_verdict_of_a_trace(
    tmp_path: Path, kernel_us: float, launch_every_us: float, verdict: Verdict
) -> None:
    trace = regular(50, kernel_us=kernel_us, launch_every_us=launch_every_us)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.verdict is verdict
    assert found.confidence is Confidence.MEDIUM
    assert "profiler" in found.reasons[0]
    assert found.timings == ()
    assert {one.test for one in found.not_applied} == {"enqueue", "replay"}
    assert found.trace is not None
    assert found.trace.idle.whole.n_work == 50
    assert found.trace.mean_launch_ns == 2000
    assert found.trace.n_short == (50 if kernel_us < 2 else 0)
    assert "under the profiler" in str(found.gain)


def test_a_trace_without_launch_records_says_little(tmp_path: Path) -> None:
    trace = Trace()
    for index in range(10):
        trace.kernel(index * 100, 10, launched=None)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.confidence is Confidence.LOW
    assert "10 of 10 pieces of device work have no launch record" in found.reasons[0]


def test_a_device_that_waits_for_something_else(tmp_path: Path) -> None:
    trace = Trace()
    for index in range(10):
        trace.kernel(index * 100, 10, launched=index)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.confidence is Confidence.LOW
    assert "waited 89% of its span for something else" in found.reasons[0]


def test_one_piece_of_work_decides_nothing(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(10, 5, launched=1)
    found = diagnose_trace(trace.save(tmp_path / "t.json"))
    assert found.verdict is Verdict.UNDECIDED
    assert [one.test for one in found.not_applied] == ["enqueue", "replay", "idle"]


# ---- trace files --------------------------------------------------------------------------------


def test_compressed_or_a_bare_list(tmp_path: Path) -> None:
    events = three_gaps().events
    (tmp_path / "list.json").write_text(json.dumps(events))
    (tmp_path / "t.json.gz").write_bytes(
        gzip.compress(json.dumps({"traceEvents": events}).encode())
    )
    plain = read_kineto(three_gaps().save(tmp_path / "t.json"))
    assert read_kineto(tmp_path / "list.json") == plain
    assert read_kineto(tmp_path / "t.json.gz") == plain


def test_fractions_of_large_times(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(7036428463651.178, 1.25, launched=7036428463640.5)
    (found,) = read_kineto(trace.save(tmp_path / "t.json")).work
    assert found.end_ns - found.begin_ns == 1250
    assert found.begin_ns == pytest.approx(7036428463651178, abs=2)


def test_streams_devices_and_categories(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(0, 5, launched=None, stream=7)
    trace.kernel(10, 5, launched=None, stream=20, category="gpu_memcpy")
    trace.complete("kernel", "gemm", 20, 5, stream=7, device=1)
    trace.complete("kernel", "gemm", 20, 5, stream="23", device=1)
    trace.complete("cuda_sync", "Stream Sync", 0, 50, stream=7, device=0)
    trace.complete("gpu_user_annotation", "step", 0, 50, stream=7, device=0)
    trace.complete("kernel", "no stream", 0, 50, device=0)
    trace.complete("kernel", "no stream", 0, 50, stream=-1)
    lanes = split_idle(read_kineto(trace.save(tmp_path / "t.json")).work).lanes
    assert [lane.lane for lane in lanes] == [
        "device 0 stream 20",
        "device 0 stream 7",
        "device 1 stream 23",
        "device 1 stream 7",
    ]


def test_one_launch_of_many_kernels(tmp_path: Path) -> None:
    """A graph's kernels share the correlation of the one call that launched it."""
    trace = Trace()
    trace.complete("cuda_runtime", "cudaGraphLaunch", 100, 5, correlation=9)
    trace.kernel(0, 10, launched=None)
    for ts in (110, 130):
        trace.complete("kernel", "node", ts, 10, stream=7, device=0, correlation=9)
    whole = split_idle(read_kineto(trace.save(tmp_path / "t.json")).work).whole
    assert parts_us(whole) == {"busy": 30, "host_wait": 100, "kernel_wait": 10, "other": 0}


def test_operators_by_self_time(tmp_path: Path) -> None:
    trace = three_gaps()
    trace.complete("cpu_op", "aten::linear", 0, 100)
    trace.complete("cpu_op", "aten::addmm", 10, 60)
    trace.complete("cuda_runtime", "cudaLaunchKernel", 20, 5)
    trace.complete("cpu_op", "aten::relu", 100, 30)
    trace.complete("cpu_op", "aten::relu", 130, 20)
    operators = read_kineto(trace.save(tmp_path / "t.json")).operators
    assert [(one.name, one.n_calls, one.self_ns) for one in operators] == [
        ("aten::addmm", 1, 60_000),
        ("aten::relu", 2, 50_000),
        ("aten::linear", 1, 40_000),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected a trace as JSON"),
        (b"\xff\xfe\x00", "expected a trace as JSON"),
        (b"[" * 100_000, "expected a trace as JSON"),
        (b"\x1f\x8b\x08broken", "cannot be read"),
        (gzip.compress(b"{}" * 1000, mtime=0)[:-10], "cannot be read"),
        (b"3", "expected a list of events"),
        (b"{}", "expected a list of events"),
        (b'{"traceEvents": {}}', "expected a list of events"),
        (b'{"traceEvents": []}', "none of its 0 complete events is a kernel"),
        (b"[3]", r"traceEvents\[0\]: expected an object, got a int"),
        (b'[{"ph": "X", "dur": 1}]', r"traceEvents\[0\]: expected `ts` as a number"),
        (b'[{"ph": "X", "ts": "1", "dur": 1}]', "expected `ts` as a number of micro.*, got '1'"),
        (b'[{"ph": "X", "ts": 1, "dur": NaN}]', "expected `dur` as a number of micro.*, got nan"),
        (b'[{"ph": "X", "ts": 1, "dur": true}]', "expected `dur`"),
        (b'[{"ph": "M"}, {"ph": "X", "ts": 1, "dur": -1}]', r"traceEvents\[1\]: expected dur >= 0"),
        (b'[{"ph": "X", "cat": "cpu_op", "ts": 1, "dur": 1}]', "ProfilerActivity.CUDA"),
    ],
)
def test_malformed_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(FileError, match=message):
        diagnose_trace(tmp_path / "t.json")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        diagnose_trace(tmp_path / "t.json")


# ---- timelines ----------------------------------------------------------------------------------


def timeline_of(*executions: list[Span]) -> Timeline:
    timeline = Timeline("null", "test", {})
    timeline.executions = tuple(
        ExecutionTimeline(number, "host", tuple(spans), (), "none", 0, 0, 0)
        for number, spans in enumerate(executions, 1)
    )
    return timeline


def test_host_scheduling_is_host_bound_by_its_issue_spans() -> None:
    spans = []
    for launch in range(10):
        at = launch * 1000
        spans.append(Span(SpanKind.ISSUE, "aten::relu", HOST_LANE, at, at + 900, launch))
        spans.append(Span(SpanKind.LAUNCH, "aten::relu", "null device", at + 900, at + 990, launch))
    found = diagnose_timeline(timeline_of(spans))
    assert found.verdict is Verdict.HOST_BOUND
    assert found.confidence is Confidence.HIGH
    assert found.trace is not None
    assert (found.trace.idle.whole.n_unlinked, found.trace.n_short) == (0, 10)


def test_offloaded_executions_wait_for_their_one_submission() -> None:
    def execution(begin: int) -> list[Span]:
        return [
            Span(SpanKind.STAGE, "convert", HOST_LANE, begin, begin + 10),
            Span(SpanKind.STAGE, "submit", HOST_LANE, begin + 10, begin + 20),
            Span(SpanKind.LAUNCH, "aten::mm", "null device", begin + 20, begin + 120, 0),
            Span(SpanKind.LAUNCH, "aten::relu", "null device", begin + 125, begin + 220, 1),
        ]

    found = diagnose_timeline(timeline_of(execution(0), execution(220)))
    assert found.trace is not None
    whole = found.trace.idle.whole
    assert (whole.host_wait_ns, whole.kernel_wait_ns, whole.other_ns) == (20, 10, 0)
    assert found.verdict is Verdict.DEVICE_BOUND


def test_an_empty_timeline() -> None:
    with pytest.raises(DiagnosisError, match="none of the timeline's 0 executions"):
        diagnose_timeline(timeline_of())


# ---- the same by Holistic Trace Analysis ---------------------------------------------------------


def by_holistic_trace_analysis(path: Path, **options: int) -> dict[int, dict[str, float]]:
    """Its idle time breakdown: for each stream the us of each kind."""
    analysis = pytest.importorskip("hta.trace_analysis", reason="the peer is not installed")
    found, _ = analysis.TraceAnalysis({0: str(path)}).get_idle_time_breakdown(
        visualize=False, **options
    )
    streams: dict[int, dict[str, float]] = {}
    for row in found.itertuples():
        streams.setdefault(int(row.stream), {})[row.idle_category] = float(row.idle_time)
    return streams


def by_ours(path: Path, kernel_gap_ns: int = 30_000) -> dict[int, dict[str, float]]:
    idle = split_idle(read_kineto(path).work, kernel_gap_ns)
    return {
        int(lane.lane.removeprefix("stream ")): {
            kind: time for kind, time in parts_us(lane).items() if kind != "busy"
        }
        for lane in idle.lanes
    }


def assert_same(ours: dict[int, dict[str, float]], theirs: dict[int, dict[str, float]]) -> None:
    assert ours.keys() == theirs.keys()
    for stream, kinds in ours.items():
        assert {kind: theirs[stream].get(kind, 0) for kind in kinds} == pytest.approx(kinds)


peer = pytest.mark.filterwarnings("ignore")


@peer
def test_the_peer_splits_known_gaps_alike(tmp_path: Path) -> None:
    path = three_gaps().save(tmp_path / "t.json")
    theirs = by_holistic_trace_analysis(path)
    assert theirs[7] == {"host_wait": 40, "kernel_wait": 10, "other": 100}
    assert_same(by_ours(path), theirs)


@peer
@pytest.mark.parametrize("threshold_us", [9, 10, 11, 100, 101])
def test_the_peer_compares_its_threshold_with_microseconds(
    tmp_path: Path, threshold_us: int
) -> None:
    path = three_gaps().save(tmp_path / "t.json")
    theirs = by_holistic_trace_analysis(path, consecutive_kernel_delay=threshold_us)
    assert_same(by_ours(path, threshold_us * 1000), theirs)


@peer
@pytest.mark.parametrize("seed", range(8))
def test_the_peer_splits_random_streams_alike(tmp_path: Path, seed: int) -> None:
    """Several streams whose kernels overlap across streams, some without a launch record."""
    rng, trace = random.Random(seed), Trace()
    for stream in (7, 20, 24)[: 1 + seed % 3]:
        at = 100 + rng.randrange(50)
        for _ in range(30):
            launched = at - rng.randrange(80) if rng.random() < 0.9 else None
            category = rng.choice(["kernel", "kernel", "gpu_memcpy", "gpu_memset"])
            duration = rng.randrange(1, 60)
            trace.kernel(at, duration, launched=launched, stream=stream, category=category)
            at += duration + rng.choice([0, rng.randrange(90)])
    path = trace.save(tmp_path / "t.json")
    assert_same(by_ours(path), by_holistic_trace_analysis(path))
