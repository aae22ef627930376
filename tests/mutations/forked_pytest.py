"""pytest in a process that is forked from one that has imported torch.

Only this module and what it imports is loaded in such a process.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

_MEMORY_BYTES = 8 << 30
_PRELOADED = ["torch", "numpy", "hypothesis", "mutations.forked_pytest"]
_OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--benchmark-disable"),
    *("-o", "addopts=--strict-markers", "-m", "not alone"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what is preloaded
)


@dataclass(frozen=True)
class Outcome:
    """What ran against a mutant found.

    Attributes:
        noticed_by: the first failing test or native program, or "".
        how: it "failed", ran into "the time limit", or ended the process.
        log: what it printed.
    """

    noticed_by: str
    how: str = ""
    log: str = ""


class Forks:
    """Runs pytest in processes forked from a warm one. Owner: the thread that makes it."""

    def __init__(self, limit_s: float) -> None:
        """Prepare to fork.

        Args:
            limit_s: a test that takes longer hangs. The first also collects all of them.
        """
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._durations_s: dict[str, float] = {}

    def run(self, folder: Path, tests: tuple[str, ...], *, mutated: bool) -> Outcome:
        """Run `tests` in `folder` until the first fails, the quickest of those known first.

        Compiled Python is kept only of a tree that is not mutated.
        """
        ours, theirs = self._context.Pipe(duplex=False)
        log = folder.parent / "pytest.log"
        settings = (folder, tests, theirs, log, self._durations_s, mutated)
        process = self._context.Process(target=_child, args=settings)
        process.start()
        theirs.close()
        try:
            noticed_by, how = self._follow(ours, tests[0])
        finally:
            _end(process)
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return Outcome(noticed_by, how, text)

    def _follow(self, messages: Connection, running: str) -> tuple[str, str]:
        # `running` is the test that has begun; before the first, the module it is collected from.
        while messages.poll(self._limit_s):
            try:
                what, *values = messages.recv()
            except EOFError:
                return running, "the process ended"
            if what == "begins":
                running = values[0]
            elif what == "passed":
                self._durations_s[values[0]] = values[1]
            elif what == "failed":
                return values[0], "failed"
            elif values[0] == pytest.ExitCode.OK:
                return "", ""
            else:
                return running, f"pytest ended with {values[0]}"
        return running, "the time limit"


class _Messages:
    """Tells which tests begin, pass and fail; orders them by their known durations."""

    def __init__(self, connection: Connection, durations_s: dict[str, float]) -> None:
        self._connection, self._durations_s = connection, durations_s

    def tell(self, *message: Any) -> None:
        self._connection.send(message)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda one: self._durations_s.get(one.nodeid, 0.0))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tell("begins", nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tell("failed", report.nodeid)
        elif report.when == "call":
            self.tell("passed", report.nodeid, report.duration)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.tell("failed", report.nodeid)


def _child(
    folder: Path,
    tests: tuple[str, ...],
    connection: Connection,
    log: Path,
    durations_s: dict[str, float],
    mutated: bool,
) -> None:
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    with log.open("w", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)  # a fork has its parent's path
    sys.dont_write_bytecode = mutated
    messages = _Messages(connection, durations_s)
    status = int(pytest.main([*_OPTIONS, *tests], plugins=[messages]))
    product = sys.modules.get("offload")
    if product is not None and not str(product.__file__).startswith(str(folder)):
        raise RuntimeError(f"{product.__file__} was tested, and not the copy in {folder}")
    messages.tell("ended", status)
    os._exit(0)


def _end(process: BaseProcess) -> None:
    # The process may have ended, or not yet have made its group.
    for kill in (os.killpg, os.kill):
        try:
            kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        break
    process.join()
