"""Python in a separate process, which has imported offload and opened no device.

It is a fork of a server that has imported it: each import would take two seconds.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["offload", "pytest"])


def _run(code: str, environment: Mapping[str, str], output: str, errors: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in ((1, output), (2, errors)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})


def output_of(code: str) -> str:
    """Return the code's output. AssertionError with its error output if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        arguments = (code, dict(os.environ), str(output), str(errors))
        process = _PROCESSES.Process(target=_run, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == 0, errors.read_text()
        return output.read_text().strip()
