"""The cache of compiled kernels: its owner, its hits, and the entries it rejects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_sources import needs_compiler
from torch import nn

import offload
from offload.compile import cache as caches
from offload.compile import fuse, toolchain
from offload.compile.cache import CacheRefused, Entry, KernelCache

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def bound():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    with torch.no_grad():
        return offload.capture(model, torch.randn(1, 8)).bound  # a single row: nothing is packed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def only(folder: Path, suffix: str) -> Path:
    (found,) = (path for path in folder.rglob(f"*{suffix}"))
    return found


def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources compiled from now on."""
    made: list[str] = []
    build = toolchain.build

    def noted(source, options, target):
        made.append(source)
        build(source, options, target)

    monkeypatch.setattr("offload.compile.making.build", noted)
    return made


def test_what_was_compiled_once_is_found(bound, folder, monkeypatch):
    made = builds(monkeypatch)
    first = fuse(bound, cache_folder=folder)
    assert (first.fusion.n_kernels, first.fusion.n_replaced, len(made)) == (1, 2, 1)
    second = fuse(bound, cache_folder=folder)
    assert (second.fusion.n_kernels, len(made)) == (1, 1)


def test_it_is_found_without_a_compiler(bound, folder, monkeypatch):
    fuse(bound, cache_folder=folder)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    toolchain.find_compiler.cache_clear()
    try:
        assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
        none = fuse(bound, cache_folder=folder.parent / "other").fusion
    finally:
        monkeypatch.undo()
        toolchain.find_compiler.cache_clear()
    assert none.n_kernels == 0
    assert {reason for _, reason in none.kept} == {
        "no C++ compiler: g++, c++ and clang++ are not on PATH"
    }
    # That refusal is not stored: with a compiler the kernel is made.
    assert fuse(bound, cache_folder=folder.parent / "other").fusion.n_kernels == 1


def test_neither_inductor_nor_a_compiler_is_loaded_for_what_is_found(folder):
    """In another process, which reports its modules."""
    script = f"""
import sys, pathlib, torch, offload
from offload.compile import fuse, toolchain
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval()
with torch.no_grad():
    bound = offload.capture(model, torch.randn(4, 8)).bound
if sys.argv[1] == "again":
    def refuse(*_): raise AssertionError("compiles")
    import offload.compile.making as fusing
    fusing.build = refuse
fusion = fuse(bound, cache_folder=pathlib.Path({str(folder)!r})).fusion
print(fusion.n_kernels, "torch._inductor.codegen" in sys.modules, "torch._dynamo" in sys.modules)
"""
    told = []
    for turn in ("first", "again"):
        done = subprocess.run(
            [sys.executable, "-c", script, turn], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.split())
    assert told[0][:2] == ["2", "True"]
    assert told[1] == ["2", "False", "False"]


@pytest.mark.parametrize("content", [b"", b"\x7fELF" + bytes(100), b"not code"])
def test_a_library_that_is_not_what_was_written_is_made_again(bound, folder, content, monkeypatch):
    fuse(bound, cache_folder=folder)
    # A new file: the one that this process has loaded stays unchanged.
    library = only(folder, ".so")
    library.unlink()
    library.write_bytes(content)
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1
    assert only(folder, ".so").read_bytes() != content


DAMAGED = {
    "empty": "",
    "no fields": "{}",
    "a list": "[]",
    "cut off": '{"symbol": 3',
    "one field": '{"symbol": "k"}',
    "nothing": "null",
    "too large a number": '{"symbol": "k", "library": "l", "scratch_bytes": [1e400]}',
    "too deep": "[" * 200_000,
}


def rewrite(entry: Path, **fields: object) -> None:
    """Rewrite fields of an entry, with the digest of its new content."""
    document = {**json.loads(entry.read_text()), **fields}
    del document["digest"]
    document["digest"] = caches._digest_of(entry.stem, document)
    entry.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "fields",
    [{"scratch_bytes": [-8]}, {"scratch_bytes": [2**62]}, {"symbol": ""}, {"library": "a\0b"}],
)
def test_an_entry_that_was_changed_is_made_again(bound, folder, fields, monkeypatch):
    fuse(bound, cache_folder=folder)
    entry = only(folder, ".json")
    entry.write_text(json.dumps({**json.loads(entry.read_text()), **fields}))
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1


def test_an_entry_of_another_name_is_made_again(bound, folder, monkeypatch):
    fuse(bound, cache_folder=folder)
    with torch.no_grad():
        other = offload.capture(lambda x: torch.sigmoid(x) * 3, torch.randn(9)).bound
    entry = only(folder, ".json")
    fuse(other, cache_folder=folder)
    (added,) = set(folder.rglob("*.json")) - {entry}
    entry.write_text(added.read_text())
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1


@pytest.mark.parametrize("suffix", [".json", ".so"])
def test_a_folder_in_the_place_of_a_file_is_removed(bound, folder, suffix, monkeypatch):
    fuse(bound, cache_folder=folder)
    path = only(folder, suffix)
    path.unlink()
    path.mkdir()
    (path / "file").write_text("")
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1
    assert path.is_file()


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_entry_is_made_again(bound, folder, text, monkeypatch):
    fuse(bound, cache_folder=folder)
    only(folder, ".json").write_text(text)
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1


COMPILERS = {
    "printing no text": r"""case "$*" in *--version*) exec g++ --version;; esac
printf "fout: \351 error\n" >&2; exit 1""",
    "writing nothing": r"""printf "\273\377 1.0\n" """,
    "making nothing": "exit 0",
}


@pytest.mark.parametrize("script", COMPILERS.values(), ids=COMPILERS)
def test_a_compiler_that_is_none_leaves_all_as_recorded(bound, folder, script, monkeypatch):
    compiler = folder.parent / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    toolchain.find_compiler.cache_clear()
    try:
        fusion = fuse(bound, cache_folder=folder).fusion
    finally:
        monkeypatch.undo()
        toolchain.find_compiler.cache_clear()
    assert fusion.n_kernels == 0
    assert all(f"{compiler} refuses it" in reason for _, reason in fusion.kept)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1


def test_no_room_for_the_compilers_files_leaves_all_as_recorded(bound, folder, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offload.compile.toolchain.tempfile.TemporaryDirectory", refuse)
    fusion = fuse(bound, cache_folder=folder).fusion
    monkeypatch.undo()
    assert fusion.n_kernels == 0
    assert all("No space left on device" in reason for _, reason in fusion.kept)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1


def test_an_entry_of_another_compiler_is_made_again(bound, folder, monkeypatch):
    fuse(bound, cache_folder=folder)
    entry = only(folder, ".json")
    rewrite(entry, compiler="/usr/bin/another 1 2")
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1


def test_an_entry_cannot_name_a_file_elsewhere(bound, folder, tmp_path, monkeypatch):
    fuse(bound, cache_folder=folder)
    entry, library = only(folder, ".json"), only(folder, ".so")
    elsewhere = tmp_path / library.name
    elsewhere.write_bytes(library.read_bytes())
    rewrite(entry, library=f"../../{library.name}")
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_refused(bound, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CacheRefused, match="chmod go-w"):
        KernelCache(folder)
    with pytest.warns(RuntimeWarning, match="for this process alone.*XDG_CACHE_HOME"):
        fusion = fuse(bound, cache_folder=folder).fusion
    assert fusion.n_kernels == 1
    assert "written by others" in "\n".join(fusion.explain())
    assert not list(folder.iterdir())


def test_a_folder_of_the_process_goes_with_it(tmp_path):
    (tmp_path / "cache").write_text("")
    script = """
import torch, offload
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval()
x = torch.randn(4, 8)
with torch.no_grad():
    captured = offload.capture(model, x)
    for _ in range(2):
        run = captured.load(fuse="auto")
        assert (run(x) - model(x)).abs().max() < 1e-5
print(run.fusion.n_kernels + len(run.fusion.choice.kept))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1\n", done.stderr
    assert "kernels are kept for this process alone" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize("umask", [0o002, 0o000, 0o077])
def test_what_it_makes_itself_is_the_users_alone(bound, folder, umask):
    before = os.umask(umask)
    try:
        assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    finally:
        os.umask(before)
    made = [folder, *folder.rglob("*")]
    assert len(made) == 4  # the folder of the environment, an entry, a library
    assert not [path for path in made if path.stat().st_mode & 0o077]


def test_a_folder_of_another_user_is_refused(folder, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(CacheRefused, match="another user"):
        KernelCache(folder)


def test_a_folder_that_cannot_be_made_is_refused(bound, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be made"):
        assert fuse(bound, cache_folder=tmp_path / "file" / "kernels").fusion.n_kernels == 1


def test_without_any_folder_all_stays_as_recorded(bound, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")

    def refuse(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(caches.tempfile, "mkdtemp", refuse)
    fusion = fuse(bound, cache_folder=tmp_path / "file" / "other").fusion
    assert fusion.n_kernels == 0
    assert all("Read-only file system" in reason for _, reason in fusion.kept)


@pytest.mark.parametrize("name", ["env g++", "env -u HOME g++"])
def test_a_compiler_may_be_several_words(bound, folder, name, monkeypatch):
    """As `ccache g++`: Inductor accepts only a path."""
    monkeypatch.setenv("CXX", name)
    toolchain.find_compiler.cache_clear()
    try:
        fusion = fuse(bound, cache_folder=folder).fusion
        with torch.no_grad():
            loops = offload.capture(lambda x: torch.sigmoid(x) * 3, torch.randn(9)).bound
        assert fuse(loops, cache_folder=folder).fusion.n_kernels == 1
    finally:
        monkeypatch.undo()
        toolchain.find_compiler.cache_clear()
    assert fusion.n_kernels == 1


def test_a_compilers_name_that_cannot_be_read_is_told(bound, folder, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "')
    toolchain.find_compiler.cache_clear()
    try:
        fusion = fuse(bound, cache_folder=folder).fusion
    finally:
        monkeypatch.undo()
        toolchain.find_compiler.cache_clear()
    assert fusion.n_kernels == 0
    assert all("CXX cannot be read: No closing quotation" in reason for _, reason in fusion.kept)


def test_what_was_used_least_lately_goes_first(folder, monkeypatch, tmp_path):
    cache = KernelCache(folder)
    monkeypatch.setattr(caches, "LIMIT_BYTES", 2500)
    names = []
    for number in range(4):
        built = tmp_path / f"{number}.so"
        built.write_bytes(bytes([number]) * 1000)
        names.append(cache.keep_library(built))
        os.utime(cache.folder / names[-1], (number, number))
    left = {path.name for path in cache.folder.iterdir()}
    assert left == set(names[2:])


def test_what_is_refused_is_kept_too(folder):
    cache = KernelCache(folder)
    cache.keep({"loops-1": Entry(refusal="no loops")})
    assert cache.find("loops-1") == Entry(refusal="no loops")
    assert cache.find("loops-2") is None


def test_what_the_compiler_refuses_is_alone_and_tried_again(folder, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        bound = offload.capture(model, torch.randn(4, 8)).bound
    build = toolchain.build

    def refuse_norms(source, options, target):
        if "cpp_prefix.h" in source:
            raise toolchain.CompilerFailed("error: no space left")
        build(source, options, target)

    with monkeypatch.context() as patch:
        patch.setattr("offload.compile.making.build", refuse_norms)
        fusion = fuse(bound, cache_folder=folder).fusion
    assert fusion.n_kernels == 2
    compiler = toolchain.find_compiler().command[0]
    assert fusion.kept == {
        ("aten::native_layer_norm", f"{compiler} refuses it: error: no space left"): 1
    }
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 3


LAYER_NORM = nn.Sequential(nn.LayerNorm(8)).eval()


def test_what_a_broken_inductor_refuses_is_tried_again(folder, monkeypatch):
    from offload.compile import inductor, inductor_lines

    def broken(*_: object) -> None:
        raise RuntimeError("already registered")

    with torch.no_grad():
        bound = offload.capture(LAYER_NORM, torch.randn(4, 8)).bound
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "_lowered", broken)
        patch.setattr(inductor_lines, "_worked", set())
        fusion = fuse(bound, cache_folder=folder).fusion
    assert fusion.kept == {("aten::native_layer_norm", "Inductor: already registered"): 1}
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1


@pytest.mark.parametrize("error", [OSError(28, "No space"), MemoryError("none"), RecursionError()])
def test_what_inductor_finds_no_room_for_is_tried_again(error, folder, monkeypatch):
    from offload.compile import inductor, inductor_lines

    def no_room(*_: object) -> None:
        raise RuntimeError("it failed") from error

    with torch.no_grad():
        bound = offload.capture(LAYER_NORM, torch.randn(4, 8)).bound
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "_lowered", no_room)
        patch.setattr(inductor_lines, "_worked", {"cpu"})
        assert not fuse(bound, cache_folder=folder).fusion.n_kernels
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1


def test_a_full_disk_leaves_kernels_to_the_process(bound, folder, monkeypatch):
    """Partial files are removed; the kernel serves this process, which warns each time."""
    replace, made = os.replace, builds(monkeypatch)

    def full(source, target):
        if folder in Path(target).parents:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(caches.os, "replace", full)
    with pytest.warns(RuntimeWarning, match="no room: .*No space.* for this process alone"):
        fusion = fuse(bound, cache_folder=folder).fusion
    assert (fusion.n_kernels, len(made)) == (1, 2)
    assert "no room" in fusion.cache_refusal
    assert not [path for path in folder.rglob("*") if path.is_file()]
    with pytest.warns(RuntimeWarning, match="no room"):
        again = fuse(bound, cache_folder=folder).fusion
    assert (again.n_kernels, len(made)) == (1, 2)


def test_a_pipe_in_the_place_of_an_entry_is_not_waited_for(bound, folder, monkeypatch):
    fuse(bound, cache_folder=folder)
    path = only(folder, ".json")
    path.unlink()
    os.mkfifo(path)
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1
    assert path.is_file()


def test_empty_definitions_are_no_options(folder):
    target = folder.parent / "one.so"
    toolchain.build("int one;", toolchain.Options(definitions=("", "A=1")), target)
    assert target.is_file()


def test_two_processes_fill_it_at_once(folder):
    script = f"""
import pathlib, torch, offload
from offload.compile import fuse
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 3)).eval()
x = torch.randn(4, 8)
with torch.no_grad():
    bound = offload.capture(model, x).bound
for _ in range(3):
    fusion = fuse(bound, cache_folder=pathlib.Path({str(folder)!r})).fusion
    assert fusion.n_kernels == 2, fusion
"""
    running = [
        subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for one in running:
        assert one.wait() == 0, one.stderr.read() if one.stderr else ""
        if one.stderr:
            one.stderr.close()
    assert not list(folder.rglob("*.partial"))
