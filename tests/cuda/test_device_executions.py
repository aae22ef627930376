"""Executions on a GPU: addresses, streams, alignment, errors and state."""

from __future__ import annotations

import gc

import pytest
import torch
from on_device import empty, full, ones, poison, randn, zeros
from torch import nn

import offload


def chain(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * 2 + 1).sin()


def fork(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = x.exp(), y.cos()
    return left @ right, (left + right).relu()


def load(function, *args):
    with offload.capture(function) as captured:
        captured(*args)
    return captured.load()


def test_every_slot_moves_and_old_memory_is_not_read():
    run = load(fork, ones(64, 64), ones(64, 64))
    inputs = [randn(64, 64), randn(64, 64)]
    outputs = (empty(64, 64), empty(64, 64))
    run(*inputs, out=outputs)
    expected = fork(*inputs)
    moved = [one.clone() for one in inputs]
    for old in (*inputs, *outputs):
        poison(old)
    got = run(*moved, out=(empty(64, 64), empty(64, 64)))
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    assert all(bool(old.isnan().all()) for old in (*inputs, *outputs))
    last = run.last_execution
    assert last.policy == "io"
    assert last.slots_changed == 4
    assert last.bytes_copied == 0


def test_nothing_changed_patches_nothing():
    run = load(chain, ones(1024))
    x, y = randn(1024), empty(1024)
    run(x, out=y)
    run(x, out=y)
    last = run.last_execution
    assert (last.policy, last.slots_changed, last.words_patched) == ("none", 0, 0)
    torch.testing.assert_close(y, chain(x))


def test_fresh_outputs_are_not_overwritten():
    run = load(chain, ones(256))
    inputs = [randn(256) for _ in range(4)]
    results = [run(x) for x in inputs]
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, chain(x))


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_input_below_the_captured_alignment(offset):
    run = load(chain, ones(1024))
    spare = randn(1024 + offset)
    x = spare[offset:]
    torch.testing.assert_close(run(x), chain(x))
    assert run.last_execution.bytes_copied in (0, 4096)


def test_order_with_the_callers_stream():
    run = load(chain, ones(1 << 20))
    stream = torch.cuda.Stream()
    x = zeros(1 << 20)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for step in range(20):
            x.fill_(step)  # the execution must see it, and the next fill must wait for it
            y = run(x)
            expected = chain(full((8,), float(step)))
            torch.testing.assert_close(y[:8], expected)


def test_two_executables_in_turns():
    small, large = load(fork, *ones(2, 16, 16)), load(fork, *ones(2, 128, 128))
    for _ in range(3):
        for run, size in ((small, 16), (large, 128)):
            x, y = randn(2, size, size)
            for one, other in zip(run(x, y), fork(x, y), strict=True):
                torch.testing.assert_close(one, other)


def test_tickets_in_order():
    run = load(chain, ones(4096))
    inputs = [randn(4096) for _ in range(8)]
    torch.cuda.synchronize()
    tickets = [run.submit(x) for x in inputs]
    for x, ticket in zip(inputs, tickets, strict=True):
        torch.testing.assert_close(ticket.result(), chain(x))


def test_weights_written_in_place_are_seen_and_loading_leaves_state():
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda().train()
    x = randn(32, 64)
    with offload.capture(model) as captured:
        captured(x)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    random_state = torch.cuda.get_rng_state()
    run = captured.load()
    for name, one in model.state_dict().items():
        assert torch.equal(one, state[name]), name
    assert torch.equal(torch.cuda.get_rng_state(), random_state)
    model[0].weight.mul_(2)
    twin = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)).cuda().train()
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(run(x), twin(x))
    torch.testing.assert_close(model[1].running_mean, twin[1].running_mean)


def test_random_launches_draw_what_eager_draws():
    model = nn.Dropout(0.5).train()
    with offload.capture(model) as captured:
        captured(ones(64))
    torch.cuda.manual_seed(3)
    run = captured.load()
    expected = [model(ones(64)) for _ in range(3)]
    torch.cuda.manual_seed(3)
    for one in expected:
        assert torch.equal(run(ones(64)), one)


def test_a_generator_that_is_passed_is_drawn_from_as_in_eager(capfd):
    """Torch 2.14 warns on the error stream about unnecessary registrations."""
    generator = torch.Generator(device="cuda")

    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(64, device="cuda", generator=generator)

    generator.manual_seed(5)
    expected = [noisy(ones(64)) for _ in range(3)]
    run = offload.capture(noisy, ones(64)).load()
    assert "register_generator_state" not in capfd.readouterr().err
    generator.manual_seed(5)
    for one in expected:
        assert torch.equal(run(ones(64)), one)


def test_a_caller_who_is_capturing_is_refused():
    with offload.capture(chain) as captured:
        captured(ones(64))
    run = captured.load()
    x, y, graph = ones(64), empty(64), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        with pytest.raises(offload.CaptureError, match="being captured"):
            captured.load()
        with pytest.raises(offload.CaptureError, match="being captured"):
            offload.capture(chain, x)
        with pytest.raises(offload.ExecutionError, match="being captured"):
            run(x, out=y)
    graph.replay()
    assert bool((x == 2).all())
    run(x, out=y)
    torch.testing.assert_close(y, chain(x))


@torch.library.custom_op("offload_tests::synchronised", mutates_args=())
def synchronised(x: torch.Tensor) -> torch.Tensor:
    """Adds one; waits for the device, which a capture forbids."""
    torch.cuda.synchronize()
    return x + 1


def test_work_that_cannot_be_captured_is_named():
    with offload.capture(lambda x: synchronised(x.sin())) as captured:
        captured(ones(64))
    with pytest.raises(
        offload.CaptureError, match=r"test_device_executions.py:\d+: offload_tests::"
    ):
        captured.load()
    x = randn(64)
    torch.testing.assert_close(load(chain, x)(x), chain(x))  # nothing of the failure remains
    torch.cuda.empty_cache()


def test_memory_history_of_the_user_is_left_alone():
    with offload.capture(chain) as captured:
        captured(ones(64))
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")
    try:
        with pytest.raises(offload.CaptureError, match="memory history"):
            captured.load()
        assert torch._C._cuda_isHistoryEnabled()
    finally:
        torch.cuda.memory._record_memory_history(None, stacks="python")


def test_loading_gives_its_memory_back():
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))).cuda()
    with offload.capture(model) as captured:
        captured(randn(64, 512))
    captured.load().close()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for _ in range(3):
        captured.load().close()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (8 << 20)


def test_memory_that_runs_out_while_loading_leaves_no_trace():
    x = randn(1 << 24)
    with offload.capture(chain) as captured:
        captured(x)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    whole_bytes = torch.cuda.get_device_properties(x.device).total_memory
    least_bytes = torch.cuda.memory_reserved() + (32 << 20)  # the warm-up's input has 64 MiB
    torch.cuda.set_per_process_memory_fraction(least_bytes / whole_bytes)
    try:
        with pytest.raises(offload.errors.OutOfMemory):
            captured.load()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated() == before
    torch.testing.assert_close(captured.load()(x), chain(x))
