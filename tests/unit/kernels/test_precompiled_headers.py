"""Precompiled headers: made once, used where they are right, and never needed."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from pathlib import Path

import pytest

from offload.compile import making, precompiled, toolchain
from offload.compile.cache import KernelCache

try:
    compiler = toolchain.find_compiler()
except toolchain.CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)
if compiler.is_clang:
    pytest.skip("clang takes other options", allow_module_level=True)

PRELUDE = '#include "one.hpp"\n'
SOURCE = PRELUDE + toolchain.EXPORTED + " int answer() { return one(); }\n"


class Setup:
    """A header of ours, and a cache."""

    def __init__(self, folder: Path) -> None:
        self.cache = KernelCache(folder / "kernels")
        self.header = folder / "include" / "a space" / "one.hpp"
        self.header.parent.mkdir(parents=True)
        self.write(1)
        self.options = toolchain.Options(include_folders=(str(self.header.parent),))
        self.target = folder / "made.so"
        self.n_made = 0

    def write(self, number: int) -> None:
        self.header.write_text(f"#pragma once\ninline int one() {{ return {number}; }}\n")

    def build(self, source: str = SOURCE) -> int:
        """Build as kernels are built, and call the function."""
        self.target.unlink(missing_ok=True)
        making._build(source, PRELUDE, self.options, self.target, self.cache)
        self.n_made += 1
        copied = self.target.with_suffix(f".{self.n_made}.so")  # a loaded name is not loaded again
        copied.write_bytes(self.target.read_bytes())
        return ctypes.CDLL(str(copied)).answer()

    def files(self) -> list[Path]:
        return sorted(self.cache.folder.glob("*.gch"))

    def make(self) -> Path:
        """Build until the headers are precompiled."""
        for _ in range(precompiled.N_BUILDS_BEFORE + 1):
            assert self.build() == 1
        (file,) = self.files()
        return file


@pytest.fixture
def setup(tmp_path):
    return Setup(tmp_path)


@pytest.fixture
def commands(monkeypatch):
    """The compiler's commands."""
    called: list[tuple[str, ...]] = []
    run = toolchain._run

    def noted(*command: str) -> None:
        called.append(command)
        run(*command)

    monkeypatch.setattr(toolchain, "_run", noted)
    return called


def included(commands: list[tuple[str, ...]]) -> int:
    return sum("-include" in command for command in commands)


def test_they_are_made_once_builds_have_taken_as_long(setup, commands):
    for _ in range(precompiled.N_BUILDS_BEFORE):
        setup.build()
    assert not setup.files()
    assert included(commands) == 0
    setup.build()
    setup.build()
    assert included(commands) == 2
    assert sum("c++-header" in command for command in commands) == 1
    assert not list(setup.cache.folder.glob("*.partial"))
    assert all(path.stat().st_mode & 0o077 == 0 for path in setup.files())


def test_a_source_takes_them_instead_of_its_headers(setup, commands):
    setup.make()
    commands.clear()
    without = SOURCE.removeprefix(PRELUDE)
    assert setup.build(without) == 1  # nothing else defines what it calls
    assert included(commands) == 1


def test_a_header_that_changed_is_parsed_again(setup, commands):
    setup.make()
    setup.write(23)
    assert setup.build() == 23
    assert len(setup.files()) == 2  # the number of builds was reached before


@pytest.mark.parametrize("damage", ["shorter", "changed", "empty", "gone", "folder"])
def test_damaged_files_are_not_used(setup, damage):
    file = setup.make()
    precompiled._whole.clear()  # as in another process
    content = file.read_bytes()
    middle = len(content) // 2
    if damage == "shorter":
        file.write_bytes(content[:middle])
    elif damage == "changed":
        file.write_bytes(content[:middle] + bytes([content[middle] ^ 255]) + content[middle + 1 :])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if damage == "folder":
            file.mkdir()
    assert setup.build() == 1


def test_a_file_that_the_compiler_refuses_is_done_without(setup, commands):
    """Its digest is right, as of a file by a compiler that says nothing of what it depends on."""
    file = setup.make()
    file.write_bytes(b"gpch" + bytes(1000))
    name = setup.cache.adopt(file, ".hpp.gch")
    key = precompiled._key(PRELUDE + making.templates.PRELUDE, setup.options)
    found = setup.cache.find_headers(key, precompiled.Headers.of_document)
    assert found is not None
    setup.cache.keep_headers(key, dataclasses.replace(found, file=name).to_document())
    commands.clear()
    assert setup.build() == 1
    assert included(commands) == 1
    assert setup.build() == 1
    assert included(commands) == 1  # not tried again


def test_a_wrong_source_is_refused_and_the_headers_stay(setup, commands):
    setup.make()
    with pytest.raises(toolchain.CompilerFailed, match="error"):
        setup.build(SOURCE + "wrong")
    commands.clear()
    setup.build()
    assert included(commands) == 1


def test_without_room_builds_go_on(setup, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(precompiled, "precompile", refuse)
    for _ in range(precompiled.N_BUILDS_BEFORE + 2):
        assert setup.build() == 1
    assert not list(setup.cache.folder.iterdir())


def test_a_folder_that_may_not_be_written_has_none(setup, commands, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(precompiled.tempfile, "mkstemp", refuse)
    for _ in range(precompiled.N_BUILDS_BEFORE + 2):
        assert setup.build() == 1
    assert included(commands) == 0


def test_another_compiler_has_its_own(setup, monkeypatch):
    setup.make()
    other = dataclasses.replace(compiler, identity="another compiler")
    monkeypatch.setattr(precompiled, "find_compiler", lambda: other)
    key = precompiled._key(PRELUDE + making.templates.PRELUDE, setup.options)
    assert setup.cache.find_headers(key, precompiled.Headers.of_document) is None


def test_two_processes_make_them_at_once(setup):
    children = []
    for number in range(2):
        if not (child := os.fork()):
            try:
                setup.target = setup.target.with_name(f"{number}_made.so")
                for _ in range(precompiled.N_BUILDS_BEFORE + 2):
                    assert setup.build() == 1
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    assert setup.files()
    assert setup.build() == 1
    assert not list(setup.cache.folder.glob("*.partial"))
