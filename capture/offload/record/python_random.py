"""Random numbers that are not torch's: executions would repeat the recorded ones."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

from offload.console.user_code import level_of_user


class PythonRandom:
    """A snapshot of Python's and NumPy's own generators, which all threads share."""

    def __init__(self) -> None:
        self._before = _states()

    def warn_of_draws(self) -> None:
        """Warn (UserWarning) if they were drawn from or seeded.

        Not an error, since the use of the numbers is unknown: speech models of transformers draw a
        number for each layer, which matters in training alone.
        """
        now = _states()
        drawn = [name for name, state in self._before.items() if state != now[name]]
        if drawn:
            warnings.warn(
                f"the call draws from {' and '.join(drawn)}, or seeds it: if results depend on the "
                "numbers, executions have those of the recording each time; draw from torch's "
                "generators instead, or pass the numbers as tensors",
                stacklevel=level_of_user(),
            )


def _states() -> dict[str, Any]:
    states: dict[str, Any] = {"Python's random": random.getstate()}
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        states["NumPy's random"] = _frozen(numpy.get_state(legacy=False))
    return states


def _frozen(state: Any) -> Any:
    """A comparable state of any NumPy bit generator, with arrays as bytes."""
    if isinstance(state, dict):
        return {key: _frozen(part) for key, part in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
