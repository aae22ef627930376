"""Random numbers that are not torch's: executions would have the recorded ones each time."""

from __future__ import annotations

import random
import sys
import warnings
from typing import Any

from offload.console.user_code import level_of_user


class PythonRandom:
    """The states of Python's and NumPy's own generators, which all threads share, at one time."""

    def __init__(self) -> None:
        self._before = _states()

    def warn_of_draws(self) -> None:
        """Warn (UserWarning) where something has drawn from them, or seeded them.

        It is no error, since nobody sees what becomes of the numbers: speech models of
        transformers draw one for each layer, which counts in training alone.
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
    """A state of any bit generator of NumPy's, whose arrays are bytes, to be compared."""
    if isinstance(state, dict):
        return {key: _frozen(part) for key, part in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
