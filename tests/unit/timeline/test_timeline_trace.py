"""The Chrome trace: its structure, and what Holistic Trace Analysis reads from it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from timelines import (
    DEVICE_LANE,
    both_schedulings,
    execution,
    header,
    hosted,
    issue,
    launch,
    offloaded,
    stage,
    timeline,
    transfer,
    with_substages,
)

from offload.errors import TimelineError
from offload.timeline import HOST_LANE, ExecutionTimeline, Timeline

Event = dict[str, Any]


def saved(made: Timeline, folder: Path) -> dict[str, Any]:
    made.save(folder / "t.json")
    trace: dict[str, Any] = json.loads((folder / "t.json").read_text())
    return trace


def of_category(trace: dict[str, Any], *categories: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event.get("cat") in categories]


def threads_of(trace: dict[str, Any]) -> dict[str, int]:
    """Thread numbers of the measured lanes by name."""
    return {
        event["args"]["name"]: event["tid"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name" and event["pid"] != process_of(trace, "predicted")
    }


def process_of(trace: dict[str, Any], name: str) -> int | None:
    named = {
        event["args"]["name"]: event["pid"]
        for event in trace["traceEvents"]
        if event["name"] == "process_name"
    }
    return named.get(name)


# ---- structure ----------------------------------------------------------------------------------


def test_the_envelope(tmp_path: Path) -> None:
    trace = saved(both_schedulings(3), tmp_path)
    assert trace["schemaVersion"] == 1
    assert trace["displayTimeUnit"] == "ns"
    assert trace["deviceProperties"] == [{"id": 0, "name": "Processor 1"}]
    assert trace["versions"] == {"torch": "2.13.0"}


def test_categories_are_those_of_kineto_except_for_predictions(tmp_path: Path) -> None:
    trace = saved(both_schedulings(3), tmp_path)
    counts: dict[str, int] = defaultdict(int)
    for event in trace["traceEvents"]:
        counts[event.get("cat", "metadata")] += 1
    metadata = counts.pop("metadata")
    assert metadata == 2 * 3 + 2 * 4  # three processes; of each the used lanes
    assert counts == {
        "user_annotation": 4 + 2 * 4 + 2,  # executions, and stages of each scheduling
        "cpu_op": 2 * 3,
        "cuda_runtime": 2 + 2 * 3,  # submissions and issues
        "kernel": 4 * 3,
        "ac2g": 2 * 4 * 3,
        "predicted": 2 * (1 + 4 + 3),
    }


def test_substages_are_slices_within_submit(tmp_path: Path) -> None:
    one = with_substages(offloaded(3), {"table copy": 300, "execute enqueue": 400})
    slices = of_category(saved(timeline([one]), tmp_path), "user_annotation")
    (submit,) = (event for event in slices if event["name"] == "submit")
    parts = [event for event in slices if event["name"] in ("table copy", "execute enqueue")]
    assert [(event["ts"], event["dur"]) for event in parts] == [(1.28, 0.3), (1.58, 0.4)]
    assert {(event["pid"], event["tid"]) for event in parts} == {(submit["pid"], submit["tid"])}


def test_times_are_float_microseconds(tmp_path: Path) -> None:
    trace = saved(timeline([execution([*header(0), launch(0, 1980, 4321)])]), tmp_path)
    (kernel,) = of_category(trace, "kernel")
    assert (kernel["ts"], kernel["dur"]) == (1.98, 2.341)
    for event in trace["traceEvents"]:
        assert all(isinstance(event[key], float) for key in ("ts", "dur") if key in event)


def test_every_thread_and_process_is_named_and_ordered(tmp_path: Path) -> None:
    trace = saved(both_schedulings(3), tmp_path)
    events = trace["traceEvents"]
    for kind in ("thread_name", "thread_sort_index"):
        described = {(one["pid"], one["tid"]) for one in events if one["name"] == kind}
        assert described == {(one["pid"], one["tid"]) for one in events if one["ph"] != "M"}
    for kind in ("process_name", "process_sort_index"):
        described = {one["pid"] for one in events if one["name"] == kind}
        assert described == {one["pid"] for one in events}
    order = {
        one["pid"]: one["args"]["sort_index"]
        for one in events
        if one["name"] == "process_sort_index"
    }
    host = process_of(trace, "host, measured")
    device = process_of(trace, "device cpu, measured")
    assert sorted(order, key=lambda pid: order[pid]) == [
        host,
        device,
        process_of(trace, "predicted"),
    ]


def overlapping_calls() -> list[ExecutionTimeline]:
    """Two threads call: the second call begins on the host before the first has returned."""
    return [
        execution([*header(0), launch(0, 1980, 9000)]),
        execution([*header(1000), launch(0, 9000, 9500)], number=2),
        offloaded(3, number=3, begin_ns=20_000),
    ]


@pytest.mark.parametrize(
    "made",
    [
        both_schedulings(150),
        timeline(overlapping_calls()),
        # Predicted to last beyond the beginning of the next execution.
        timeline([offloaded(50, number=1), offloaded(50, number=2, begin_ns=52_500)]),
    ],
    ids=["in turns", "overlapping calls", "overlapping predictions"],
)
def test_slices_nest_on_every_thread(tmp_path: Path, made: Timeline) -> None:
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in saved(made, tmp_path)["traceEvents"]:
        if event["ph"] == "X":
            begin_ns = round(event["ts"] * 1000)
            end_ns = begin_ns + round(event["dur"] * 1000)
            threads[event["pid"], event["tid"]].append((begin_ns, -end_ns))
    for slices in threads.values():
        enclosing: list[int] = []
        for begin_ns, negative_end_ns in sorted(slices):
            while enclosing and enclosing[-1] <= begin_ns:
                enclosing.pop()
            assert not enclosing or -negative_end_ns <= enclosing[-1]
            enclosing.append(-negative_end_ns)


def test_overlapping_calls_get_rows(tmp_path: Path) -> None:
    trace = saved(timeline(overlapping_calls()), tmp_path)
    assert set(threads_of(trace)) == {HOST_LANE, f"{HOST_LANE}, row 2", DEVICE_LANE}


# ---- causality -----------------------------------------------------------------------------------


def test_each_issue_is_linked_to_its_kernel(tmp_path: Path) -> None:
    trace = saved(timeline([hosted(5, number=1), hosted(5, number=2, begin_ns=30_000)]), tmp_path)
    calls = {one["args"]["correlation"]: one for one in of_category(trace, "cuda_runtime")}
    kernels = of_category(trace, "kernel")
    assert len(calls) == len(kernels) == 10
    assert {one["args"]["correlation"] for one in kernels} == set(calls)
    for kernel in kernels:
        call = calls[kernel["args"]["correlation"]]
        assert call["args"]["launch"] == kernel["args"]["launch"]
        assert kernel["ts"] == pytest.approx(call["ts"] + call["dur"] + 0.2)


def test_the_submission_is_linked_to_all_its_kernels(tmp_path: Path) -> None:
    made = timeline([offloaded(5, number=1), offloaded(5, number=2, begin_ns=50_000)])
    trace = saved(made, tmp_path)
    first, second = of_category(trace, "cuda_runtime")
    assert (first["name"], second["name"]) == ("submit", "submit")
    kernels = of_category(trace, "kernel")
    correlations = [one["args"]["correlation"] for one in (first, second)]
    assert len(set(correlations)) == 2
    assert [one["args"]["correlation"] for one in kernels] == [
        *[correlations[0]] * 5,
        *[correlations[1]] * 5,
    ]


def test_each_flow_leads_from_a_call_to_its_device_event(tmp_path: Path) -> None:
    trace = saved(both_schedulings(4), tmp_path)
    place = ("pid", "tid", "ts")
    calls = defaultdict(set)
    for one in of_category(trace, "cuda_runtime"):
        calls[tuple(one[key] for key in place)].add(one["args"]["correlation"])
    kernels = {
        tuple(one[key] for key in place): one["args"]["correlation"]
        for one in of_category(trace, "kernel")
    }
    flows: dict[int, dict[str, Event]] = defaultdict(dict)
    for one in of_category(trace, "ac2g"):
        assert one["ph"] not in flows[one["id"]]
        flows[one["id"]][one["ph"]] = one
    assert len(flows) == len(kernels) == 16
    ends = set()
    for pair in flows.values():
        assert set(pair) == {"s", "f"}
        assert pair["f"]["bp"] == "e"
        end = tuple(pair["f"][key] for key in place)
        ends.add(end)
        assert kernels[end] in calls[tuple(pair["s"][key] for key in place)]
    assert ends == set(kernels)


def test_transfers(tmp_path: Path) -> None:
    stages = header(1000)
    spans = [
        *stages,
        transfer("copy in", 200, 900, 4096, DEVICE_LANE),  # before the submission
        launch(0, 2980, 4000),
        transfer("copy out", 4000, 4500, 8192, DEVICE_LANE),
        transfer("copy out", 4600, 4700, 16, HOST_LANE),
    ]
    trace = saved(timeline([execution(spans)]), tmp_path)
    copied_in, copied_out = of_category(trace, "gpu_memcpy")
    assert copied_in["name"] == "Memcpy HtoD (copy in)"
    assert copied_in["args"]["bytes"] == 4096
    assert "correlation" not in copied_in["args"]
    assert copied_out["name"] == "Memcpy DtoH (copy out)"
    assert copied_out["args"]["memory bandwidth (GB/s)"] == 8192 / 500
    (submission,) = of_category(trace, "cuda_runtime")
    assert copied_out["args"]["correlation"] == submission["args"]["correlation"]
    (on_the_host,) = of_category(trace, "cpu_op")
    assert on_the_host["args"]["bytes"] == 16
    assert "stream" not in on_the_host["args"]


def test_predictions_stand_apart(tmp_path: Path) -> None:
    trace = saved(both_schedulings(3), tmp_path)
    process = process_of(trace, "predicted")
    predicted = of_category(trace, "predicted")
    assert {one["pid"] for one in predicted} == {process}
    assert not any({"stream", "correlation"} & set(one["args"]) for one in predicted)
    others = [one for one in trace["traceEvents"] if one not in predicted and one["ph"] != "M"]
    assert process not in {one["pid"] for one in others}


def test_only_predicted(tmp_path: Path) -> None:
    made = timeline([execution([], [*header(0), launch(0, 1980, 3000)])])
    trace = saved(made, tmp_path)
    assert len(of_category(trace, "predicted")) == 1 + 4 + 1
    assert process_of(trace, "host, measured") is None


# ---- files --------------------------------------------------------------------------------------


def test_compressed(tmp_path: Path) -> None:
    made = both_schedulings(3)
    made.save(tmp_path / "t.json.gz")
    unpacked = gzip.decompress((tmp_path / "t.json.gz").read_bytes())
    assert json.loads(unpacked) == saved(made, tmp_path)


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"t\.txt: a trace's name must end in \.json"):
        both_schedulings(3).save(tmp_path / "t.txt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("made", [timeline([]), timeline([execution([])])])
def test_nothing_to_save(tmp_path: Path, made: Timeline) -> None:
    with pytest.raises(TimelineError, match="the timeline is empty"):
        made.save(tmp_path / "t.json")


# ---- Holistic Trace Analysis --------------------------------------------------------------------

US = 1000


def read_by_hta(made: Timeline, folder: Path) -> Any:
    from hta.trace_analysis import TraceAnalysis

    path = folder / "t.json"
    made.save(path)
    return TraceAnalysis(trace_files={0: str(path)})


def idle_times(analysis: Any, consecutive_kernel_delay: float) -> dict[str, float]:
    """By category, of the one stream; categories that did not occur are absent."""
    frame, _ = analysis.get_idle_time_breakdown(
        visualize=False, consecutive_kernel_delay=consecutive_kernel_delay
    )
    assert frame["stream"].nunique() == 1
    return dict(zip(frame["idle_category"], frame["idle_time"], strict=True))


def gaps_of_host_scheduling() -> ExecutionTimeline:
    """10 us wait for the host, 2 us between kernels, 20 us of unknown cause; 6 us are copying."""
    spans = [
        stage("convert", 0, 1 * US),
        issue(0, 1 * US, 3 * US),
        launch(0, 10 * US, 20 * US),
        issue(1, 22 * US, 24 * US),  # after the end of kernel 0
        launch(1, 30 * US, 40 * US),
        issue(2, 25 * US, 26 * US),
        launch(2, 42 * US, 50 * US),  # a gap below the delay
        issue(3, 27 * US, 28 * US),
        launch(3, 70 * US, 75 * US),
        transfer("copy out", 75 * US, 81 * US, 4096, DEVICE_LANE),
    ]
    # Predictions that fill every gap: the breakdown must ignore them.
    predicted = [stage("convert", 0, US), *(launch(i, i * US, (i + 1) * US) for i in range(1, 90))]
    return execution(spans, predicted, scheduling="host")


@pytest.mark.filterwarnings("ignore")
def test_hta_reads_the_breakdown_of_host_scheduling(tmp_path: Path) -> None:
    analysis = read_by_hta(timeline([gaps_of_host_scheduling()]), tmp_path)
    (temporal,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    assert temporal["kernel_time(us)"] == 81 - 10
    assert temporal["compute_time(us)"] == 10 + 10 + 8 + 5
    assert temporal["non_compute_time(us)"] == 6
    assert temporal["idle_time(us)"] == 10 + 2 + 20
    # HTA calls the delay nanoseconds and compares it with microseconds.
    assert idle_times(analysis, consecutive_kernel_delay=5) == {
        "host_wait": 10,
        "kernel_wait": 2,
        "other": 20,
    }


@pytest.mark.filterwarnings("ignore")
def test_hta_reads_the_breakdown_of_offload_scheduling(tmp_path: Path) -> None:
    """No waits for the host within an execution, only between two."""
    short = {"convert": US, "policy": US, "patch": US, "submit": US}
    made = timeline(
        [
            execution([*header(0, short), launch(0, 4 * US, 9 * US), launch(1, 10 * US, 12 * US)]),
            execution(
                [*header(20 * US, short), launch(0, 24 * US, 29 * US), launch(1, 49 * US, 51 * US)],
                [launch(0, 0, 60 * US)],
                number=2,
            ),
        ]
    )
    analysis = read_by_hta(made, tmp_path)
    (temporal,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    assert temporal["compute_time(us)"] == 5 + 2 + 5 + 2
    assert temporal["non_compute_time(us)"] == 0
    assert idle_times(analysis, consecutive_kernel_delay=5) == {
        "host_wait": 12,
        "kernel_wait": 1,
        "other": 20,
    }


@pytest.mark.filterwarnings("ignore")
def test_hta_reads_nanoseconds_if_it_is_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hta.configs.env_options import HTAEnvOptions

    monkeypatch.setenv("HTA_DISABLE_NS_ROUNDING", "1")
    monkeypatch.setattr(HTAEnvOptions, "_instance", None)
    analysis = read_by_hta(timeline([offloaded(10, launch_ns=300)]), tmp_path)
    (temporal,) = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
    assert temporal["compute_time(us)"] == pytest.approx(3.0)
    assert temporal["idle_time(us)"] == pytest.approx(0.09)
    assert idle_times(analysis, consecutive_kernel_delay=0.03) == {
        "kernel_wait": pytest.approx(0.09),
        "other": 0,  # there is no gap before the first kernel
    }
