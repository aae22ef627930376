"""Diagnosis: whether the host or the device bounds a model, and what capture would gain."""

from offload.diagnosis.diagnosis import (
    Diagnosis,
    GainBound,
    MeasuredGain,
    NamedTiming,
    TraceFigures,
    UnknownGain,
)
from offload.diagnosis.evidence import Confidence, Finding, NotApplied, Thresholds, Verdict
from offload.diagnosis.idle import DeviceIdle, DeviceWork, LaneIdle, split_idle
from offload.diagnosis.models import diagnose, diagnose_call, diagnose_saved
from offload.diagnosis.operators import OperatorCost, OperatorCosts
from offload.diagnosis.stopwatch import Clock, Effort, SteadyClock, Timing
from offload.diagnosis.traces import diagnose_timeline, diagnose_trace

__all__ = [
    "Clock",
    "Confidence",
    "DeviceIdle",
    "DeviceWork",
    "Diagnosis",
    "Effort",
    "Finding",
    "GainBound",
    "LaneIdle",
    "MeasuredGain",
    "NamedTiming",
    "NotApplied",
    "OperatorCost",
    "OperatorCosts",
    "SteadyClock",
    "Thresholds",
    "Timing",
    "TraceFigures",
    "UnknownGain",
    "Verdict",
    "diagnose",
    "diagnose_call",
    "diagnose_saved",
    "diagnose_timeline",
    "diagnose_trace",
    "split_idle",
]
