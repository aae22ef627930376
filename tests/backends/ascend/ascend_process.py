"""Python in a separate process with the simulated Ascend runtime."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ascend_simulator
import new_process

HERE = Path(ascend_simulator.__file__).parent

_BEGIN = """
import sys
sys.path.insert(0, {here!r})
import ascend_simulator
from offload.native import _native
from offload.errors import BackendUnavailable
ascend = ascend_simulator.load()
"""


def output_of(
    code: str, *, simulated: bool = True, environment: Mapping[str, str] | None = None
) -> str:
    """Return what a new process prints with the simulated runtime loaded; variables are added."""
    code = (_BEGIN.format(here=str(HERE)) if simulated else "") + code
    if environment is None:
        return new_process.output_of(code)
    # The dynamic linker reads its environment variables when a process begins.
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
