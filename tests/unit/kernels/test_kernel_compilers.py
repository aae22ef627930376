"""Compilers of kernels: none, broken ones, several words; their refusals are tried again."""

from __future__ import annotations

import pytest
import torch
from cached_kernels import compiler_of
from kernel_sources import needs_compiler
from torch import nn

import offload
from offload.compile import fuse, toolchain

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.long]


def test_it_is_found_without_a_compiler(bound, folder):
    fuse(bound, cache_folder=folder)
    with compiler_of(PATH=""):
        assert fuse(bound, cache_folder=folder).fusion.n_kernels == 1
        none = fuse(bound, cache_folder=folder.parent / "other").fusion
    assert none.n_kernels == 0
    assert {reason for _, reason in none.kept} == {
        "no C++ compiler: g++, c++ and clang++ are not on PATH"
    }
    # That refusal is not stored: with a compiler the kernel is made.
    assert fuse(bound, cache_folder=folder.parent / "other").fusion.n_kernels == 1


COMPILERS = {
    "printing no text": r"""case "$*" in *--version*) exec g++ --version;; esac
printf "fout: \351 error\n" >&2; exit 1""",
    "writing nothing": r"""printf "\273\377 1.0\n" """,
    "making nothing": "exit 0",
}


@pytest.mark.parametrize("script", COMPILERS.values(), ids=COMPILERS)
def test_a_compiler_that_is_none_leaves_all_as_recorded(bound, folder, script):
    compiler = folder.parent / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    with compiler_of(CXX=str(compiler)):
        fusion = fuse(bound, cache_folder=folder).fusion
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


@pytest.mark.parametrize("name", ["env g++", "env -u HOME g++"])
def test_a_compiler_may_be_several_words(bound, folder, name):
    """As `ccache g++`: Inductor accepts only a path."""
    with torch.no_grad():
        loops = offload.capture(lambda x: torch.sigmoid(x) * 3, torch.randn(9)).bound
    with compiler_of(CXX=name):
        for one in (bound, loops):
            assert fuse(one, cache_folder=folder).fusion.n_kernels == 1


def test_a_compilers_name_that_cannot_be_read_is_told(bound, folder):
    with compiler_of(CXX='g++ "'):
        fusion = fuse(bound, cache_folder=folder).fusion
    assert fusion.n_kernels == 0
    assert all("CXX cannot be read: No closing quotation" in reason for _, reason in fusion.kept)


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


def test_empty_definitions_are_no_options(folder):
    target = folder.parent / "one.so"
    toolchain.build("int one;", toolchain.Options(definitions=("", "A=1")), target)
    assert target.is_file()
