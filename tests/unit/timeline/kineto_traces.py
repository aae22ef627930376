"""Hand-made traces in Kineto's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from offload.observe.diagnosis import (
    LaneIdle,
)

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
