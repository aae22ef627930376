"""Record a model's operator launches once; execute them as one task at new addresses.

with offload.capture(model) as captured:
model(x)
y2 = captured(x2)

Or, for one call in a script: `captured = offload.capture(model, x)`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from offload import _installed_torch as _installed_torch  # first: it checks the version of torch
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    CopyError,
    CostModelError,
    DiagnosisError,
    ExecutionError,
    FileError,
    OffloadError,
    OutOfMemory,
    OutOfStreams,
    PlanError,
    ProgramError,
    TimelineError,
)

if TYPE_CHECKING:
    from offload.api import capture
    from offload.calibration import calibrate
    from offload.captured import Captured
    from offload.captured import open_model as open
    from offload.costs import CostModel
    from offload.diagnosis import Diagnosis, diagnose
    from offload.replay import Executable, LastExecution, Ticket
    from offload.timeline import Timeline

__version__ = "0.1.0"

# What is imported when it is first asked for: programs are data that need no torch, and who
# executes them does not load what measures them.
_ON_DEMAND = {
    "Captured": ("offload.captured", "Captured"),
    "CostModel": ("offload.costs", "CostModel"),
    "Diagnosis": ("offload.diagnosis", "Diagnosis"),
    "Executable": ("offload.replay", "Executable"),
    "LastExecution": ("offload.replay", "LastExecution"),
    "Ticket": ("offload.replay", "Ticket"),
    "Timeline": ("offload.timeline", "Timeline"),
    "calibrate": ("offload.calibration", "calibrate"),
    "capture": ("offload.api", "capture"),
    "diagnose": ("offload.diagnosis", "diagnose"),
    "open": ("offload.captured", "open_model"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for the first time (PEP 562)."""
    if name == "_native":  # which is linked against torch, so that torch comes first
        importlib.import_module("torch")
        return importlib.import_module("offload._native")
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    module, attribute = _ON_DEMAND[name]
    found = getattr(importlib.import_module(module), attribute)
    globals()[name] = found
    return found


__all__ = [
    "BackendUnavailable",
    "BindingError",
    "CaptureError",
    "Captured",
    "CopyError",
    "CostModel",
    "CostModelError",
    "Diagnosis",
    "DiagnosisError",
    "Executable",
    "ExecutionError",
    "FileError",
    "LastExecution",
    "OffloadError",
    "OutOfMemory",
    "OutOfStreams",
    "PlanError",
    "ProgramError",
    "Ticket",
    "Timeline",
    "TimelineError",
    "calibrate",
    "capture",
    "diagnose",
    "open",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
