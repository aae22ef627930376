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
        state = numpy.get_state(legacy=False)
        key, position = state["state"]["key"], state["state"]["pos"]
        gauss = state["has_gauss"], state["gauss"]
        states["NumPy's random"] = (key.tobytes(), position, *gauss)
    return states
