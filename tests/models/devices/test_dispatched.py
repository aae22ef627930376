"""Launches that the host delivers one by one, as on devices: here on the CPU's tensors."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.backends import CpuBackend
from offload.backends.dispatched import DispatchBackend
from offload.timeline import Scheduling

N = Dim("n", min=2, max=512)


def dispatching() -> DispatchBackend:
    return DispatchBackend("dispatched", CpuBackend().machine, "cpu")


def load(function, *args, **options):
    with torch.no_grad():
        return offload.capture(function, *args).load(dispatching(), **options)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x, padding):
        y = self.norm(x)
        x = x + self.attend(y, y, y, key_padding_mask=padding, need_weights=False)[0]
        return x + self.feed(x)


def test_a_static_program_gives_eagers_bits_at_new_addresses():
    torch.manual_seed(0)
    model = Block().eval()
    run = load(model, torch.randn(2, 9, 16), torch.zeros(2, 9, dtype=torch.bool))
    assert run.scheduling is Scheduling.HOST
    assert {one.mode for one in run.launch_reports()} == {"dispatched"}
    assert run.feature_map_bytes == 0
    for _ in range(3):
        x, padding = torch.randn(2, 9, 16), torch.rand(2, 9) > 0.8
        with torch.no_grad():
            assert torch.equal(run(x, padding), model(x, padding))


def test_a_block_of_all_sizes_gives_eagers_bits():
    torch.manual_seed(0)
    model = Block().eval()
    given = torch.randn(2, 9, 16), torch.zeros(2, 9, dtype=torch.bool)
    with torch.no_grad():
        captured = offload.capture(model, *given, dynamic_shapes=({1: N}, {1: N}))
    run = captured.load(dispatching(), sizes=offload.Sizes())
    for size in (9, 2, 40, 9, 200):
        x, padding = torch.randn(2, size, 16), torch.zeros(2, size, dtype=torch.bool)
        padding[:, size // 2 + 1 :] = True
        with torch.no_grad():
            assert torch.equal(run(x, padding), model(x, padding))
    assert (run.instances.misses, run.instances.hits) == (4, 1)


def test_memory_without_content_is_new_at_each_execution():
    def fill(x):
        made = torch.empty(4, 4)
        made[:2].copy_(x)
        made[2:].fill_(3)
        return made, torch.empty(0, 4), made[1:] * 2

    run = load(fill, torch.randn(2, 4))
    first = run(torch.ones(2, 4))
    second = run(torch.zeros(2, 4))
    assert torch.equal(first[0], torch.tensor([[1.0] * 4] * 2 + [[3.0] * 4] * 2))
    assert torch.equal(second[2], torch.tensor([[0.0] * 4] + [[6.0] * 4] * 2))
    assert first[0].data_ptr() != second[0].data_ptr()
    assert first[1].shape == (0, 4)


GIVEN = {
    "itself": lambda x: x,
    "its memory": lambda x: torch.from_numpy(x.numpy()),
}


@pytest.fixture
def same_or_other():
    """An operator that returns another tensor, as declared, until set to return its argument."""
    gives = {"what": torch.clone}

    def give(x):
        return gives["what"](x)

    with torch.library._scoped_library("dispatched_tests", "FRAGMENT") as library:
        library.define("same_or_other(Tensor x) -> Tensor")
        library.impl("same_or_other", give, "CompositeExplicitAutograd")
        yield torch.ops.dispatched_tests.same_or_other, gives


@pytest.mark.parametrize("what", GIVEN)
def test_an_operator_that_gives_its_argument_gives_a_copy_of_it(what, same_or_other):
    """A returned result outlives the caller's tensor, whose memory is not kept for it."""
    give, gives = same_or_other
    weight = torch.ones(8)
    run = load(lambda x: (give(x), give(weight)), torch.randn(8))
    gives["what"] = GIVEN[what]
    x = torch.randn(8)
    expected, found = x.clone(), run(x)
    assert found[0].data_ptr() != x.data_ptr()
    x.zero_()
    assert torch.equal(found[0], expected)
    found[1].zero_()
    assert torch.equal(weight, torch.ones(8))


@pytest.mark.parametrize("what", GIVEN)
def test_an_operator_that_gives_a_constant_of_sizes_gives_a_copy_of_it(what, same_or_other):
    """Writes to it, or results handed out, do not affect later executions at these sizes."""
    give, gives = same_or_other

    def count(x):
        first = torch.arange(x.shape[0])
        given = give(first)
        given.add_(1)
        return given, give(first * 2), first + x.long()

    with torch.no_grad():
        captured = offload.capture(count, torch.ones(9), dynamic_shapes=({0: N},))
    run = captured.load(dispatching(), sizes=offload.Sizes())
    expected = count(torch.ones(7))
    gives["what"] = GIVEN[what]
    for _ in range(3):
        found = run(torch.ones(7))
        assert all(map(torch.equal, found, expected))
        found[1].zero_()
    assert (run.instances.misses, run.instances.hits) == (1, 2)


def test_an_operator_that_gives_one_tensor_twice_is_met_before_an_input_is():
    """A Value without a place is not compared with an operator's result."""
    with torch.library._scoped_library("dispatched_tests", "FRAGMENT") as library:
        twice = {"is": False}
        library.define("twice(Tensor x) -> (Tensor, Tensor)")

        def two(x):
            one = x + 1
            return one, one if twice["is"] else one.clone()

        library.impl("twice", two, "CompositeExplicitAutograd")

        def add(x, y):
            one, other = torch.ops.dispatched_tests.twice(x)
            return one + y, other * 2

        run = load(add, torch.randn(8), torch.randn(8))
        twice["is"] = True
        for _ in range(2):
            x, y = torch.randn(8), torch.randn(8)
            assert all(map(torch.equal, run(x, y), add(x, y)))


def test_activations_go_after_their_last_use():
    kept = []

    library = torch.library.Library("dispatched_memory", "DEF")
    library.define("note(Tensor x) -> Tensor")

    def note(x):
        kept.append(weakref.ref(x.untyped_storage()))
        return x + 1

    library.impl("note", note, "CompositeExplicitAutograd")
    run = load(
        lambda x: torch.ops.dispatched_memory.note(torch.ops.dispatched_memory.note(x * 2)) * 2,
        torch.ones(64),
    )
    kept.clear()
    found = run(torch.ones(64))
    gc.collect()
    assert torch.equal(found, torch.full((64,), 8.0))
    assert len(kept) == 2
    assert not any(one() is not None for one in kept)


def test_what_cannot_be_delivered_so_is_refused(tmp_path):
    with torch.no_grad():
        captured = offload.capture(lambda x: (x * 2).exp(), torch.ones(64))
    with pytest.raises(offload.BackendUnavailable, match="runs no compiled kernels"):
        captured.load(dispatching(), fuse=True)
    with pytest.raises(offload.BackendUnavailable, match="cannot stream weights from a store"):
        captured.load(dispatching(), weights_budget="1MiB")
    run = captured.load(dispatching())
    run(torch.ones(64), feature_map=torch.empty(run.feature_map_bytes, dtype=torch.uint8))
