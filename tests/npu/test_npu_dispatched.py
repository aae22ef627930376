"""Launches that the host delivers to the NPU one by one: by torch_npu's operators, from C++."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import npu_device
import pytest
import torch
from ascend_simulator import AscendSimulator
from on_npu import to_npu
from torch import nn
from torch.export import Dim

import offload
from offload.host import ExecutableForEachSize
from offload.timeline import Scheduling, SpanKind

N = Dim("n", min=2, max=128)
SIZES = (24, 9, 64, 5, 128, 24, 9, 33, 2, 64)


def load(function: Callable[..., Any], *args: Any, shapes: Any = ({0: N},)) -> Any:
    """A function of all sizes on the NPU; with None for shapes, of one size."""
    captured = offload.capture(function, *on_npu(args), dynamic_shapes=shapes)
    run = captured.load(sizes=offload.Sizes())
    assert isinstance(run, offload.SizedExecutable)
    assert run.scheduling is Scheduling.HOST
    return run


def on_npu(args: Any) -> list[Any]:
    return [to_npu([one])[0] if isinstance(one, torch.Tensor) else one for one in args]


def same(found: Any, expected: Any) -> bool:
    """Return whether both have the same nesting and the same bits."""
    if isinstance(expected, torch.Tensor):
        one, other = found.cpu(), expected.cpu()
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


def attention(x: torch.Tensor) -> torch.Tensor:
    """Causal: the mask and the positions follow from the size."""
    n = x.shape[0]
    mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    scores = (x @ x.t()).masked_fill(mask, float("-inf"))
    return scores.softmax(-1) @ x + torch.arange(n, device=x.device).unsqueeze(1)


def returned_constants(x: torch.Tensor) -> Any:
    n = x.shape[0]
    order = torch.arange(n, device=x.device)
    return order, (order * 2 + 1)[1:], x + order.unsqueeze(1), torch.full_like(x, n)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": attention,
    "constants": returned_constants,
    "scalars": lambda x: x * x.shape[0] + x.shape[0] ** -0.5,
    "views": lambda x: (x[1:].exp().t()[1:], x, x.t(), x[: x.shape[0] // 2] * 2),
    "in place": lambda x: x.clone().mul_(2).t().add_(1),
    "pieces": lambda x: torch.cat([x[: x.shape[0] // 2].exp(), x[x.shape[0] // 2 :].sin()]),
    "integers": lambda x: (x + 1, x.shape[0], [2 * x.shape[0]]),
    "made by operators": lambda x: x.max(0),
    "written without content": lambda x: torch.empty_like(x).copy_(x * 2).add_(x),
    "padded": lambda x: torch.cat([x, x.new_zeros(-x.shape[0] % 8, 4)]).view(-1, 8, 4).sum(0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_size_gives_eagers_bits(name: str) -> None:
    function = FUNCTIONS[name]
    run = load(function, torch.randn(24, 4))
    n_seen = 0
    for size in SIZES:
        x = torch.randn(size, 4).npu()
        try:
            found = run(x)
        except offload.BindingError:
            assert size == 2  # torch takes another path for half of it, which is 1
            continue
        n_seen += 1
        assert same(found, function(x)), size
    assert n_seen >= len(SIZES) - 1
    assert run.last_execution.n_executions == n_seen
    assert {one.mode for one in run.launch_reports()} == {"dispatched"}


class Classifier(nn.Module):
    """An MLP over embedded tokens; padding is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, tokens: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.feed(self.norm(x))
        return x.masked_fill(padding.unsqueeze(-1), 0.0).sum(1)


def test_a_model_with_masks_at_random_sizes() -> None:
    model = Classifier().eval().npu()

    def given(size: int) -> list[torch.Tensor]:
        lengths = torch.randint(1, size + 1, (3, 1))
        return to_npu([torch.randint(50, (3, size)), torch.arange(size).expand(3, size) >= lengths])

    captured = offload.capture(model, *given(9), dynamic_shapes=({1: N}, {1: N}))
    run = captured.load(sizes=offload.Sizes())
    choose = random.Random(0)
    for _ in range(12):
        arguments = given(choose.randint(2, 60))
        assert same(run(*arguments), model(*arguments))


def test_an_integer_argument_is_a_size() -> None:
    def step(x: torch.Tensor, n: int, scale: float) -> Any:
        return x[:n] * scale + n, n

    x = torch.randn(64)
    run = load(step, x, 9, 2.0, shapes={"x": None, "n": N, "scale": None})
    for n in (9, 20, 64):
        assert same(run(x.npu(), n, 2.0), step(x.npu(), n, 2.0))


def test_inputs_weights_and_buffers_of_the_caller_are_written_in_place() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x.sum(0))
            x.mul_(2)
            return self.total + x

    one, other = Counter().npu(), Counter().npu()
    run = load(one, torch.randn(24, 4))
    one.load_state_dict(other.state_dict())
    for size in (9, 24, 5, 24):
        x = torch.randn(size, 4).npu()
        y, out = x.clone(), torch.full((size, 4), float("nan")).npu()
        assert run(x, out=out) is out
        assert same(out, other(y))
        assert same(x, y)
        assert same(one.total, other.total)


def test_inputs_in_another_order_of_strides_are_copied_before() -> None:
    run = load(lambda x: x.exp() + 1, torch.randn(24, 4))
    x = torch.randn(4, 40).npu().t()
    assert same(run(x), x.exp() + 1)
    assert run.last_execution.bytes_copied == 4 * 40 * 4


def test_tickets_in_flight_while_sizes_change() -> None:
    run = load(attention, torch.randn(24, 4))
    inputs = [torch.randn(size, 4).npu() for size in (*SIZES, *SIZES[::-1])]
    tickets = [run.submit(x) for x in inputs]
    for x, ticket in zip(inputs, tickets, strict=True):
        assert same(ticket.result(), attention(x))
    assert run.last_execution.n_executions == 2 * len(SIZES)
    assert run.instances.misses == len(set(SIZES))


def test_executions_on_other_streams_follow_one_another() -> None:
    """Values computed from sizes are made on one stream and read on another."""
    run = load(attention, torch.randn(24, 4))
    inputs = [torch.randn(size, 4).npu() for size in (24, 9, 24, 9)]
    expected = [attention(x) for x in inputs]
    found = []
    for turn, x in enumerate(inputs):
        stream = torch.npu.Stream()
        stream.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(stream if turn % 2 else torch.npu.current_stream()):
            found.append(run(x))
    torch.npu.synchronize()
    assert same(found, expected)


@pytest.fixture
def executor_cache(simulated_npu: AscendSimulator) -> Iterator[None]:
    """The operator library caches results of first phases, as on hardware."""
    npu_device.set_executor_cache(True)
    yield
    npu_device.set_executor_cache(False)


def phases(simulator: AscendSimulator, run: Any, size: int) -> int:
    """The number of first phases that an execution of a size calls."""
    x = torch.randn(size, 4).npu()
    torch.npu.synchronize()
    simulator.forget_calls()
    found = run(x)
    torch.npu.synchronize()
    n_calls = npu_device.first_phase_calls(simulator).total()
    assert same(found, attention(x))
    return n_calls


def test_constants_of_sizes_are_made_once_and_the_host_makes_integers(
    simulated_npu: AscendSimulator,
) -> None:
    run = load(attention, torch.randn(24, 4))
    assert not any("arange" in one.name or "triu" in one.name for one in run.program.launches)
    counted = []
    for size in (30, 30, 40, 30):
        x = torch.randn(size, 4).npu()
        torch.npu.synchronize()
        simulated_npu.forget_calls()
        run(x)
        torch.npu.synchronize()
        calls = npu_device.first_phase_calls(simulated_npu)
        counted.append((calls.total(), simulated_npu.calls("aclrtMemcpyAsync")))
        assert not {"Arange", "Triu", "InplaceOne"} & calls.keys()
    n_phases = counted[0][0]
    assert n_phases >= len(run.program.launches)  # some operators are several kernels
    assert counted == [(n_phases, 1), (n_phases, 0), (n_phases, 1), (n_phases, 0)]
    assert (run.instances.misses, run.instances.hits) == (2, 2)


def test_real_constants_of_sizes_are_made_on_the_device_once(
    simulated_npu: AscendSimulator,
) -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[0], device=x.device).unsqueeze(1) * 0.5
        return x * angles.cos()

    run = load(turned, torch.randn(24, 4))
    counted = []
    for size in (30, 30, 40, 30):
        x = torch.randn(size, 4).npu()
        torch.npu.synchronize()
        simulated_npu.forget_calls()
        found = run(x)
        torch.npu.synchronize()
        counted.append(simulated_npu.calls("aclnnCosGetWorkspaceSize"))
        assert same(found, turned(x))
    assert counted == [1, 0, 1, 0]


@pytest.mark.usefixtures("executor_cache")
def test_first_phases_fall_by_the_rate_of_hits(simulated_npu: AscendSimulator) -> None:
    run = load(attention, torch.randn(24, 4))
    sizes = (30, 40, 30, 30, 40, 50, 30, 40)
    counted = [phases(simulated_npu, run, size) for size in sizes]
    is_new = [size not in sizes[:at] for at, size in enumerate(sizes)]
    n_phases = counted[0]
    assert n_phases >= len(run.program.launches)
    assert counted == [n_phases if new else 0 for new in is_new]
    report = run.instances
    assert report.hits / (report.hits + report.misses) == 5 / 8
    assert sum(counted) == n_phases * len(sizes) * (1 - 5 / 8)


@pytest.mark.parametrize("nth", [1, 3])
def test_a_launch_that_fails_is_named_and_the_next_execution_is_right(
    simulated_npu: AscendSimulator, nth: int
) -> None:
    run = load(lambda x: ((x.exp() + 1).exp() * 2).exp(), torch.randn(24, 4))
    x = torch.randn(9, 4).npu()
    expected = run(x)
    torch.npu.synchronize()
    simulated_npu.fail("aclnnExpGetWorkspaceSize", 561103, nth)
    with pytest.raises(offload.ExecutionError, match=r"test_npu_dispatched\.py.*aten::exp"):
        run(x)
    simulated_npu.forget_calls()
    ticket = run.submit(x)
    assert same(ticket.result(), expected)
    assert same(run(torch.zeros(5, 4).npu()), run(torch.zeros(5, 4).npu()))


def test_nothing_stays_of_executions_of_changing_sizes() -> None:
    run = load(attention, torch.randn(24, 4))
    inputs = [torch.randn(size, 4).npu() for size in SIZES]
    for x in inputs:
        run(x)
    torch.npu.synchronize()
    gc.collect()
    before = torch.npu.memory_allocated()
    for _ in range(10):
        for x in inputs:
            run(x)
    torch.npu.synchronize()
    assert torch.npu.memory_allocated() == before
    run.close()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(inputs[0])
    gc.collect()
    assert torch.npu.memory_allocated() < before


def test_instances_that_went_give_their_memory_back() -> None:
    captured = offload.capture(attention, torch.randn(24, 4).npu(), dynamic_shapes=({0: N},))
    run = captured.load(sizes=offload.Sizes(instances="8KiB"))
    for size in (*SIZES, *SIZES):
        x = torch.randn(size, 4).npu()
        assert same(run(x), attention(x))
    assert run.instances.evicted > 0


def test_one_choice_of_sizes_may_be_a_model_on_the_device() -> None:
    captured = offload.capture(attention, torch.randn(24, 4).npu(), dynamic_shapes=({0: N},))
    run = captured.load(sizes=offload.Sizes())
    whole = run.at({"n": 40})
    assert {one.mode for one in whole.launch_reports()} == {"model"}
    x = torch.randn(40, 4).npu()
    assert same(whole(x), attention(x))
    each = captured.load(sizes=offload.Sizes(), scheduling="offload")
    assert isinstance(each, ExecutableForEachSize)
    assert same(each(x), attention(x))


def test_a_program_of_one_size_is_delivered_by_the_host() -> None:
    model = Classifier().eval()
    captured = offload.capture(
        copy.deepcopy(model).npu(), *to_npu([torch.randint(50, (3, 9)), torch.rand(3, 9) > 0.5])
    )
    run = captured.load(scheduling="host")
    assert run.scheduling is Scheduling.HOST
    for _ in range(3):
        given = to_npu([torch.randint(50, (3, 9)), torch.rand(3, 9) > 0.5])
        assert same(run(*given), captured.load()(*given))
    with run.timeline(executions=1) as timeline:
        run(*given)
    issues = timeline.executions[0].of_kind(SpanKind.ISSUE)
    assert [span.name for span in issues] == [one.name for one in run.program.launches]
    assert "launched by the host" in run.explain()


def test_a_number_may_be_read_on_the_host_where_the_host_delivers() -> None:
    """No model on the device can wait for it."""

    def halve(x: torch.Tensor) -> torch.Tensor:
        return x / 2 if x.sum().item() > 0 else x

    captured = offload.capture(halve, torch.ones(4).npu(), host_reads="guard")
    with pytest.raises(offload.CaptureError, match="is read on the host"):
        captured.load()
    run = captured.load(scheduling="host")
    assert same(run(torch.ones(4).npu()), torch.full((4,), 0.5))
    with pytest.raises(
        offload.BindingError, match=r"read 8\.0 on the host, the recorded value is 4\.0"
    ):
        run(torch.full((4,), 2.0).npu())
    assert same(run(torch.ones(4).npu()), torch.full((4,), 0.5))


def test_weights_that_are_bound_again_are_used() -> None:
    layer = nn.Linear(4, 4).npu()
    run = load(layer, torch.randn(24, 4))
    x = torch.randn(9, 4).npu()
    layer.weight.data = torch.randn(4, 4).npu()
    with pytest.raises(offload.BindingError, match="rebind_weights"):
        run(x)
    run.rebind_weights()
    assert same(run(x), layer(x))
