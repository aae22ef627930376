"""Record a model's operator launches once; execute them as one task at new addresses.

with offload.capture(model) as captured:
model(x)
y2 = captured(x2)

Or, for one call in a script: `captured = offload.capture(model, x)`.
"""

from offload.api import Captured, capture
from offload.api import open_file as open
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    ExecutionError,
    FileError,
    OffloadError,
    PlanError,
)
from offload.replay import Executable, LastExecution, Ticket

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "BindingError",
    "CaptureError",
    "Captured",
    "Executable",
    "ExecutionError",
    "FileError",
    "LastExecution",
    "OffloadError",
    "PlanError",
    "Ticket",
    "capture",
    "open",
]
