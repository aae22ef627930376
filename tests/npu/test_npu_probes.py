"""The NPU probes on the simulated NPU: each as expected, or not where it deviates."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import ascend_simulator
import on_npu  # noqa: F401  skips where torch_npu is missing
import pytest
from ascend_client import peek
from ascend_offline import INPUT, NONE, OUTPUT, Operand, Task, Tensor, pack_model
from ascend_simulator import AscendSimulator

import probe_device
import probes_offline
from probe_runs import answer_here
from probes_ascend import PROBES
from probing import NotAnswered, read_told

SCRIPT = Path(probe_device.__file__).parents[1] / "probes_ascend.py"
PARTS = [(probe.name, part) for probe in PROBES for part in probe.parts]

Call = Callable[..., int]
Answer = Callable[[str, str], tuple[dict[str, object], str | None, str]]


def add_one(block: bytes, _n_blocks: int) -> None:
    source, destination, count = (int.from_bytes(block[at : at + 8], "little") for at in (0, 8, 16))
    numbers = (ctypes.c_float * count).from_address(source)
    (ctypes.c_float * count).from_address(destination)[:] = [one + 1 for one in numbers]


@pytest.fixture
def offline_model(
    simulated_npu: AscendSimulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offline model that A7 needs: of one kernel, in the simulator's format."""
    operands = (Operand(INPUT), Operand(OUTPUT), Operand(NONE, offset_bytes=16))
    path = tmp_path / "model.om"
    path.write_bytes(
        pack_model(
            simulated_npu,
            inputs=[Tensor("x", (16,), 64)],
            outputs=[Tensor("y", (16,), 64)],
            kernels=[add_one],
            tasks=[Task(0, operands)],
            work_bytes=64,
            weights=b"",
        )
    )
    monkeypatch.setenv(probes_offline.MODEL_VARIABLE, str(path))


@pytest.fixture
def answer(
    simulated_npu: AscendSimulator, offline_model: None, capsys: pytest.CaptureFixture[str]
) -> Iterator[Answer]:
    """Run a part of a probe in this process: figures, outcome and reason."""

    def run(name: str, part: str = "") -> tuple[dict[str, object], str | None, str]:
        capsys.readouterr()
        answer_here(PROBES, name, part)
        return read_told(capsys.readouterr().out)

    probe_device.device.cache_clear()
    yield run
    assert not simulated_npu.errors
    probe_device.device.cache_clear()


@pytest.mark.parametrize(("name", "part"), PARTS)
def test_the_simulated_device_is_as_expected(name: str, part: str, answer: Answer) -> None:
    figures, outcome, because = answer(name, part)
    assert (outcome, because) in (("as expected", ""), ("as expected", "figures alone"))
    assert figures


Deviation = Callable[[pytest.MonkeyPatch, AscendSimulator], None]
DEVIATIONS: dict[tuple[str, str], Deviation] = {}


def deviates(*parts: tuple[str, str]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Registers a replacement for calls in these parts; it gets the call and the real function."""

    def register(instead: Callable[..., int]) -> Callable[..., int]:
        def install(monkeypatch: pytest.MonkeyPatch, simulator: AscendSimulator) -> None:
            real = probe_device.Device.code
            kept: dict[str, object] = {}

            def code(self: probe_device.Device, function: str, *arguments: object) -> int:
                def call(function: str, *arguments: object) -> int:
                    return real(self, function, *arguments)

                return instead(kept, call, function, *arguments)

            monkeypatch.setattr(probe_device.Device, "code", code)

        for part in parts:
            DEVIATIONS[part] = install
        return instead

    return register


@deviates(("A1", "capture"), ("A1", "build"))
def arguments_are_read_when_a_kernel_is_issued(
    _kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    if function != "aclrtLaunchKernel":
        return call(function, *arguments)
    kernel, n_blocks, block, n_bytes, stream = arguments
    content = ctypes.string_at(block, n_bytes)
    host = (kernel, n_blocks, stream, 0, content, n_bytes, 0, 0)
    return call("aclrtLaunchKernelWithHostArgs", *host)


@deviates(("A2", ""))
def blocks_are_read_where_the_first_one_was(
    kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    if function != "aclrtLaunchKernel":
        return call(function, *arguments)
    kernel, n_blocks, block, *others = arguments
    return call(function, kernel, n_blocks, kept.setdefault("block", block), *others)


@deviates(("A3", ""))
def executions_do_nothing(
    _kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    return 0 if function == "aclmdlRIExecuteAsync" else call(function, *arguments)


@deviates(("A4", "pinned"))
def staged_copies_read_late(
    _kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    if function == "aclrtMemcpyAsync" and arguments[4] == probe_device.HOST_TO_BUFFER_TO_DEVICE:
        arguments = (*arguments[:4], probe_device.HOST_TO_DEVICE, arguments[5])
    return call(function, *arguments)


@deviates(("A5", "512"), ("A5", "32"))
def copies_take_the_addresses_of_their_capture(
    _kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    if function != "aclrtMemcpyAsyncWithOffset":
        return call(function, *arguments)
    target, room, _, source, n_bytes, _, _, stream = arguments
    (to,), (of) = peek(target), peek(source)
    kind = probe_device.DEVICE_TO_DEVICE
    return call("aclrtMemcpyAsync", to, room, of[0], n_bytes, kind, stream)


@deviates(("A6", ""))
def parameters_name_a_copy_of_the_block(
    kept: dict[str, object], call: Call, function: str, *arguments: object
) -> int:
    code = call(function, *arguments)
    if function == "aclmdlRITaskGetParams":
        kernel = arguments[1]._obj.content.kernel  # type: ignore[attr-defined]
        copy = ctypes.create_string_buffer(kernel.arguments_bytes)
        ctypes.memmove(copy, kernel.arguments, kernel.arguments_bytes)
        place = ctypes.c_uint64()
        assert call("aclrtMalloc", ctypes.byref(place), kernel.arguments_bytes, 0) == 0
        to_device = (len(copy), copy, len(copy), probe_device.HOST_TO_DEVICE)
        assert call("aclrtMemcpy", place.value, *to_device) == 0
        kernel.arguments = place.value
    return code


@deviates(("A7", ""))
def executions_read_their_buffers_late(
    kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    waiting = kept.setdefault("waiting", [])
    assert isinstance(waiting, list)
    if function == "aclmdlExecuteAsync":
        waiting.append(arguments)
        return 0
    if function == "aclrtValueWrite":
        for one in waiting:
            assert call("aclmdlExecuteAsync", *one) == 0
    return call(function, *arguments)


@deviates(("A10", ""))
def additions_write_elsewhere(
    _kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    return 0 if function == "aclnnAdd" else call(function, *arguments)


@deviates(("A11", ""))
def executors_run_once(kept: dict[str, object], call: Call, function: str, *arguments: int) -> int:
    if function not in {"aclnnAdd", "aclnnIndexSelect"}:
        return call(function, *arguments)
    if function in kept:
        return 0
    kept[function] = True
    return call(function, *arguments)


@deviates(("A12", ""))
def tasks_keep_their_blocks(
    _kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    return 0 if function == "aclmdlRITaskSetParams" else call(function, *arguments)


@deviates(("A8", ""))
def waiting_for_a_capturing_stream_is_no_error(
    _kept: dict[str, object], call: Call, function: str, *arguments: int
) -> int:
    return 0 if function == "aclrtSynchronizeStream" else call(function, *arguments)


@pytest.mark.parametrize(("name", "part"), DEVIATIONS)
def test_a_device_that_deviates_is_found_out(
    name: str,
    part: str,
    answer: Answer,
    simulated_npu: AscendSimulator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    DEVIATIONS[name, part](monkeypatch, simulated_npu)
    _, outcome, because = answer(name, part)
    assert outcome == "otherwise"
    assert because


def test_without_software_sq_tables_are_not_asked_about(
    answer: Answer, simulated_npu: AscendSimulator
) -> None:
    simulated_npu.set_software_sq(False)
    try:
        assert answer("A0")[1:] == (
            "otherwise",
            "the firmware has no software SQ, so that tasks are not read",
        )
        for name, part in (("A1", "build"), ("A2", ""), ("A6", ""), ("A12", "")):
            assert answer(name, part)[1] == "not answered"
    finally:
        simulated_npu.set_software_sq(True)


def test_what_the_runtime_lacks_is_not_answered(
    answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = probe_device.Device.has
    missing = ("aclrtMemcpyAsyncWithOffset", "aclrtValueWait")
    monkeypatch.setattr(
        probe_device.Device, "has", lambda self, name: name not in missing and has(self, name)
    )
    monkeypatch.setattr(probe_device, "_BUSY_BYTES", 64)
    assert answer("A5", "32")[1:] == (
        "not answered",
        "this runtime has no aclrtMemcpyAsyncWithOffset",
    )
    assert answer("A4", "pageable")[1] == "as expected"  # copies block the stream
    assert missing[0] in answer("A0")[2]


def test_no_offline_model_and_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotAnswered, match="no atc"):
        probes_offline._made_by_atc(tmp_path, "Ascend910B1")


def test_the_command_writes_a_report(simulated_npu: AscendSimulator, tmp_path: Path) -> None:
    """With the simulator's libraries in place of real ones for the loader."""
    libraries = str(ascend_simulator.LIBRARY.parent)
    environment = {**os.environ, "LD_LIBRARY_PATH": libraries}
    path = tmp_path / "report.json"
    command = [sys.executable, str(SCRIPT), str(path), "--only", "A4"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["machine"]["device"] == "Ascend910B1"
    assert report["machine"]["torch_npu"] == importlib.import_module("torch_npu").__version__
    (probe,) = report["probes"]
    assert probe["outcome"] == "as expected"
    assert list(probe["parts"]) == ["pageable", "pinned"]
    assert "A4" in done.stdout
