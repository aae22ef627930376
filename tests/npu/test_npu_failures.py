"""Each call of the runtime that a load, an execution and a close make through torch_npu fails once.

torch_npu does not survive failures of its own calls for its queue and its memory, listed in
docs/backends/ascend_to_confirm.md. Of these only offload's own calls are failed here.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from npu_loading import FORMS, live, settled
from on_npu import check_same

import offload
from offload import backends
from offload.backends.ascend import TorchAscendBackend

BY_ANYBODY = [
    "aclrtSynchronizeEvent",
    "aclrtMemcpyAsync",
    "aclrtSetDevice",
    "aclrtGetDeviceCount",
    "aclrtGetCurrentContext",
    "aclrtGetMemInfo",
]
OURS = "_native"  # part of the name of offload's library, and of no other
EVENTS_AND_MEMORY = ("aclrtRecordEvent", "aclrtDestroyEvent", "aclrtFree")
BY_OFFLOAD = [f"{name} by {OURS}" for name in EVENTS_AND_MEMORY]
# Objects left by a failed release, which nothing else can release: the index in `live`.
LEFT_BY = {f"aclrtDestroyEvent by {OURS}": 2, f"aclrtFree by {OURS}": 3}


@pytest.fixture
def runtime(simulated_npu: AscendSimulator) -> Iterator[AscendSimulator]:
    """The simulated runtime; it distinguishes offload's calls until the test ends."""
    simulated_npu.set_caller(OURS)
    yield simulated_npu
    simulated_npu.set_caller("")


@pytest.mark.parametrize("form", ["captured", "relocated"])
@pytest.mark.parametrize("function", [*BY_ANYBODY, *BY_OFFLOAD])
def test_each_call_fails_once(
    function: str, form: str, runtime: AscendSimulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typed error or none; nothing is left behind, and the next load and execution are right."""
    make = functools.partial(TorchAscendBackend, **FORMS[form])
    monkeypatch.setattr(backends, "_BACKENDS", {**backends._BACKENDS, "npu": make})
    x = torch.ones(64).npu()
    captured = offload.capture(lambda x: (x * 2).relu(), x)

    def once() -> None:
        with captured.load() as run:
            check_same(run(x), torch.full((64,), 2.0))

    once()
    before = list(live(runtime))
    for nth in range(1, 400):
        runtime.forget_calls()
        runtime.fail(function, 507000, nth)
        try:
            once()
        except offload.OffloadError as error:
            assert "507000" in str(error), error  # noqa: PT017 - not each failure is an error
        is_reached = runtime.calls(function) >= nth
        runtime.forget_calls()
        if function in LEFT_BY and is_reached:
            place, after = LEFT_BY[function], list(live(runtime))
            assert after[place] > before[place], nth
            before[place] = after[place]
        assert settled(runtime, tuple(before)) == tuple(before), nth
        once()
        if not is_reached:
            assert nth > 1
            return
    pytest.fail(f"{function} was called at every try")


TORCH_ALONE = """
import sys, time
sys.path.insert(0, {path!r})
import npu_device
simulator = npu_device.load()
import torch, torch_npu
torch.npu.set_compile_mode(jit_compile=False)
torch.set_grad_enabled(False)
x = torch.ones(1 << 20).npu()
torch.npu.synchronize()
simulator.set_caller("torch_npu")
simulator.fail({function!r} + " by torch_npu", 507000)
try:
    side, event = torch.npu.Stream(), torch.npu.Event()
    event.record()
    side.wait_event(event)
    torch.npu.synchronize()
    del event, x
    torch.npu.synchronize()
    torch.npu.empty_cache()
    for _ in range(10_000):  # its launching thread empties its queue before it notes a failure
        torch.npu.synchronize()
        time.sleep(0.01)
except RuntimeError:
    print("raised")
simulator.forget_calls()
print("works" if (torch.ones(1).npu() + 1).item() == 2 else "launches nothing any more")
print("offload" in sys.modules)
"""


@pytest.mark.usefixtures("simulated_npu")
@pytest.mark.parametrize(
    ("function", "ends"),
    [
        ("aclrtRecordEvent", "launches nothing any more"),
        ("aclrtStreamWaitEvent", "launches nothing any more"),
        ("aclrtDestroyEvent", "launches nothing any more"),
        ("aclrtFree", "works"),  # that of its cache; in a destructor it ends the process
    ],
)
def test_what_torch_npu_does_not_survive_by_itself(
    function: str, ends: str, tmp_path: Path
) -> None:
    """Without offload in the process: the reason why its own calls are not failed above."""
    path = str(Path(npu_device.__file__).parent)
    script = tmp_path / "script.py"
    script.write_text(TORCH_ALONE.format(path=path, function=function), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout.splitlines()[-3:] == ["raised", ends, "False"], done.stderr


@pytest.mark.parametrize("swallowed", [False, True])
def test_a_load_that_fails_in_a_capture_block_is_itself(
    runtime: AscendSimulator, swallowed: bool
) -> None:
    """The recording stays valid, and can be loaded once the runtime works again."""
    x = torch.ones(64).npu()
    blocks = []

    def fails(captured: offload.Captured) -> None:
        runtime.fail("aclrtGetDeviceCount", 507000, 1)
        captured.load()

    def block() -> None:
        with offload.capture(lambda x: (x * 2).relu()) as captured:
            blocks.append(captured)
            captured(x)
            runtime.forget_calls()
            if swallowed:
                with pytest.raises(offload.OffloadError, match="507000"):
                    fails(captured)
            else:
                fails(captured)

    if swallowed:
        block()
    else:
        with pytest.raises(offload.OffloadError, match="507000"):
            block()
    runtime.forget_calls()
    with blocks[0].load() as run:
        check_same(run(x), torch.full((64,), 2.0))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_load_beside_a_capture_on_another_stream_is_refused(mode: str) -> None:
    """torch_npu would end the process: its pools synchronize the device as they are destroyed."""
    x = torch.ones(64).npu()
    captured = offload.capture(lambda x: (x * 2).relu() + 1, x)
    graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph, capture_error_mode=mode):
        y = x + 1
        with (
            torch.npu.stream(side),
            pytest.raises(offload.CaptureError, match="captured on another stream of npu:0"),
        ):
            captured.load()
    graph.replay()
    check_same(y, torch.full((64,), 2.0))
    with captured.load() as run:
        check_same(run(x), torch.full((64,), 3.0))


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_an_executable_that_is_closed_beside_a_capture_is_ended_later(
    mode: str, simulated_npu: AscendSimulator
) -> None:
    x = torch.ones(64).npu()
    captured = offload.capture(lambda x: (x * 2).relu() + 1, x)
    captured.load().close()
    before = live(simulated_npu)
    run = captured.load()
    graph, side = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph, capture_error_mode=mode):
        y = x + 1
        with torch.npu.stream(side):
            run.close()
    graph.replay()
    check_same(y, torch.full((64,), 2.0))
    del graph, y
    captured.load().close()
    assert live(simulated_npu) == before
