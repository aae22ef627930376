"""Models recorded on the device and run by its default backend, as without any argument.

Run by `test_torch_on_simulator`, on the simulated driver; torch says that it is built with CUDA.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "simulators" / "cuda" / "torch_cuda"))

import stand_in
from cases import Flipped, Mlp, cuda, settled  # noqa: F401

import offload
from offload.backends.captured.random_draws import own_random_states


@pytest.fixture(autouse=True)
def built_with_cuda(cuda, monkeypatch):  # noqa: F811
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def on_device(model):
    torch.manual_seed(0)
    return model().eval().to("cuda")


def rows():
    return torch.randn(4, 16).to("cuda")


def assert_eagers(found, model, x):
    with torch.no_grad():
        assert torch.equal(found, model(x))


@pytest.mark.parametrize("kind", [Mlp, Flipped])
def test_results_on_reused_memory_leave_a_program(kind):
    """The capturer copies these results, in captures of the model or of its launches."""
    model = on_device(kind)
    captured = offload.capture(model, rows())
    assert captured.program.opaque is None
    assert not captured.program.unchecked
    with captured.load() as run:
        for _ in range(3):
            x = rows()
            assert_eagers(run(x), model, x)


class Keeping(nn.Module):
    """Copies its argument by work that torch does not see."""

    def __init__(self):
        super().__init__()
        self.layer = Flipped()
        self.register_buffer("kept", torch.zeros(4, 16))

    def forward(self, x):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            self.simulation().operators.run(torch.ops.aten.copy_.default, self.kept, x)
        return self.layer(x)


def test_a_copy_that_the_capturer_adds_hides_none_of_the_models(cuda):  # noqa: F811
    model = on_device(Keeping)
    model.simulation = weakref.ref(cuda)  # whose attributes change
    example = rows()
    model.kept.copy_(example)  # so that the copy changes nothing here
    captured = offload.capture(model, example)
    assert captured.program.opaque is not None
    assert "1 x aten::copy_" in captured.program.opaque.reason
    x = rows()
    assert_eagers(captured(x), model.layer, x)
    assert torch.equal(model.kept, x)


def test_a_recording_leaves_no_workspace_in_its_pool(cuda):  # noqa: F811
    model = on_device(Mlp)

    def reserved_bytes():
        gc.collect()
        cuda.clear_workspaces()  # as the next load does
        return torch.cuda.memory_reserved()

    offload.capture(model, rows())
    before_bytes = reserved_bytes()
    for _ in range(3):
        offload.capture(model, rows())
        assert reserved_bytes() - before_bytes < stand_in.WORKSPACE_BYTES


def test_a_recording_beside_a_capture_sees_the_generators_own_states(cuda):  # noqa: F811
    """A capture puts the state of the device's generator aside, and puts it back."""
    (generator,) = torch.cuda.default_generators
    begun, ended = threading.Event(), threading.Event()

    def put_aside():
        cuda.current()
        with own_random_states([generator], torch.device("cuda", 0)):
            begun.set()
            ended.wait()

    thread = threading.Thread(target=put_aside)
    model, x = on_device(Mlp), rows()
    state = generator.get_state()
    thread.start()
    begun.wait()
    assert not torch.equal(generator.get_state(), state)

    def step(x):
        y = model(x)
        ended.set()
        thread.join()
        y.mean().backward()
        optimizer.step()
        return y.detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        captured = offload.capture(step, x, training=True)  # the recorded step is undone
    finally:
        ended.set()
        thread.join()
    assert captured.program.opaque is None
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize(
    "reading",
    [lambda x: x * x.sum().item(), lambda x: x if x.sum() > 0 else -x, lambda x: x[x > 0]],
    ids=["item", "if", "mask"],
)
def test_a_host_read_is_told_what_works_on_the_device(reading):
    """Not host_reads="guard", which a load for the device refuses."""
    with pytest.raises(offload.CaptureError, match="on the device") as raised:
        offload.capture(reading, rows())
    assert "host_reads" not in str(raised.value)


def test_a_call_without_tensors_is_recorded_on_the_default_device():
    def made_there():
        return torch.arange(4, device="cuda") + 1

    def on_default():
        return torch.arange(4) + 1

    with (
        pytest.raises(offload.CaptureError, match=r'capture it under torch.device\("cuda:0"\)'),
        offload.capture(made_there) as captured,
    ):
        captured()
    for step in (made_there, on_default):
        with torch.device("cuda"), offload.capture(step) as captured:
            captured()
        assert captured.program.device == "cuda"
        with captured.load() as run:
            assert run().to("cpu").tolist() == [1, 2, 3, 4]
