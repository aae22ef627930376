"""Diagnosis: whether the host or the device bounds a model, and what capture would gain."""

from offload.observe.diagnosis.diagnosis import (
    Diagnosis,
    GainBound,
    MeasuredGain,
    NamedTiming,
    TraceFigures,
    UnknownGain,
)
from offload.observe.diagnosis.evidence import Confidence, Finding, NotApplied, Thresholds, Verdict
from offload.observe.diagnosis.idle import DeviceIdle, DeviceWork, LaneIdle, split_idle
from offload.observe.diagnosis.models import diagnose, diagnose_call, diagnose_saved
from offload.observe.diagnosis.operators import OperatorCost, OperatorCosts
from offload.observe.diagnosis.stopwatch import Clock, Effort, SteadyClock, Timing
from offload.observe.diagnosis.traces import diagnose_timeline, diagnose_trace

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
