"""Which executables can use other storages of weights than those at their load."""

from __future__ import annotations

from offload.backends import Backend
from offload.program import Program


def rebinding_refusal(backend: Backend, program: Program) -> str:
    """Why weights cannot be rebound, and what to do instead; empty if they can."""
    if not backend.capabilities.rebinds_weights:
        return (
            f"weights of a model on device {backend.name!r} stay where they were when it was "
            "loaded: its kernels keep their addresses; give the tensor its former storage, or "
            "capture and load again to use another (where repeated sizes were promoted, "
            "run.rebind_weights() suffices)"
        )
    if program.opaque is not None:
        return (
            "weights of a program that is one opaque launch stay where they were when it was "
            f"loaded ({program.opaque.reason}): give the tensor its former storage, or capture "
            "again to use another"
        )
    return ""
