"""The cache of compiled kernels: its hits, and the entries it rejects."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cached_kernels import builds, only
from kernel_sources import needs_compiler

import offload
from offload.compile import cache as caches
from offload.compile import fuse
from offload.compile.cache import Entry, KernelCache
from offload.program import BoundProgram

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


def assert_made_again(bound: BoundProgram, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that the kernel is compiled although the folder has an entry for it."""
    made = builds(monkeypatch)
    assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
    assert len(made) == 1


def test_what_was_compiled_once_is_found(bound, folder, monkeypatch):
    made = builds(monkeypatch)
    first = fuse(bound, cache_folder=folder)
    assert (first.fusion.n_kernels, first.fusion.n_replaced, len(made)) == (1, 2, 1)
    second = fuse(bound, cache_folder=folder)
    assert (second.fusion.n_kernels, len(made)) == (1, 1)


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
    assert_made_again(bound, folder, monkeypatch)
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
    "a negative size": {"scratch_bytes": [-8]},
    "a huge size": {"scratch_bytes": [2**62]},
    "no symbol": {"symbol": ""},
    "a name with a zero": {"library": "a\0b"},
}


def rewrite(entry: Path, **fields: object) -> None:
    """Rewrite fields of an entry, with the digest of its new content."""
    document = {**json.loads(entry.read_text()), **fields}
    del document["digest"]
    document["digest"] = caches._digest_of(entry.stem, document)
    entry.write_text(json.dumps(document))


def test_an_entry_of_another_name_is_made_again(bound, folder, monkeypatch):
    fuse(bound, cache_folder=folder)
    with torch.no_grad():
        other = offload.capture(lambda x: torch.sigmoid(x) * 3, torch.randn(9)).bound
    entry = only(folder, ".json")
    fuse(other, cache_folder=folder)
    (added,) = set(folder.rglob("*.json")) - {entry}
    entry.write_text(added.read_text())
    assert_made_again(bound, folder, monkeypatch)


@pytest.mark.parametrize(("suffix", "is_pipe"), [(".json", False), (".so", False), (".json", True)])
def test_what_lies_in_the_place_of_a_file_is_removed(bound, folder, suffix, is_pipe, monkeypatch):
    """A folder; or a pipe, for whose content nobody waits."""
    fuse(bound, cache_folder=folder)
    path = only(folder, suffix)
    path.unlink()
    if is_pipe:
        os.mkfifo(path)
    else:
        path.mkdir()
        (path / "file").write_text("")
    assert_made_again(bound, folder, monkeypatch)
    assert path.is_file()


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_entry_is_made_again(bound, folder, content, monkeypatch):
    """Also one that other fields were written to, with which its digest differs."""
    fuse(bound, cache_folder=folder)
    entry = only(folder, ".json")
    if isinstance(content, dict):
        content = json.dumps({**json.loads(entry.read_text()), **content})
    entry.write_text(content)
    assert_made_again(bound, folder, monkeypatch)


def test_an_entry_of_another_compiler_is_made_again(bound, folder, monkeypatch):
    fuse(bound, cache_folder=folder)
    entry = only(folder, ".json")
    rewrite(entry, compiler="/usr/bin/another 1 2")
    assert_made_again(bound, folder, monkeypatch)


def test_an_entry_cannot_name_a_file_elsewhere(bound, folder, tmp_path, monkeypatch):
    fuse(bound, cache_folder=folder)
    entry, library = only(folder, ".json"), only(folder, ".so")
    elsewhere = tmp_path / library.name
    elsewhere.write_bytes(library.read_bytes())
    rewrite(entry, library=f"../../{library.name}")
    assert_made_again(bound, folder, monkeypatch)


def test_what_is_refused_is_kept_too(folder):
    cache = KernelCache(folder)
    cache.keep({"loops-1": Entry(refusal="no loops")})
    assert cache.find("loops-1") == Entry(refusal="no loops")
    assert cache.find("loops-2") is None
