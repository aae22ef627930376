"""Record a model's operator launches once; execute them as one task at new addresses.

with offload.capture(model) as captured:
model(x)
y2 = captured(x2)

Or, for one call in a script: `captured = offload.capture(model, x)`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from offload import _installed_torch as _installed_torch  # first: it checks the version of torch
from offload.api import capture
from offload.captured import Captured
from offload.captured import open_model as open
from offload.costs import CostModel
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
    TimelineError,
)
from offload.replay import Executable, LastExecution, Ticket
from offload.timeline import Timeline

if TYPE_CHECKING:
    from offload.calibration import calibrate
    from offload.diagnosis import Diagnosis, diagnose

__version__ = "0.1.0"

# Who executes captured programs does not load what measures them.
_ON_DEMAND = {
    "calibrate": "offload.calibration",
    "Diagnosis": "offload.diagnosis",
    "diagnose": "offload.diagnosis",
}


def __getattr__(name: str) -> Any:
    """Load what is needed for few programs when it is first asked for (PEP 562)."""
    if name not in _ON_DEMAND:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)


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
