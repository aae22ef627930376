"""The compiled modules, and the check that they fit the installed torch.

`_planner` needs no torch. `_native` is linked against it: torch is imported first.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import a module at its first use (PEP 562)."""
    if name != "_native":
        raise AttributeError(f"module 'offload.native' has no attribute {name!r}")
    importlib.import_module("torch")
    return importlib.import_module("offload.native._native")
