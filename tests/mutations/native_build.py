"""Native test programs and extension modules with one mutated object file.

Only the mutated file is compiled. The rest is linked from the build that `make` left.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome

from mutations.areas import ROOT
from mutations.copied_tree import EXTENSIONS, TREE, WORK
from mutations.forked_pytest import Outcome

OBJECTS = WORK / "objects"
_TESTS = "native/tests"
_ASSERTIONS = "-D_GLIBCXX_ASSERTIONS"  # as native/CMakeLists.txt with OFFLOAD_TESTS
_LIMIT_S = 600.0
_LEAST_LIMIT_S = 20.0
_LIBRARIES = ("liboffload_core.a", "liboffload_plan.a")


class BuildError(Exception):
    """The unchanged tree does not build, or `make` has not built it; with what was printed."""


class NativeBuild:
    """Compiles and links as the build of `make` does. Owner: the thread that makes it."""

    def __init__(self) -> None:
        """Find the build.

        Raises:
            BuildError: it does not exist, or is older than the working tree.
        """
        tag = f"cp{sysconfig.get_config_var('py_version_nodot')}"
        folders = [path.parent for path in (ROOT / "build").glob(f"{tag}-*/build.ninja")]
        if len(folders) != 1:
            raise BuildError(f"expected one build in {ROOT / 'build'}, found {folders}: run make")
        self._folder = folders[0]
        answer = self._run(["ninja", "-n"])
        if "no work to do" not in answer.stdout:
            raise BuildError(f"{self._folder} is not up to date: run make\n{answer.stdout[-2000:]}")
        commands = json.loads((self._folder / "compile_commands.json").read_text(encoding="utf-8"))
        self._commands = {one["file"]: shlex.split(one["command"]) for one in commands}
        self._limits_s: dict[str, float] = {}
        OBJECTS.mkdir(exist_ok=True)

    def compile(self, path: str, *, asserts: bool = False) -> tuple[Path, str]:
        """Compile a file of the copied tree: the object file, and what was printed if it fails.

        Args:
            path: of the file, relative to the repository.
            asserts: with the assertions of the standard library, as native tests are compiled.
        """
        command = self._command(path)
        return self._compile(path, command, asserts=asserts)

    def is_original(self, path: str, compiled: Path) -> bool:
        """Return whether an object file is the one that the build made of the working tree."""
        original = self._folder / _output(self._commands[str(ROOT / path)])
        return compiled.read_bytes() == original.read_bytes()

    def link(self, program: str, changed: Path | None) -> Path:
        """Link a test program, with a changed object file in place of the library's.

        Raises:
            BuildError: the program does not compile, or does not link.
        """
        source = f"{_TESTS}/{program}.cpp"
        compiled = OBJECTS / f"{program}.asserts.o"
        if changed is None or not compiled.exists():
            command = self._command("native/core/header.cpp")
            printed = self._compile(source, command, asserts=True)[1]
            if printed:
                raise BuildError(printed)
        linked = OBJECTS / program
        libraries = ["-Wl,--start-group", *_LIBRARIES, "-Wl,--end-group", "-pthread"]
        objects = [str(one) for one in (compiled, changed) if one is not None]
        answer = self._run(["g++", *objects, *libraries, "-o", str(linked)])
        if answer.returncode:
            raise BuildError(answer.stderr)
        return linked

    def run_programs(self, programs: tuple[str, ...], changed: Path | None) -> Outcome:
        """Link test programs and run them until the first fails.

        Each has run without a changed object file before: ten times as long is a failure.
        """
        for program in programs:
            linked, begin = str(self.link(program, changed)), time.monotonic()
            limit_s = _LIMIT_S if changed is None else self._limits_s[program]
            found, log = run_tests(linked, limit_s)
            if changed is None:
                self._limits_s[program] = max(_LEAST_LIMIT_S, 10 * (time.monotonic() - begin))
            if found != TestOutcome.SURVIVED:
                how = "the time limit" if log == "timeout" else "failed"
                return Outcome(f"{_TESTS}/{program}.cpp", how, log)
        return Outcome("")

    @contextlib.contextmanager
    def installed(self, module: str, changed: Path) -> Iterator[None]:
        """Put an extension module with a changed object file into the copied tree for a block.

        Raises:
            BuildError: it does not link.
        """
        name = module + sysconfig.get_config_var("EXT_SUFFIX")
        printed = self._run(["ninja", "-t", "commands", f"bindings/{name}"]).stdout.splitlines()[-1]
        command = shlex.split(printed.removeprefix(": && ").partition(" && ")[0])
        linked, at = OBJECTS / name, command.index("-o")
        command[at : at + 2] = ["-o", str(linked), str(changed)]
        answer = self._run(command)
        if answer.returncode:
            raise BuildError(answer.stderr)
        original, kept = EXTENSIONS / name, EXTENSIONS / f"{name}.original"
        original.rename(kept)  # not written over: a process may have mapped it
        try:
            shutil.copy2(linked, original)
            yield
        finally:
            kept.replace(original)

    def is_program(self, test: str) -> bool:
        """Return whether a test is one of the native programs."""
        return test.startswith(_TESTS)

    def _command(self, path: str) -> list[str]:
        native, copied = str(ROOT / "native"), str(TREE / "native")
        command = self._commands[str(ROOT / path)]
        return [one.replace(native, copied) for one in command]

    def _compile(self, path: str, command: list[str], *, asserts: bool) -> tuple[Path, str]:
        # The flags of `command`, for another file.
        compiled = OBJECTS / f"{Path(path).stem}{'.asserts' if asserts else ''}.o"
        flags = [*command[: command.index("-o")], *([_ASSERTIONS] if asserts else [])]
        answer = self._run([*flags, "-w", "-o", str(compiled), "-c", str(TREE / path)])
        return compiled, answer.stderr if answer.returncode else ""

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, check=False
        )


def _output(command: list[str]) -> str:
    return command[command.index("-o") + 1]
