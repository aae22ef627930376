"""Files of Kineto: compressed, cut, of several streams, and read by Holistic Trace Analysis."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from kineto_traces import Trace, parts_us, three_gaps

from offload.errors import FileError
from offload.observe.diagnosis import (
    diagnose_trace,
    split_idle,
)
from offload.observe.diagnosis.kineto import read_kineto


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
