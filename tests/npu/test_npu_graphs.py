"""torch_npu's graphs: capture, replay, task groups, random numbers."""

from __future__ import annotations

import ctypes
import gc
import itertools

import npu_device
import pytest
import torch
import torch.nn.functional as F
from ascend_client import peek
from ascend_simulator import AscendSimulator
from on_npu import capture, check_same

from model_tasks import parameters_of, tasks_of


def test_a_replay_is_one_call(simulated_npu: AscendSimulator) -> None:
    x = torch.randn(4, 6)
    static = x.npu()
    graph, result = capture(lambda a: F.relu(a) * 2 + 1, static)
    torch.npu.synchronize()
    simulated_npu.forget_calls()
    graph.replay()
    torch.npu.synchronize()
    assert simulated_npu.calls("aclmdlRIExecuteAsync") == 1
    assert simulated_npu.calls("aclrtLaunchKernelWithHostArgs") == 0
    check_same(result, F.relu(x) * 2 + 1)


def test_captured_operators_do_not_run_until_replayed() -> None:
    static = torch.zeros(4).npu()
    target = torch.zeros(4).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        target.add_(static + 1)
    assert target.cpu().tolist() == [0] * 4
    for n in (1, 2):
        graph.replay()
        assert target.cpu().tolist() == [n] * 4


def test_replays_follow_each_other_without_waiting() -> None:
    static, total = torch.ones(4).npu(), torch.zeros(4).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        total.add_(static)
    for value in range(5):
        static.fill_(float(value))
        graph.replay()
    assert total.cpu().tolist() == [10] * 4


def test_a_side_stream_is_captured() -> None:
    x = torch.randn(4, 6)
    static = x.npu()
    side = torch.npu.Stream()

    def both(a: torch.Tensor) -> torch.Tensor:
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            left = a * 2
        right = a + 1
        main.wait_stream(side)
        return left * right

    graph, result = capture(both, static)
    for scale in (1, 3):
        static.copy_(x * scale)
        graph.replay()
        check_same(result, (x * scale * 2) * (x * scale + 1))


def test_an_updated_group_takes_other_operands(simulated_npu: AscendSimulator) -> None:
    ones, twos, threes = (torch.full((4,), float(value)).npu() for value in (1, 2, 3))
    result, doubled = torch.empty(4).npu(), torch.empty(4).npu()
    stream, updating = torch.npu.Stream(), torch.npu.Stream()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph, stream=stream):
        torch.npu.graph_task_group_begin(stream)
        torch.add(ones, twos, out=result)
        group = torch.npu.graph_task_group_end(stream)
        torch.mul(result, 2, out=doubled)
    graph.replay()
    assert doubled.cpu().tolist() == [6] * 4
    with torch.npu.stream(updating):
        torch.npu.graph_task_update_begin(updating, group)
        torch.add(ones, threes, out=result)
        torch.npu.graph_task_update_end(updating)
    updating.synchronize()
    assert simulated_npu.calls("aclmdlRICaptureTaskUpdateEnd") == 1
    assert doubled.cpu().tolist() == [6] * 4
    graph.replay()
    assert doubled.cpu().tolist() == [8] * 4


def test_graphs_that_go_take_everything_with_them(simulated_npu: AscendSimulator) -> None:
    gc.collect()
    torch.npu.synchronize()
    models = simulated_npu.live("model")
    argument_bytes = simulated_npu.argument_bytes
    operator_objects = npu_device.live_operator_objects()
    graph, result = capture(lambda a: F.softmax(a @ a.t(), -1), torch.randn(4, 6).npu())
    torch.npu.synchronize()
    assert simulated_npu.live("model") == models + 1
    assert simulated_npu.argument_bytes > argument_bytes
    del graph, result
    gc.collect()
    torch.npu.synchronize()
    assert simulated_npu.live("model") == models
    assert simulated_npu.argument_bytes == argument_bytes
    assert npu_device.live_operator_objects() == operator_objects


def test_argument_blocks_of_a_captured_model_can_be_read_and_patched(
    simulated_npu: AscendSimulator,
) -> None:
    """The basis of binding a model to other addresses, on a model that torch_npu captured."""
    first, moved = torch.randn(4, 6), torch.randn(4, 6)
    static, elsewhere = first.npu(), moved.npu()
    graph, status, model = torch.npu.NPUGraph(), ctypes.c_int(), ctypes.c_uint64()
    with torch.npu.graph(graph):
        result = F.relu(static) + 1
        stream = torch.npu.current_stream().npu_stream
        simulated_npu.call(
            "aclmdlRICaptureGetInfo", stream, ctypes.byref(status), ctypes.byref(model)
        )
    (tasks,) = tasks_of(simulated_npu, model.value)
    kernels = [parameters_of(simulated_npu, task).content.kernel for task in tasks]
    assert len(kernels) == 2
    patched = 0
    for kernel in kernels:
        for place, word in enumerate(peek(kernel.arguments, 1 + 3)):  # itself, then the operands
            assert (0 <= word - kernel.arguments < kernel.arguments_bytes) == (place == 0)
            if word == static.data_ptr():
                ctypes.c_uint64.from_address(
                    kernel.arguments + 8 * place
                ).value = elsewhere.data_ptr()
                patched += 1
    assert patched == 1
    graph.replay()
    check_same(result, F.relu(moved) + 1)
    check_same(static, first)


def test_values_cannot_be_read_while_capturing() -> None:
    x = torch.ones(4).npu()
    torch.npu.synchronize()
    graph = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError), torch.npu.graph(graph):
        (x + 1).sum().item()
    check_same(x + 1, torch.full((4,), 2.0))


def test_one_seed_gives_one_sequence() -> None:
    def draw() -> torch.Tensor:
        torch.npu.manual_seed(7)
        uniform, normal = torch.rand(100, device="npu"), torch.randn(100, device="npu")
        return torch.cat([uniform, normal]).cpu()

    first, again = draw(), draw()
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.cat([torch.rand(100), torch.rand(100)]))
    assert 0 <= first[:100].min() < 0.1 < 0.9 < first[:100].max() < 1
    assert abs(first[100:].mean()) < 0.4
    assert 0.7 < first[100:].std() < 1.3


def test_replays_draw_anew_and_repeat_with_the_seed() -> None:
    static = torch.ones(64).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        uniform = torch.rand(64, device="npu")
        dropped = F.dropout(static, 0.25, training=True)

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        graph.replay()
        torch.npu.synchronize()
        return uniform.cpu(), dropped.cpu()

    torch.npu.manual_seed(3)
    rounds = [replay() for _ in range(3)]
    for earlier, later in itertools.pairwise(rounds):
        assert not torch.equal(earlier[0], later[0])
        assert not torch.equal(earlier[1], later[1])
    for _, kept in rounds:
        assert sorted(set(kept.tolist())) == pytest.approx([0, 4 / 3])
        assert 24 < (kept != 0).sum() < 64
    torch.npu.manual_seed(3)
    for before, after in zip(rounds, [replay() for _ in range(3)], strict=True):
        assert torch.equal(before[0], after[0])
        assert torch.equal(before[1], after[1])


def test_random_integers_and_permutations() -> None:
    integers = torch.randint(2, 9, (200,), device="npu").cpu()
    assert sorted(set(integers.tolist())) == list(range(2, 9))
    assert sorted(torch.randperm(50, device="npu").cpu().tolist()) == list(range(50))
    assert set(torch.empty(99).npu().bernoulli_(0.5).cpu().tolist()) == {0, 1}
