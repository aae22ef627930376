"""The folder of the cache of kernels: its owner, its room, and what serves without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cached_kernels import builds
from kernel_sources import needs_compiler

from offload.compile import cache as caches
from offload.compile import fuse
from offload.compile.cache import CacheRefused, KernelCache

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


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
