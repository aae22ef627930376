"""Options of a load from the environment: OFFLOAD_DEBUG and OFFLOAD_DUMP."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from offload.console.switches import (
    DebugLevel,
    debug_level,
    dump_folder,
    reports_executions,
    say,
)
from offload.load.dump import Dump, taken
from offload.program import BoundProgram
from offload.run import Executable
from offload.run.debug_lines import loaded_line, planned_text
from offload.run.told_executable import tell_executions


@dataclasses.dataclass(frozen=True, slots=True)
class Switched:
    """The environment's options for one load.

    Attributes:
        name: of the load, for the user.
        level: the verbosity.
        dump: the folder for its output; None: no output.
    """

    name: str
    level: DebugLevel
    dump: Dump | None

    def done(self, recorded: BoundProgram, run: Executable, *, verify: bool) -> Executable:
        """Report and dump a load; return the executable, which is closed if that fails.

        Args:
            recorded: the Program before it was fused and prepared.
            run: its executable.
            verify: proofs at load were not omitted.

        Raises:
            FileError: the folder cannot be written to.
        """
        try:
            if self.dump is not None:
                self.dump.write(recorded, run, name=self.name, verify=verify)
                run.keep_timelines(self.dump.keep_timeline)
            if self.level >= DebugLevel.STAGES:
                kept = "" if self.dump is None else f"; kept in {self.dump.path}"
                say(f"{loaded_line(run, self.name, verify=verify)}{kept}")
            if self.level >= DebugLevel.PLANS:
                say(planned_text(run), DebugLevel.PLANS)
            if self.level >= DebugLevel.EXECUTIONS and reports_executions():
                tell_executions(run)
        except BaseException:
            run.close()
            raise
        return run


@contextlib.contextmanager
def switched(name: str) -> Iterator[Switched]:
    """Read the environment before a load, and reserve a folder; removed if the block raises.

    Raises:
        BindingError: OFFLOAD_DEBUG is not a level.
        FileError: the folder of OFFLOAD_DUMP cannot be written to.
    """
    level, folder = debug_level(), dump_folder()
    if folder is None:
        yield Switched(name, level, None)
        return
    with taken(folder, name) as dump:
        yield Switched(name, level, dump)
