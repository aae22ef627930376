"""The memory of processes that stream weights, as printed by streaming_process.py and its like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from measurements import Ratio, ratio_of


def measure(script: Path, folder: Path, budget_bytes: int) -> dict[str, float]:
    """Return the output of such a script run as a separate process.

    Raises:
        RuntimeError: it failed; the message ends with the last line that it wrote.
    """
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    finished = subprocess.run(
        [sys.executable, str(script), str(folder), str(budget_bytes)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if finished.returncode:
        last = (finished.stderr.strip() or "nothing on stderr").splitlines()[-1]
        raise RuntimeError(f"{script.name} ended with status {finished.returncode}: {last}")
    found: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    return found


def against_streamed(found: Sequence[dict[str, float]], budget_bytes: int) -> Ratio:
    """1.01 times the budget and the streamed bytes, compared with the peaks beyond the imports."""
    return ratio_of(
        [1.01 * (one["streamed_bytes"] + budget_bytes) for one in found],
        beyond_imports(found),
        of="bytes",
        at_least=1,
    )


def beyond_imports(found: Sequence[dict[str, float]]) -> list[float]:
    """The peaks less the imported bytes."""
    return [one["peak_bytes"] - one["imported_bytes"] for one in found]
