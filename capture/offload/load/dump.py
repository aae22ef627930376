"""Output of OFFLOAD_DUMP: a folder for each load with the Program, the Plan and the Steps.

Folders and files appear by renaming, and a folder is empty until then: no partial output is
visible, and nothing is overwritten. No file has the content of a weight.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from offload.console.switches import DUMP
from offload.console.text import printable
from offload.errors import CostModelError, FileError
from offload.plan.printing import lane_lines, plan_data, plan_lines, steps_data
from offload.program import BoundProgram, Program, encode_program
from offload.run import Executable
from offload.run.forecast import forecast
from offload.timeline import Timeline

_PROGRAM, _FORECAST = "program.json", "timeline_predicted.json"
_NUMBERED = re.compile(r"(\d+)-")
_LONGEST_LABEL_BYTES = 60


class Dump:
    """The folder of one load. Owner: its executable. Thread: any.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        """Use a folder that is reserved, and empty."""
        self.path = path

    def write(self, recorded: BoundProgram, run: Executable, *, name: str, verify: bool) -> None:
        """Write everything that is known once a Program is loaded.

        Raises:
            FileError: it cannot be written; the folder stays empty.
        """
        texts, unwritten = _texts(recorded.program, run)
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
        with _writing(self.path):
            partial.mkdir()
            try:
                try:
                    forecast(run).save(partial / _FORECAST)
                except CostModelError as error:
                    unwritten[_FORECAST] = str(error)
                for file_name, text in texts.items():
                    (partial / file_name).write_text(text, "utf-8")
                about = _about(run, name, verify=verify) | {"not_written_at_load": unwritten}
                (partial / "load.json").write_text(_json(about), "utf-8")
                os.replace(partial, self.path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise

    def keep_timeline(self, run: Executable, timeline: Timeline) -> None:
        """Write a recorded timeline, if it has executions, as the next one of the folder.

        After the first one also the predicted timeline, if it was not known at load.

        Raises:
            FileError: it cannot be written.
        """
        if not timeline.executions:
            return
        self._save(timeline, (f"timeline_{number}.json" for number in itertools.count(1)))
        if not (self.path / _FORECAST).exists():
            with contextlib.suppress(CostModelError):  # load.json says so
                self._save(forecast(run, timeline.executions), [_FORECAST])

    def _save(self, timeline: Timeline, names: Iterable[str]) -> None:
        """Write a timeline under the first free one of these names, if any."""
        partial = self.path / f".timeline.{os.getpid()}.{threading.get_ident()}.json"
        with _writing(self.path):
            try:
                timeline.save(partial)
                for name in names:
                    with contextlib.suppress(FileExistsError):
                        (self.path / name).open("x").close()
                        os.replace(partial, self.path / name)
                        return
            finally:
                partial.unlink(missing_ok=True)


@contextlib.contextmanager
def taken(folder: Path, label: str) -> Iterator[Dump]:
    """A new folder in `folder`, with the next number; removed if the block raises.

    Args:
        folder: created if missing.
        label: of the load, for the user.

    Raises:
        FileError: the folder is missing and cannot be created, or cannot be written to.
    """
    words = re.sub(r"[^\w.-]+", "_", label).encode("utf-8", "replace")[:_LONGEST_LABEL_BYTES]
    name = words.decode("utf-8", "ignore").strip("._") or "program"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        path = _next(folder, name)
    try:
        yield Dump(path)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def _next(folder: Path, name: str) -> Path:
    used = (_NUMBERED.match(one) for one in os.listdir(folder))
    first = 1 + max((int(one[1]) for one in used if one is not None), default=0)
    for number in itertools.count(first):
        path = folder / f"{number:04d}-{name}"
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("numbers do not end")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Translate errors of the operating system."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path}: {DUMP} cannot be written there: {error}: name a folder that can be written "
            f"to, or unset {DUMP}"
        ) from error


def _texts(recorded: Program, run: Executable) -> tuple[dict[str, str], dict[str, str]]:
    """The files by name, and the reasons why others are not written."""
    program, plan = run.program, run.plan
    texts = {
        "program.txt": printable(str(recorded)),
        "plan.txt": "\n".join(plan_lines(program, plan)),
        "plan.json": _json(plan_data(plan)),
        "steps.txt": "\n".join(lane_lines(program, plan)),
        "steps.json": _json(steps_data(plan)),
        "explain.txt": printable(_explained(run)),
    }
    unwritten = {}
    try:
        texts[_PROGRAM] = _json(_without_content(encode_program(recorded)))
    except FileError as error:
        unwritten[_PROGRAM] = str(error)
    if str(program) == str(recorded):
        unwritten["loaded.txt"] = "what was loaded is what was recorded: program.txt"
    else:
        texts["loaded.txt"] = printable(str(program))
    return {name: f"{text}\n" for name, text in texts.items()}, unwritten


def _explained(run: Executable) -> str:
    streaming = run.streaming
    return run.explain() if streaming is None else f"{run.explain()}\n{streaming.explain()}"


def _without_content(program: dict[str, Any]) -> dict[str, Any]:
    """A Program as JSON data without the content of host constants, including weights."""
    values = [
        {key: one for key, one in value.items() if key != "host_content"}
        | ({"on_host": True} if "host_content" in value else {})
        for value in program["values"]
    ]
    return {**program, "values": values}


def _about(run: Executable, name: str, *, verify: bool) -> dict[str, Any]:
    return {
        "format": "offload load",
        "version": 1,
        "name": name,
        "device": run.device,
        "machine": run.machine.name,
        "scheduling": str(run.scheduling),
        "verify": verify,
        "is_fused": run.fusion is not None,
        "torch": torch.__version__,
        "process": os.getpid(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
    }


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1, allow_nan=False)
