"""Record a model's operator launches once; execute them as one task at new addresses.

    with offload.capture(model) as captured:
        model(x)
    y2 = captured(x2)

Or, for one call in a script: `captured = offload.capture(model, x)`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from offload.console.not_called import INSTEAD
from offload.errors import (
    BackendUnavailable,
    BindingError,
    CaptureError,
    CopyError,
    CostModelError,
    DependencyError,
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
from offload.native.installed_torch import check_installed_torch

if TYPE_CHECKING:
    from offload.api import Captured, capture, capture_training, open
    from offload.costs import CostModel, LaunchCosts
    from offload.host import PaddedExecutable, SizedExecutable, Sizes
    from offload.load.device_options import Watts
    from offload.load.rank_stages import Pipeline
    from offload.observe.calibration import calibrate
    from offload.observe.diagnosis import Diagnosis, diagnose
    from offload.run import Executable, LastExecution, Tasks, Ticket, tasks
    from offload.timeline import Timeline

__version__ = "0.1.0"

check_installed_torch()  # before any module that is linked against it

# Names imported at their first use: programs are data that need no torch, and executing them does
# not load code that measures them.
_ON_DEMAND = {
    "Captured": ("offload.api", "Captured"),
    "CostModel": ("offload.costs", "CostModel"),
    "Diagnosis": ("offload.observe.diagnosis", "Diagnosis"),
    "Executable": ("offload.run", "Executable"),
    "LastExecution": ("offload.run", "LastExecution"),
    "LaunchCosts": ("offload.costs", "LaunchCosts"),
    "PaddedExecutable": ("offload.host", "PaddedExecutable"),
    "SizedExecutable": ("offload.host", "SizedExecutable"),
    "Pipeline": ("offload.load.rank_stages", "Pipeline"),
    "Sizes": ("offload.host", "Sizes"),
    "Tasks": ("offload.run", "Tasks"),
    "Ticket": ("offload.run", "Ticket"),
    "Timeline": ("offload.timeline", "Timeline"),
    "Watts": ("offload.load.device_options", "Watts"),
    "calibrate": ("offload.observe.calibration", "calibrate"),
    "capture": ("offload.api", "capture"),
    "capture_training": ("offload.api", "capture_training"),
    "diagnose": ("offload.observe.diagnosis", "diagnose"),
    "open": ("offload.api", "open"),
    "tasks": ("offload.run", "tasks"),
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use (PEP 562)."""
    if name not in _ON_DEMAND:
        advice = f": {INSTEAD[name]}" if name in INSTEAD else ""
        raise AttributeError(f"module 'offload' has no attribute {name!r}{advice}")
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
    "DependencyError",
    "Diagnosis",
    "DiagnosisError",
    "Executable",
    "ExecutionError",
    "FileError",
    "LastExecution",
    "LaunchCosts",
    "OffloadError",
    "OutOfMemory",
    "OutOfStreams",
    "PaddedExecutable",
    "Pipeline",
    "PlanError",
    "ProgramError",
    "SizedExecutable",
    "Sizes",
    "Tasks",
    "Ticket",
    "Timeline",
    "TimelineError",
    "Watts",
    "calibrate",
    "capture",
    "capture_training",
    "diagnose",
    "open",
    "tasks",
]


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
