"""Work that the recorder cannot see makes a model one opaque launch, on the simulated driver."""

from __future__ import annotations

import array
import copy
import ctypes
import struct

import pytest
import torch
from checks import Call, sharing
from nets import ResNet18, images
from torch import nn

import offload

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from hidden_models import N_REPLAYS, Hidden, Raw, assert_replays, assert_same_state, is_opaque, rows
from opaque_capturing import current_capture
from simulated_backend import SimulatedBackend, install


@pytest.fixture
def backend(simulator, monkeypatch) -> SimulatedBackend:
    """Recordings on the CPU are for the simulated device."""
    return install(simulator, monkeypatch, records=True)


def record_by_hooks(model, x):
    with offload.capture(model) as captured:
        recorded = model(x)
    return captured, recorded


def record_by_handle(model, x):
    captured = offload.capture(model, x)
    return captured, captured.recorded_result


RECORDS = pytest.mark.parametrize("record", [record_by_hooks, record_by_handle])


# ---- work that the Program misses ----------------------------------------------------------------


@RECORDS
def test_a_raw_kernel_that_the_program_misses_is_found(backend, simulator, record):
    model = Hidden(Raw(simulator)).eval()
    x = rows()
    expected = copy.deepcopy(model)(x)
    captured, recorded = record(model, x)
    assert torch.equal(recorded, expected)
    assert is_opaque(captured)
    assert (
        "launches work that the recorder cannot see: 1 x raw_add" in captured.program.opaque.reason
    )
    assert captured.program.launches[0].writes == (captured.program.results[0].view.value,)
    run = assert_replays(model, captured, rows)
    assert [one.mode for one in run.launch_reports()] == ["opaque"]
    assert run.feature_map_bytes > 0
    assert run.last_execution.policy == "all"
    assert model.raw.counts[1] > 0


@RECORDS
def test_a_buffer_that_a_raw_kernel_writes(backend, simulator, record):
    """Once by the recorded call, never by loading, and once by each execution."""
    model = Hidden(Raw(simulator), buffer=True).eval()
    captured, _ = record(model, rows())
    assert torch.equal(model.steps, torch.ones(8))
    assert is_opaque(captured)
    assert "2 x raw_add" in captured.program.opaque.reason
    assert_replays(model, captured, rows)
    assert torch.equal(model.steps, torch.full((8,), 1.0 + N_REPLAYS))


def test_an_input_that_a_raw_kernel_writes(backend, simulator):
    raw = Raw(simulator)

    def function(x):
        doubled = x * 2
        raw(x)
        return doubled

    captured = offload.capture(function, rows())
    assert is_opaque(captured)
    assert "args[0] was changed by work that the recorder cannot see" in (
        captured.program.opaque.reason
    )
    run = captured.load()
    for _ in range(N_REPLAYS):
        x = rows()
        before = x.clone()
        assert torch.equal(run(x), before * 2)
        assert torch.equal(x, before + 1)


class Clamping(Raw):
    """A kernel that writes nothing new where nothing is negative."""

    @staticmethod
    def _execute(block):
        address, count, _ = struct.unpack("<QQf", block[:20])
        content = (ctypes.c_float * count).from_address(address)
        for index in range(count):
            content[index] = max(content[index], 0.0)


@pytest.mark.parametrize("begin", [0, 1])
def test_an_input_that_a_raw_kernel_writes_unobserved(backend, simulator, begin):
    """Where it must be copied, as it is not aligned, it is also copied back."""
    raw = Clamping(simulator)

    def function(x):
        raw(x)
        return x * 2

    captured = offload.capture(function, torch.ones(8))
    assert is_opaque(captured)
    assert captured.program.inputs[0].value not in captured.program.launches[0].writes
    run, memory = captured.load(), torch.full((9,), -1.0)
    x = memory[begin:][:8]
    assert torch.equal(run(x), torch.zeros(8))
    assert torch.equal(x, torch.zeros(8))
    assert run.last_execution.bytes_copied == 2 * 32 * begin
    assert memory[-1 if begin == 0 else 0] == -1
    assert torch.equal(run(torch.ones(()).expand(8)), torch.full((8,), 2.0))


class Launcher(Raw):
    """Asks the tensor for its address as Triton's launcher does, where the recorder sees it."""

    def __call__(self, target):
        target.data_ptr()
        super().__call__(target)


@pytest.mark.parametrize("n_items", [8, 40_000])
def test_an_address_that_is_given_away_makes_the_call_opaque(backend, simulator, n_items):
    """Memory that may be written through it is saved first, however large it is."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros(n_items))
            self.raw = Launcher(simulator)

        def forward(self, x):
            self.raw(self.steps)
            return x + self.steps[:8]

    model = Counting()
    captured = offload.capture(model, rows())
    assert "test_cuda_opaque.py" in captured.program.opaque.reason
    assert "data_ptr" in captured.program.opaque.reason
    assert_replays(model, captured, rows)
    assert torch.equal(model.steps, torch.full((n_items,), 1.0 + N_REPLAYS))


def test_a_large_buffer_that_is_written_unwatched_is_refused(backend, simulator):
    model = Hidden(Raw(simulator), buffer=True)
    model.steps = torch.zeros(40_000)
    model.linear = nn.Linear(8, 40_000)
    with pytest.raises(
        offload.CaptureError, match=r"steps was written by .* too large to have been"
    ):
        offload.capture(model, rows())


class Plain(nn.Module):
    """Constants, dead launches, views, reserved memory and state: nothing unseen."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        x.sin()
        scale = torch.arange(8.0) + torch.ones(8)
        made = torch.empty(8, 3)
        made.copy_(self.norm(x).t() * scale[:, None])
        return made.t()[:, :4], made


@pytest.mark.parametrize("training", [False, True])
def test_a_model_without_hidden_work_stays_a_program(backend, training):
    model = Plain().train(training)
    captured = offload.capture(model, rows())
    assert captured.program.opaque is None
    assert captured.program.unchecked == ""
    assert len(captured.program.launches) > 2
    assert backend._capturer.n_opaque_captures == 1
    twin, run = copy.deepcopy(model), captured.load()
    for _ in range(N_REPLAYS):
        x = rows()
        with torch.no_grad():
            torch.testing.assert_close(run(x), twin(x), rtol=0, atol=0)
    assert_same_state(model, twin)


def test_a_network_without_hidden_work_stays_a_program(backend):
    captured = offload.capture(ResNet18().eval(), **images(0))
    assert captured.program.opaque is None
    assert backend._capturer.n_opaque_captures == 1


def test_what_cannot_be_captured_is_not_compared_and_says_so(backend):
    """Code that cannot run while a graph is captured, though its launches can."""

    def function(x):
        if current_capture() is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        return x * 2

    captured = offload.capture(function, torch.ones(2))
    assert captured.program.opaque is None
    assert "not permitted when stream is capturing" in captured.program.unchecked
    assert "whether the program does all that the model does is not checked" in (captured.explain())
    assert torch.equal(captured(torch.ones(2)), torch.full((2,), 2.0))


def test_it_is_loaded_and_executed_in_the_block(backend, simulator):
    """Loading calls the model again, which does not count as a second call of the user."""
    model = Hidden(Raw(simulator)).eval()
    with offload.capture(model) as captured:
        model(rows())
        run = captured.load()
        x = rows()
        got = run(x)
    assert torch.equal(got, model(x))


# ---- results, random numbers, surroundings -------------------------------------------------------


class Many(nn.Module):
    """Results of every kind: the input, views of it, of a weight, and two in one storage."""

    def __init__(self, raw):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.raw = raw

    def forward(self, x, flags):
        y = x * 2
        self.raw(y)
        return {"in": x, "views": (x[1:], self.weight.t(), y, y[:, 2:]), "n": 3, **flags}


def test_results_of_every_kind(backend, simulator):
    model, flags = Many(Raw(simulator)), {"flag": "on"}
    with torch.no_grad():
        captured = offload.capture(model, rows(), flags)
        run = captured.load()
        assert is_opaque(captured)
        for _ in range(N_REPLAYS):
            x = rows()
            got, expected = run(x, flags), model(x, flags)
            assert got["in"] is x
            assert sharing(Call(x), got) == sharing(Call(x), expected)
            torch.testing.assert_close(got["views"], expected["views"], rtol=0, atol=0)
            assert (got["n"], got["flag"]) == (3, "on")


# ---- refusals ------------------------------------------------------------------------------------


def opaque_linear(simulator):
    model = Hidden(Raw(simulator)).eval()
    return model, offload.capture(model, rows())


def test_an_opaque_program_cannot_be_saved(backend, simulator, tmp_path):
    _, captured = opaque_linear(simulator)
    with pytest.raises(offload.FileError, match=r"one opaque launch.*raw_add.*holds .* no code"):
        captured.save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_other_devices_run_no_opaque_programs(backend, simulator):
    _, captured = opaque_linear(simulator)
    with pytest.raises(offload.BackendUnavailable, match="opaque launch, which device 'null'"):
        captured.load("null")


def test_its_weights_stay_where_they_are(backend, simulator):
    model, captured = opaque_linear(simulator)
    run = captured.load()
    with pytest.raises(offload.BindingError, match="capture again"):
        run.rebind_weights()
    x = rows()
    with torch.no_grad():
        model.linear.weight.mul_(2)
        assert torch.equal(run(x), model(x))
    bound = model.linear.weight.data
    model.linear.weight.data = bound.clone()
    with pytest.raises(
        offload.BindingError,
        match=r"linear\.weight: its storage was swapped .*; .* give the tensor its former storage, "
        "or capture again",
    ) as refused:
        run(x)
    assert "rebind_weights" not in str(refused.value)
    model.linear.weight.data = bound[:1].clone()
    with pytest.raises(offload.BindingError, match=r"another shape.* or capture again") as refused:
        run(x)
    assert "a tensor of the same layout" not in str(refused.value)
    model.linear.weight.data = bound
    assert torch.equal(run(x), model(x))


def test_explain(backend, simulator):
    _, captured = opaque_linear(simulator)
    text = captured.explain()
    assert (
        "one opaque launch, because it launches work that the recorder cannot see: 1 x raw" in text
    )
    assert "cannot be saved" in text


def test_a_model_that_changed_before_it_is_loaded_is_refused(backend, simulator):
    model, captured = opaque_linear(simulator)
    model.train()
    with pytest.raises(offload.CaptureError, match=r"training: False became True"):
        captured.load()
    model.eval()
    x = rows()
    assert torch.equal(captured(x), model(x))


def test_results_that_differ_each_time_are_refused(backend, simulator):
    class Changing(Raw):
        def __call__(self, target):
            self.factor = 1.0
            turns[0] += 1
            with torch._C.DisableTorchFunction():
                self._execute(struct.pack("<QQf", target.data_ptr(), 8, turns[0]))

    turns = array.array("q", [0])
    with pytest.raises(offload.CaptureError, match="result 0 differs"):
        offload.capture(Hidden(Changing(simulator)).eval(), rows())


def test_a_proof_that_fails_puts_buffers_back(backend, simulator):
    model = Hidden(Raw(simulator), buffer=True).eval()
    captured = offload.capture(model, rows())
    before = model.steps.clone()
    simulator.fail("cuGraphLaunch", 700, 2)
    with pytest.raises(offload.ExecutionError):
        captured.load()
    assert torch.equal(model.steps, before)


def test_an_opaque_program_is_proved(backend, simulator):
    """A raw kernel that keeps its first address is found, and writes no buffer permanently."""
    addresses, keeps = array.array("Q"), array.array("q", [0])

    class Keeping(Raw):
        @staticmethod
        def _execute(block):
            if keeps[0]:
                addresses.append(struct.unpack("<Q", block[:8])[0])
                block = struct.pack("<Q", addresses[0]) + block[8:]
            Raw._execute(block)

    model = Hidden(Keeping(simulator), buffer=True).eval()
    captured = offload.capture(model, rows())
    keeps[0] = 1
    before = model.steps.clone()
    with pytest.raises(offload.CaptureError, match=r"other addresses|old addresses"):
        captured.load()
    assert torch.equal(model.steps, before)
