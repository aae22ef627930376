"""Progress: what a callback receives, what a terminal shows, and where nothing is shown."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.console import progress
from offload.console.progress import advance, reporting, stage
from offload.costs import fit
from offload.observe import calibration
from offload.observe.diagnosis import Effort, diagnose_call, diagnose_saved

SHORT = Effort(turns=4, sample_ns=1, budget_ns=0, least_turns=3)
Told = list[tuple[int, int, str]]


def check_stages(told: Told, *, but_last: bool = False) -> list[str]:
    """The stages in order; each begins at 0, never decreases and ends at its total."""
    names = list(dict.fromkeys(what for _, _, what in told))
    for name in names:
        counts = [done for done, _, what in told if what == name]
        totals = {total for _, total, what in told if what == name}
        assert counts[0] == 0
        assert counts == sorted(counts)
        assert len(totals) == 1
        if but_last and name == names[-1]:
            assert counts[-1] < totals.pop()
        else:
            assert counts[-1] == totals.pop()
    return names


def collector() -> tuple[Told, Callable[[int, int, str], object]]:
    told: Told = []
    return told, lambda *step: told.append(step)


# ---- callbacks -----------------------------------------------------------------------------------


@pytest.fixture
def few_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_N_ROUNDS", 1)
    monkeypatch.setattr(calibration, "_N_CHECKS", 40)
    monkeypatch.setattr(calibration, "_PROBES", calibration._PROBES[:2])
    monkeypatch.setattr(calibration, "DRIFT", float("inf"))


@pytest.mark.slow
def test_calibrate_tells_every_measurement(tmp_path: Path, few_measurements: None) -> None:
    told, collect = collector()
    offload.calibrate(folder=tmp_path, progress=collect)
    assert check_stages(told) == [
        "measuring headers",
        "fitting the header's costs",
        "measuring what operators displace",
        "measuring mixed programs",
        "measuring the delivery of launches",
    ]
    n_of = {what: sum(one[2] == what for one in told) - 1 for _, _, what in told}
    assert n_of["measuring headers"] == len(calibration._FITTED)
    assert n_of["fitting the header's costs"] == fit.n_fits(len(calibration._FITTED))
    assert n_of["measuring what operators displace"] == 2 * calibration._PROBE_ROUNDS
    told.clear()
    offload.calibrate(folder=tmp_path, progress=collect)
    assert check_stages(told) == ["checking the costs that were kept"]
    assert len(told) == 1 + len(calibration._CHECKED)


def test_a_calibration_that_is_stopped_claims_no_total(
    tmp_path: Path, few_measurements: None
) -> None:
    told: Told = []

    def stop(*step: Any) -> None:
        told.append(step)
        if step[0] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        offload.calibrate(folder=tmp_path, progress=stop)
    assert check_stages(told, but_last=True) == ["measuring headers"]
    assert not list(tmp_path.iterdir())


def test_diagnose_tells_its_stages() -> None:
    told, collect = collector()
    offload.diagnose(torch.nn.Linear(4, 3), torch.ones(2, 4), progress=collect)
    stages = ["timing calls", "recording a timeline", "timing operators"]
    assert check_stages(told) == ["capturing the model", *stages]
    with offload.capture(torch.relu) as captured:
        captured(torch.ones(2))
    told.clear()
    diagnose_saved(captured, (torch.ones(2),), {}, effort=SHORT, progress=collect)
    assert check_stages(told) == stages


def test_an_error_of_the_model_claims_no_total() -> None:
    told, collect = collector()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        diagnose_call(torch.nn.Linear(4, 3), (torch.ones(2, 5),), {}, progress=collect)
    assert check_stages(told, but_last=True)


def test_a_model_that_takes_the_name_itself() -> None:
    def function(x: torch.Tensor, *, progress: torch.Tensor) -> torch.Tensor:
        return x + progress

    kwargs = {"progress": torch.ones(2)}
    assert diagnose_call(function, (torch.ones(2),), kwargs, effort=SHORT).n_launches == 1
    with pytest.raises(offload.BindingError, match="expected a function of"):
        offload.diagnose(function, torch.ones(2), **kwargs)


@pytest.mark.parametrize("given", [True, 3, "yes"])
def test_what_is_no_progress(given: Any, tmp_path: Path) -> None:
    with pytest.raises(offload.BindingError, match="expected a function of"):
        offload.calibrate(folder=tmp_path, progress=given)


def test_of_calls_inside_of_one_another_the_outermost_tells() -> None:
    told, collect = collector()
    with reporting(collect), stage("outer", 2):
        advance()
        with reporting(), stage("inner", 5):
            advance()
        advance()
    assert told == [(0, 2, "outer"), (1, 2, "outer"), (2, 2, "outer")]
    advance()  # outside a stage


# ---- what a terminal shows -----------------------------------------------------------------------


class Terminal:
    """A terminal that is stderr in a with-block, and the text written to it."""

    def __init__(self) -> None:
        self.read_end, write_end = pty.openpty()
        self.stream = open(write_end, "w", encoding="utf-8")  # noqa: SIM115 - closed by its fixture

    def __enter__(self) -> None:
        self._stderr = contextlib.redirect_stderr(self.stream)
        self._stderr.__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._stderr.__exit__(*raised)

    def text(self) -> str:
        self.stream.flush()
        os.set_blocking(self.read_end, False)
        found = b""
        while True:
            try:
                part = os.read(self.read_end, 1 << 16)
            except OSError:
                return found.decode()
            if not part:
                return found.decode()
            found += part


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    one = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    yield one
    one.stream.close()
    os.close(one.read_end)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DRAWN_EACH_S", 0.0)


HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def test_stages_are_drawn_and_erased(terminal: Terminal, at_once: None) -> None:
    threads = threading.active_count()
    with terminal, reporting(after_s=0), stage("measuring [bold]", 2):
        advance()
        assert threading.active_count() == threads
    text = terminal.text()
    assert "measuring [bold]" in text
    assert all(f"{percent}%" in text for percent in (0, 50, 100))
    assert text.endswith("\x1b[2K")  # the line is erased
    assert text.count(HIDE) == text.count(SHOW) == 1


def test_short_calls_show_nothing(terminal: Terminal) -> None:
    with terminal, reporting(), stage("short", 2):
        advance()
    with terminal, reporting(False, after_s=0), stage("silenced", 2):
        advance()
    with terminal, reporting(False), reporting(after_s=0), stage("inside of a silenced one", 2):
        advance()
    long_s = 2 * progress.SHOWN_AFTER_S
    with terminal, reporting(), stage("expected to be long", 2, expected_s=long_s):
        pass
    text = terminal.text()
    assert "short" not in text
    assert "silenced" not in text  # by itself, or by the enclosing call
    assert "expected to be long" in text


@pytest.mark.parametrize("raised", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_the_terminal_as_it_was(
    terminal: Terminal, at_once: None, raised: type[BaseException]
) -> None:
    with pytest.raises(raised), terminal, reporting(after_s=0), stage("failing", 2):
        raise raised
    text = terminal.text()
    assert "100%" not in text
    assert text.index(HIDE) < text.index(SHOW)
    with terminal, reporting(after_s=0), stage("the next call"):
        pass
    assert "the next call" in terminal.text()


def test_one_thread_at_a_time_draws(terminal: Terminal, at_once: None) -> None:
    n_threads, failures = 4, []
    together = threading.Barrier(n_threads)

    def call(name: str) -> None:
        try:
            together.wait()
            with reporting(after_s=0), stage(name, 50):
                for _ in range(50):
                    advance()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(f"thread {n}",)) for n in range(n_threads)]
    with terminal:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert not failures
    text = terminal.text()
    assert "thread" in text
    assert text.count(HIDE) == text.count(SHOW)
    assert not re.search(f"{re.escape(HIDE)}(?:(?!{re.escape(SHOW)}).)*{re.escape(HIDE)}", text)


def test_an_open_display_of_rich_stays_alone(terminal: Terminal, at_once: None) -> None:
    from rich.console import Console
    from rich.progress import Progress

    with (
        terminal,
        Progress(console=Console(file=terminal.stream, force_terminal=True)),
        reporting(after_s=0),
        stage("of offload", 1),
    ):
        advance()
    assert "of offload" not in terminal.text()


def test_a_terminal_that_has_gone_ends_nothing(terminal: Terminal, at_once: None) -> None:
    with terminal, reporting(after_s=0), stage("drawn", 3) as told:
        advance()
        terminal.stream.close()
        advance()
    assert told.done == 3


def test_diagnose_shows_itself(terminal: Terminal, at_once: None) -> None:
    with terminal:
        diagnose_call(torch.nn.Linear(4, 3), (torch.ones(2, 4),), {}, effort=SHORT)
    text = terminal.text()
    for what in ("capturing the model", "timing calls", "recording a timeline"):
        assert what in text
    with terminal:
        diagnose_call(torch.relu, (torch.ones(2),), {}, effort=SHORT, progress=False)
    assert terminal.text() == ""


def test_long_captures_and_files_show_themselves(
    terminal: Terminal, at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown_at_once = lambda given=None, after_s=0: reporting(given, after_s=0)  # noqa: E731
    for module in ("api.block_recording", "api.captured", "load.pipeline"):
        monkeypatch.setattr(sys.modules[f"offload.{module}"], "reporting", shown_at_once)
    with terminal:
        captured = offload.capture(torch.nn.Linear(64, 64), torch.ones(2, 64))
        text = terminal.text()
        assert "recording launches" in text
        assert "checking launches" in text
        captured.save(tmp_path / "m.offload")
        assert "writing weights" in terminal.text()
        offload.open(tmp_path / "m.offload")
        assert "reading weights" in terminal.text()
        with captured.load(weights_budget="auto"):
            assert "reading weights" in terminal.text()


# ---- where nothing is shown ----------------------------------------------------------------------

SILENT = """
import sys
import offload
assert "rich.progress" not in sys.modules
from offload.console.progress import advance, stage, reporting
with reporting(after_s=0), stage("never", 2):
    advance()
assert "rich.progress" not in sys.modules
"""


def test_a_pipe_stays_empty() -> None:
    environment = {**os.environ, "FORCE_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SILENT], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stderr) == (0, "")


class Writes:
    """A replacement of stderr that some programs install: it only supports write."""

    def write(self, _: str) -> None:
        raise AssertionError("nothing is to be drawn")


@pytest.mark.parametrize("stream", ["none", "closed", "writes"])
def test_without_stderr(stream: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = (tmp_path / "closed").open("w")
    file.close()
    given = {"none": None, "closed": file, "writes": Writes()}[stream]
    monkeypatch.setattr(sys, "stderr", given)
    with reporting(after_s=0), stage("never", 2) as told:
        advance()
    assert told.done == 2


def test_what_is_no_progress_is_refused_where_nothing_is_long() -> None:
    captured = offload.capture(torch.sin, torch.ones(3))
    with pytest.raises(offload.BindingError, match="expected a function of"):
        captured.load(progress=3)
