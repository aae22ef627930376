"""Kernels whose proof fails or is interrupted: execution, messages and raised errors."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from torch.nn import functional

import offload
from offload.compile import proof
from offload.compile.toolchain import CompilerMissing, find_compiler

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)


def function(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = functional.gelu(x[index] * 2 + 1)
    return y, y.softmax(-1)


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 33), torch.randint(0, 5, (7,))


@pytest.fixture(scope="module")
def captured() -> offload.Captured:
    return offload.capture(function, *given())


@pytest.fixture
def failing(monkeypatch) -> None:
    monkeypatch.setattr(proof, "ERROR_RATIO", -1.0)
    monkeypatch.setattr(proof, "ROUNDINGS", -1.0)


def check(run: offload.Executable, x: torch.Tensor, index: torch.Tensor) -> None:
    for got, expected in zip(run(x, index), function(x, index), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("failing")
@torch.no_grad()
def test_what_fails_runs_as_recorded_and_is_not_counted(captured, monkeypatch):
    run = captured.load(fuse=True)
    run(*given())
    assert {one.mode for one in run.launch_reports()} == {"replaced"}
    # From now on Python takes no part in it.
    monkeypatch.setattr(proof, "run", None)
    held = [given() for _ in range(3)]
    for x, index in held * 2:
        out = torch.empty(7, 33), torch.empty(7, 33)
        for got, expected in zip(run(x, index, out=out), function(x, index), strict=True):
            assert got.equal(expected)
    assert run.fusion is not None
    assert (run.fusion.n_kernels, run.fusion.n_replaced) == (0, 0)
    assert len(run.fusion.regions) == run.proof.n_failed
    assert "fused: nothing" in run.explain()
    assert "load again and begin with other inputs" in run.explain()


@pytest.mark.usefixtures("failing")
@torch.no_grad()
def test_errors_of_replaced_launches_name_them_and_end_nothing(captured):
    run = captured.load(fuse=True)
    check(run, *given())
    x, index = given()
    with pytest.raises(offload.ExecutionError, match=r"test_failed_proofs.py.*aten::index"):
        run(x, index + 9)
    check(run, x, index)


@pytest.mark.usefixtures("failing")
@torch.no_grad()
def test_threads_share_what_failed(captured):
    run = captured.load(fuse=True)
    wrong = []

    def execute() -> None:
        with torch.no_grad():
            for _ in range(20):
                x, index = given()
                got = run(x, index)
                if not all(map(torch.equal, got, function(x, index))):
                    wrong.append(x)

    threads = [threading.Thread(target=execute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class Given(Exception):
    """Raised by a signal's handler."""


def raise_given(*_: object) -> None:
    raise Given("time is up")


@pytest.mark.parametrize("through", ["call", "submit"])
@pytest.mark.parametrize(
    ("handler", "raised"), [(signal.default_int_handler, KeyboardInterrupt), (raise_given, Given)]
)
@torch.no_grad()
def test_an_interrupt_of_a_proof_comes_through(captured, monkeypatch, handler, raised, through):
    before = signal.signal(signal.SIGINT, handler)
    call = proof._native.call_kernel
    interrupted: list[int] = []

    def interrupting(address: int, words: list[int]) -> None:
        if not interrupted:
            interrupted.append(address)
            handler(signal.SIGINT, None)
        call(address, words)

    monkeypatch.setattr(proof._native, "call_kernel", interrupting)
    try:
        run = captured.load(fuse=True)
        x, index = given()
        with pytest.raises(raised) as caught:
            run(x, index) if through == "call" else run.submit(x, index).wait()
        assert type(caught.value) is raised
        assert run.proof is None
        check(run, x, index)
        assert run.proof.n_failed == 0
        assert run.fusion.n_kernels > 0
    finally:
        signal.signal(signal.SIGINT, before)


@torch.library.custom_op("failed_proofs::interrupted", mutates_args=())
def interrupted(x: torch.Tensor, way: str) -> torch.Tensor:
    if x[0] > 0:
        raise {"interrupt": KeyboardInterrupt, "error": ValueError}[way]("from the operator")
    return x * 2


@interrupted.register_fake
def _(x: torch.Tensor, way: str) -> torch.Tensor:
    return torch.empty_like(x)


@torch.no_grad()
def test_operators_in_python_are_interrupted_likewise():
    x = torch.zeros(3)
    for way, raised in (("interrupt", KeyboardInterrupt), ("error", offload.ExecutionError)):
        run = offload.capture(lambda x, way=way: interrupted(x, way) + 1, x).load()
        for call in (run, lambda x, run=run: run.submit(x).wait()):
            with pytest.raises(raised, match="from the operator"):
                call(x + 1)
            assert run(x).equal(x * 2 + 1)


def without_memory(*_: object, **__: object) -> None:
    raise RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 1 bytes."
    )


@torch.no_grad()
def test_without_memory_for_float64_the_launches_are_exact(captured, monkeypatch):
    monkeypatch.setattr(proof, "_widened_inputs", without_memory)
    run = captured.load(fuse=True)
    check(run, *given())
    assert run.proof.n_failed == 0


@torch.no_grad()
def test_without_memory_for_a_proof_nothing_is_proved(captured, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(proof, "_Guarded", without_memory)
        run = captured.load(fuse=True)
        check(run, *given())
    check(run, *given())
    assert {one.mode for one in run.launch_reports()} == {"replaced"}
    assert "there is no memory for a proof" in run.explain()
