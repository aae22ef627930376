"""Launches that the host delivers to a GPU one by one: by torch's operators, from C++."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.timeline import Scheduling

N = Dim("n", min=2, max=512)
SIZES = (24, 9, 64, 5, 200, 24, 9, 333, 64)


def attention(x: torch.Tensor) -> torch.Tensor:
    """Causal: the mask and the positions follow from the size."""
    n = x.shape[0]
    mask = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
    scores = (x @ x.t()).masked_fill(mask, float("-inf"))
    return scores.softmax(-1) @ x + torch.arange(n, device=x.device).unsqueeze(1)


FUNCTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "attention": attention,
    "scalars": lambda x: x * x.shape[0] + x.shape[0] ** -0.5,
    "views": lambda x: (x[1:].exp().t()[1:], x, x.t(), x[: x.shape[0] // 2] * 2),
    "in place": lambda x: x.clone().mul_(2).t().add_(1),
    "sorted": lambda x: torch.sort(x, 0),
    "random": lambda x: nn.functional.dropout(x, 0.5, training=True) + torch.rand_like(x),
    "integers": lambda x: (x + 1, torch.arange(x.shape[0], device=x.device), [2 * x.shape[0]]),
}


def load(function: Callable[..., Any], size: int = 24) -> Any:
    x = torch.randn(size, 8, device="cuda")
    captured = offload.capture(function, x, dynamic_shapes=({0: N},))
    run = captured.load(sizes=offload.Sizes())
    assert isinstance(run, offload.SizedExecutable)
    assert run.scheduling is Scheduling.HOST
    return run


def same(found: Any, expected: Any) -> bool:
    """Return whether both have the same nesting and the same bits."""
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(same, found, expected))
    return type(found) is type(expected) and found == expected


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_size_gives_eagers_bits(name: str) -> None:
    function = FUNCTIONS[name]
    run = load(function)
    for size in SIZES:
        x = torch.randn(size, 8, device="cuda")
        torch.cuda.manual_seed(size)
        expected = function(x)
        torch.cuda.manual_seed(size)
        assert same(run(x), expected), size
    assert run.instances.misses == len(set(SIZES))


def test_tickets_in_flight_while_sizes_change() -> None:
    run = load(attention)
    inputs = [torch.randn(size, 8, device="cuda") for size in (*SIZES, *SIZES[::-1])]
    tickets = [run.submit(x) for x in inputs]
    for x, ticket in zip(inputs, tickets, strict=True):
        assert same(ticket.result(), attention(x))


def test_executions_on_other_streams_follow_one_another() -> None:
    run = load(attention)
    inputs = [torch.randn(size, 8, device="cuda") for size in SIZES]
    expected = [attention(x) for x in inputs]
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    streams[1].wait_stream(streams[0])
    found = []
    for turn, x in enumerate(inputs):
        with torch.cuda.stream(streams[turn % 2]):
            found.append(run(x))
    torch.cuda.synchronize()
    assert same(found, expected)


def test_the_callers_buffers_and_inputs_are_written() -> None:
    run = load(lambda x: x.mul_(2) + 1)
    for size in SIZES:
        x = torch.randn(size, 8, device="cuda")
        y, out = x.clone(), torch.empty(size, 8, device="cuda")
        assert run(x, out=out) is out
        assert same([x, out], [y * 2, y * 2 + 1])


def test_a_launch_that_fails_is_named_and_the_next_execution_is_right() -> None:
    run = load(lambda x: (x @ torch.ones(8, 4, device="cuda")).exp().view(-1, 4))
    x = torch.randn(9, 8, device="cuda")
    expected = run(x)
    with pytest.raises(offload.BindingError):
        run(torch.randn(9, 7, device="cuda"))
    assert same(run(x), expected)


def test_nothing_stays_of_executions_of_changing_sizes() -> None:
    run = load(attention)
    inputs = [torch.randn(size, 8, device="cuda") for size in SIZES]
    for x in inputs:
        run(x)
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        for x in inputs:
            run(x)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    run.close()
    gc.collect()
    assert torch.cuda.memory_allocated() < before


def test_one_choice_of_sizes_may_be_a_graph() -> None:
    run = load(attention)
    whole = run.at({"n": 40})
    assert {one.mode for one in whole.launch_reports()} == {"graph"}
    x = torch.randn(40, 8, device="cuda")
    assert same(whole(x), attention(x))
