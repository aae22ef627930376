"""The environment variables: their allowed values, and where their output goes."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.console.switches import (
    DEBUG,
    DUMP,
    LOGGER,
    DebugLevel,
    debug_level,
    dump_folder,
    measuring,
    reports_executions,
    say,
)
from offload.errors import BindingError, FileError


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def bare_logger() -> Iterator[None]:
    """The logger as in a new process."""
    handlers, level, propagate = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:], LOGGER.propagate = [], True
    LOGGER.setLevel(logging.NOTSET)
    yield
    LOGGER.handlers[:], LOGGER.propagate = handlers, propagate
    LOGGER.setLevel(level)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 0), ("", 0), ("0", 0), ("1", 1), ("2", 2), (" 3 ", 3)],
)
def test_levels(monkeypatch: pytest.MonkeyPatch, given: str | None, expected: int) -> None:
    if given is None:
        monkeypatch.delenv(DEBUG, raising=False)
    else:
        monkeypatch.setenv(DEBUG, given)
    assert debug_level() is DebugLevel(expected)


@pytest.mark.parametrize("given", ["4", "-1", "yes", "1.0", "٣"])
def test_what_is_no_level_says_what_is_expected(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv(DEBUG, given)
    with pytest.raises(BindingError, match=r"OFFLOAD_DEBUG: expected 0 \(nothing\), 1 .*") as error:
        debug_level()
    assert repr(given) in str(error.value)


def test_the_folder_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DUMP, raising=False)
    assert dump_folder() is None
    monkeypatch.setenv(DUMP, "")
    assert dump_folder() is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(DUMP, "kept")
    assert dump_folder() == tmp_path / "kept"


def test_lines_go_to_what_is_stderr_now(
    bare_logger: None, capsys: pytest.CaptureFixture[str]
) -> None:
    say("first\n  of two lines")
    say("a plan", DebugLevel.PLANS)
    assert capsys.readouterr() == ("", "offload: first\n  of two lines\noffload: a plan\n")
    assert [type(one).__name__ for one in LOGGER.handlers] == ["_Stderr"]


def test_handlers_of_the_root_do_not_repeat_it(
    bare_logger: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    logging.getLogger().addHandler(kept)
    try:
        say("once")
    finally:
        logging.getLogger().removeHandler(kept)
    assert capsys.readouterr().err == "offload: once\n"
    assert kept.records == []


def test_handlers_that_somebody_gave_take_its_place(
    bare_logger: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    LOGGER.addHandler(kept)
    say("a stage")
    say("a plan", DebugLevel.PLANS)
    assert [(one.levelno, one.getMessage()) for one in kept.records] == [
        (logging.INFO, "a stage"),
        (logging.DEBUG, "a plan"),
    ]
    assert capsys.readouterr().err == ""


class NoStream:
    """A replacement of stderr that some programs install."""

    def write(self, _: str) -> None:
        raise OSError("nobody reads it")


@pytest.mark.parametrize("stream", ["none", "closed", "odd"])
def test_where_stderr_takes_nothing_nothing_fails(
    stream: str, bare_logger: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    given = {"none": None, "closed": closed, "odd": NoStream()}[stream]
    monkeypatch.setattr(sys, "stderr", given)
    say("unheard")


def test_a_relative_folder_of_a_directory_that_has_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv(DUMP, "kept")
    with pytest.raises(FileError, match=r"OFFLOAD_DUMP: expected a folder, got 'kept'"):
        dump_folder()


def test_names_do_not_steer_a_terminal(
    bare_logger: None, capsys: pytest.CaptureFixture[str]
) -> None:
    say("a \x1b[2J name")
    assert capsys.readouterr().err == "offload: a \\x1b[2J name\n"


def test_what_is_measured_says_nothing_of_executions() -> None:
    assert reports_executions()
    with measuring():
        with measuring():
            assert not reports_executions()
        assert not reports_executions()
    assert reports_executions()
