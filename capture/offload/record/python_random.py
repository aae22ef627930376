"""Random numbers that are not torch's: executions would have the recorded ones each time."""

from __future__ import annotations

import random
import sys
from typing import Any

from offload.errors import CaptureError


class PythonRandom:
    """The states of Python's and NumPy's own generators, which all threads share, at one time."""

    def __init__(self) -> None:
        self._before = _states()

    def check(self) -> None:
        """Make sure that nothing has been drawn from them, and nobody has seeded them.

        Raises:
            CaptureError: naming whose state is another one.
        """
        now = _states()
        drawn = [name for name, state in self._before.items() if state != now[name]]
        if drawn:
            raise CaptureError(
                f"the call draws from {' and '.join(drawn)}, or seeds it, and executions would "
                "have the same numbers each time: draw from torch's generators, or pass the "
                "numbers as tensors (where another thread draws meanwhile, capture before it "
                "begins)"
            )


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        states["NumPy's random"] = _frozen(numpy.get_state(legacy=False))
    return states


def _frozen(state: Any) -> Any:
    """A state of any bit generator of NumPy's, whose arrays are bytes, to be compared."""
    if isinstance(state, dict):
        return {key: _frozen(part) for key, part in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
