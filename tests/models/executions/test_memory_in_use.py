"""Memory in use by an execution: freed, shrunk or moved before it, and while its ticket runs."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload

WAITING_SECONDS = 60.0


class Gate(threading.Event):
    """Launches wait until it is set."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()  # by a launch

    def clear(self) -> None:
        super().clear()
        self.reached.clear()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """The gate of the operator `offload_test_gate::doubled`."""
    opened = Gate()
    library = torch.library.Library("offload_test_gate", "DEF")
    library.define("doubled(Tensor x) -> Tensor")

    def doubled(x: torch.Tensor) -> torch.Tensor:
        opened.reached.set()
        assert opened.wait(WAITING_SECONDS)
        return x * 2

    library.impl("doubled", doubled, "CPU")
    opened.set()
    yield opened
    opened.set()
    library._destroy()


class Gated(nn.Module):
    """Waits at the gate, then reads all its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.offload_test_gate.doubled(x).sigmoid() * self.weight + x


def gated() -> tuple[Gated, offload.Executable]:
    model = Gated().eval()
    with torch.no_grad():
        return model, offload.capture(model, torch.randn(64)).load()


SHRUNK: dict[str, Callable[[torch.Tensor], object]] = {
    "resize_ of the storage": lambda t: t.untyped_storage().resize_(0),
    "one byte less": lambda t: t.untyped_storage().resize_(t.untyped_storage().nbytes() - 1),
    "much more": lambda t: t.untyped_storage().resize_(1 << 20),
    "resize_": lambda t: t.resize_(1 << 16),
}


@pytest.mark.parametrize("how", SHRUNK)
@pytest.mark.parametrize("which", ["input", "out", "feature_map", "weight"])
def test_torch_refuses_to_resize_what_a_ticket_uses(gate: Gate, which: str, how: str) -> None:
    model, run = gated()
    tensors = {
        "input": torch.randn(64),
        "out": torch.empty(64),
        "feature_map": torch.empty(run.feature_map_bytes, dtype=torch.uint8),
        "weight": model.weight.detach(),
    }
    with torch.no_grad():
        expected = model(tensors["input"])
        gate.clear()
        ticket = run.submit(
            tensors["input"], out=tensors["out"], feature_map=tensors["feature_map"]
        )
        with pytest.raises(RuntimeError, match="not resizable"):
            SHRUNK[how](tensors[which].view(-1))  # which torch leaves with the new size
        gate.set()
        assert ticket.result() is tensors["out"]
        assert torch.equal(tensors["out"], expected)
    for tensor in tensors.values():
        assert tensor.untyped_storage().resizable()
    tensors[which].untyped_storage().resize_(0)


def test_two_tickets_hold_together(gate: Gate) -> None:
    _, run = gated()
    _, other = gated()
    x, out = torch.randn(64), torch.empty(64)
    gate.clear()
    tickets = [run.submit(x), run.submit(x, out=out), other.submit(x)]
    assert not x.untyped_storage().resizable()
    gate.set()
    for ticket in tickets[:2]:
        ticket.wait()
    assert out.untyped_storage().resizable()
    tickets[2].wait()
    assert x.untyped_storage().resizable()


def test_a_dropped_ticket_and_a_close_let_go(gate: Gate) -> None:
    model, run = gated()
    x, out = torch.randn(64), torch.empty(64)
    with torch.no_grad():
        expected = model(x)
    gate.clear()
    run.submit(x, out=out)
    gate.set()
    run.close()
    assert torch.equal(out, expected)
    assert all(one.untyped_storage().resizable() for one in (x, out, model.weight))


def test_a_failed_execution_lets_go(gate: Gate) -> None:
    model, run = gated()
    x, out = torch.randn(64), torch.empty(64)
    gate.clear()
    ticket, behind = run.submit(torch.randn(64)), run.submit(x, out=out)
    assert gate.reached.wait(WAITING_SECONDS)
    model.weight.data = torch.randn(64)
    gate.set()
    ticket.wait()
    with pytest.raises(offload.BindingError, match="its storage was swapped"):
        behind.result()
    assert x.untyped_storage().resizable()
    assert out.untyped_storage().resizable()


def test_what_is_not_resizable_stays_so() -> None:
    numpy = pytest.importorskip("numpy")
    _, run = gated_free()
    x = torch.from_numpy(numpy.ones(64, dtype=numpy.float32))
    assert not x.untyped_storage().resizable()
    run.submit(x).wait()
    assert not x.untyped_storage().resizable()


def gated_free() -> tuple[nn.Module, offload.Executable]:
    """Without a gate."""
    model = nn.Sequential(nn.Sigmoid(), nn.Tanh(), nn.ReLU())
    return model, offload.capture(model, torch.randn(64)).load()


GIVEN_OTHER: dict[str, Callable[[torch.Tensor], object]] = {
    "set_ of something small": lambda t: t.set_(torch.zeros(1)),
    "set_ of nothing": lambda t: t.set_(),
    "data": lambda t: setattr(t, "data", torch.zeros(1)),
    "fewer elements": lambda t: t.resize_(1),
    "transposed": lambda t: t.unsqueeze_(0).t_(),
}


@pytest.mark.parametrize("how", GIVEN_OTHER)
@pytest.mark.parametrize("which", ["input", "out", "feature_map"])
@pytest.mark.parametrize("queued", [True, False])
def test_a_ticket_goes_on_with_the_memory_that_it_was_given(
    gate: Gate, which: str, how: str, queued: bool
) -> None:
    model, run = gated()
    tensors = {
        "input": torch.randn(64),
        "out": torch.empty(64),
        "feature_map": torch.empty(run.feature_map_bytes, dtype=torch.uint8),
    }
    if which == "feature_map" and how != "fewer elements":
        give: Callable[[torch.Tensor], object] = lambda t: t.set_()  # noqa: E731
    else:
        give = GIVEN_OTHER[how]
    seen = tensors["out"].view(64)
    with torch.no_grad():
        expected = model(tensors["input"])
        gate.clear()
        ahead = run.submit(torch.randn(64)) if queued else None
        ticket = run.submit(
            tensors["input"], out=tensors["out"], feature_map=tensors["feature_map"]
        )
        give(tensors[which])
        gate.set()
        assert ticket.result() is tensors["out"]
        assert torch.equal(seen, expected)
        if ahead is not None:
            ahead.wait()


def test_results_that_are_arguments_stay_the_callers_own(gate: Gate) -> None:
    def changed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x.add_(torch.ops.offload_test_gate.doubled(x))
        return x, x[:2]

    run = offload.capture(changed, torch.ones(4)).load()
    x = torch.ones(4)
    version = x._version
    whole, part = run.submit(x).result()
    assert whole is x
    assert x.tolist() == [3.0] * 4
    assert x._version > version
    part.zero_()
    assert x.tolist() == [0.0, 0.0, 3.0, 3.0]


def test_memory_that_moved_while_it_was_queued_is_refused(gate: Gate) -> None:
    _, run = gated()
    x, out = torch.randn(64), torch.empty(64)
    gate.clear()
    ahead, ticket = run.submit(x), run.submit(x, out=out)
    out.share_memory_()  # moves it, which torch permits
    gate.set()
    ahead.wait()
    with pytest.raises(offload.BindingError, match=r"out\[0\]: its memory was freed or moved"):
        ticket.result()


class Returns(nn.Module):
    """Views of its input and of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view(8, 8), self.weight[3:]


def returning() -> tuple[Returns, offload.Executable, torch.Tensor, offload.Ticket]:
    model, x = Returns().eval(), torch.randn(64)
    with torch.no_grad():
        run = offload.capture(model, torch.randn(64)).load()
    ticket = run.submit(x)
    ticket.wait()
    return model, run, x, ticket


def test_results_that_are_views_are_of_what_was_there_when_it_was_executed() -> None:
    model, run, x, ticket = returning()
    expected = model.weight.detach()[3:].clone(), x.view(8, 8).clone()
    model.weight.data = torch.zeros(64)
    run.rebind_weights()
    model.weight.data = torch.zeros(1)
    x.set_(torch.zeros(1))
    of_input, of_weight = ticket.result()
    assert torch.equal(of_weight, expected[0])
    assert torch.equal(of_input, expected[1])


@pytest.mark.parametrize("which", ["args[0]", "weight"])
def test_results_that_are_views_of_freed_memory_are_refused(which: str) -> None:
    model, _, x, ticket = returning()
    without_memory(x if which == "args[0]" else model.weight, 16)
    with pytest.raises(
        offload.BindingError, match="freed or shrunk since the execution"
    ) as refused:
        ticket.result()
    assert f"a view of {which}," in str(refused.value)


def test_a_weight_of_zeros_that_are_never_read_is_refused() -> None:
    model, x = nn.Linear(64, 64).eval(), torch.randn(2, 64)
    with torch.no_grad():
        captured = offload.capture(model, x)
        run = captured.load()
        model.weight.data = torch._efficientzerotensor((64, 64))
        for load in (
            run.rebind_weights,
            captured.load,
            lambda: captured.load(weights_budget="1MiB"),
        ):
            with pytest.raises(offload.BindingError, match="weight: "):
                load()


FORKING = """
import os, torch, offload
torch.set_num_threads(1)
x = torch.randn(2, 64)
with torch.no_grad():
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()).eval()
    run = offload.capture(net, torch.randn(2, 64)).load()
    out = torch.empty(2, 64)
    for _ in range(30):
        tickets = [run.submit(x, out=out) for _ in range(20)]
        child = os.fork()
        if child == 0:
            for ticket in tickets:
                try:
                    ticket.wait()
                except (RuntimeError, offload.ExecutionError):
                    pass
            del tickets, ticket
            freed = [one.untyped_storage().resizable() for one in (x, out, net[0].weight)]
            assert all(freed), freed
            again = run.submit(x)
            assert torch.allclose(again.result(), net(x))
            assert x.untyped_storage().resizable()
            os._exit(0)
        for ticket in tickets:
            ticket.wait()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("same")
"""


@pytest.mark.slow
def test_a_child_process_holds_nothing_of_its_parents_tickets() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, check=False
    )
    assert done.stdout == "same\n", done.stderr


def two_sums(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu().softmax(0).tanh()


MAPS: dict[str, tuple[Callable[[int], Any], str]] = {
    "freed": (lambda n: without_memory(torch.empty(n, dtype=torch.uint8), 0), "freed or shrunk"),
    "shrunk": (
        lambda n: without_memory(torch.empty(n, dtype=torch.uint8), n - 1),
        "freed or shrunk",
    ),
    "shrunk, at an offset": (
        lambda n: without_memory(torch.empty(n + 64, dtype=torch.uint8)[64:], n),
        "freed or shrunk",
    ),
    "meta": (lambda n: torch.empty(n, dtype=torch.uint8, device="meta"), "on meta"),
    "sparse": (lambda n: torch.zeros(n, dtype=torch.uint8).to_sparse(), "plain strided"),
    "no elements": (lambda n: torch.empty(0, dtype=torch.uint8), "expected at least"),
    "repeated": (lambda n: torch.empty(1, dtype=torch.uint8).expand(n), "contiguous"),
}


def without_memory(tensor: torch.Tensor, n_bytes: int) -> torch.Tensor:
    """The tensor on a storage of this many bytes; its shape is unchanged."""
    tensor.untyped_storage().resize_(n_bytes)
    return tensor


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("submitted", [True, False])
def test_a_feature_map_without_its_memory_is_refused(kind: str, submitted: bool) -> None:
    run = offload.capture(two_sums, torch.randn(4096)).load()
    assert run.feature_map_bytes > 0
    make, message = MAPS[kind]
    with pytest.raises(offload.BindingError, match=message):
        (run.submit if submitted else run)(
            torch.randn(4096), feature_map=make(run.feature_map_bytes)
        )
    assert run.last_execution.n_executions == 0


CONTENTS: dict[str, tuple[Callable[[], Any], str]] = {
    "freed": (lambda: without_memory(torch.zeros(64, 64), 0), "freed or shrunk"),
    "shrunk": (lambda: without_memory(torch.zeros(64, 64), 64 * 64 * 4 - 1), "freed or shrunk"),
    "a view of freed memory": (
        lambda: without_memory(torch.zeros(64, 64).t(), 256),
        "freed or shrunk",
    ),
    "expanded from freed memory": (
        lambda: without_memory(torch.zeros(64).expand(64, 64), 0),
        "freed or shrunk",
    ),
    "a parameter": (
        lambda: without_memory(nn.Parameter(torch.zeros(64, 64)), 0),
        "freed or shrunk",
    ),
    "zeros without memory": (lambda: torch._efficientzerotensor((64, 64)), "plain strided"),
    "meta": (lambda: torch.empty(64, 64, device="meta"), "dense tensor with content"),
    "sparse": (lambda: torch.eye(64).to_sparse(), "dense tensor with content"),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_replacing_by_content_without_memory_is_refused(kind: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), torch.randn(2, 64)
    make, message = CONTENTS[kind]
    with torch.no_grad():
        captured = offload.capture(model, x)
        with captured.load(weights_budget="1MiB") as run:
            with pytest.raises(offload.BindingError, match=rf"0\.weight: .*{message}"):
                run.streaming.replace({"1.weight": torch.zeros(64, 64), "0.weight": make()})
            assert run.streaming.replaced == frozenset()
            assert torch.equal(run(x), model(x))
