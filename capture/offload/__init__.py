"""Record a model's operator launches once; execute them as one task at new addresses.

with offload.capture(model) as captured:
model(x)
y2 = captured(x2)

Or, for one call in a script: `captured = offload.capture(model, x)`.
"""

from offload.api import Captured, capture
from offload.api import open_file as open
from offload.calibration import calibrate
from offload.costs import CostModel
from offload.diagnosis import Diagnosis, diagnose
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    CostModelError,
    DiagnosisError,
    ExecutionError,
    FileError,
    OffloadError,
    PlanError,
    TimelineError,
)
from offload.replay import Executable, LastExecution, Ticket
from offload.timeline import Timeline

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "BindingError",
    "CaptureError",
    "Captured",
    "CostModel",
    "CostModelError",
    "Diagnosis",
    "DiagnosisError",
    "Executable",
    "ExecutionError",
    "FileError",
    "LastExecution",
    "OffloadError",
    "PlanError",
    "Ticket",
    "Timeline",
    "TimelineError",
    "calibrate",
    "capture",
    "diagnose",
    "open",
]
