"""A warm-up of a model with weights in files holds only those that launches need at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stored import Wide, save_weights, without_memory

import offload
from offload.backends.captured.torch_warm_up import _take_stored, last_uses_of
from offload.interpreter.eager_run import EagerRun
from offload.interpreter.made_up_inputs import index_weights, stored_indices


def test_each_weight_is_zeros_from_its_first_launch_to_its_last(tmp_path: Path) -> None:
    save_weights(Wide(64, 8), tmp_path)
    given = torch.randn(2, 64)
    bound = offload.capture(without_memory(lambda: Wide(64, 8)), given, weights=tmp_path).bound
    run = EagerRun(bound, {bound.program.inputs[0].value: (given.untyped_storage(), 0)}, fill=0)
    last_uses = last_uses_of(bound)
    seen: set[int] = set()
    indices = index_weights(bound.bindings)
    for launch in bound.program.launches:
        _take_stored(bound, launch, run.bases, torch.device("cpu"), indices)
        held = run.bases.keys() & bound.bindings.stored.keys()
        seen |= held
        assert len(held) <= 1
        assert all(not torch.tensor(list(run.bases[one][0])).any() for one in held)
        run.keep(launch, run.call(launch)())
        for value in last_uses.get(launch.index, ()):
            run.bases.pop(value, None)
    assert seen == set(bound.bindings.stored)
    assert not run.bases.keys() & bound.bindings.stored.keys()


class Reordered(torch.nn.Module):
    """Rows of a table, by a one-based order in the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(3, 4))
        self.register_buffer("order", torch.tensor([3, 1, 2]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.index_select(0, self.order - 1)


def test_indices_are_those_of_the_file(tmp_path: Path) -> None:
    save_weights(Reordered(), tmp_path)
    with torch.no_grad():
        captured = offload.capture(without_memory(Reordered), torch.randn(3, 4), weights=tmp_path)
    bound, bases = captured.bound, {}
    for launch in bound.program.launches:
        indices = index_weights(bound.bindings)
        _take_stored(bound, launch, bases, torch.device("cpu"), indices)
    held = {
        bound.bindings.stored[value].name: bytes(torch.tensor(list(storage)).tolist())
        for value, (storage, _) in bases.items()
    }
    assert held["order"] == torch.tensor([3, 1, 2]).numpy().tobytes()
    assert not any(held["table"])


def test_indices_that_are_no_longer_there_are_a_file_error(tmp_path: Path) -> None:
    save_weights(Reordered(), tmp_path)
    with torch.no_grad():
        captured = offload.capture(without_memory(Reordered), torch.randn(3, 4), weights=tmp_path)
    (stored,) = (one for one in captured.bindings.stored.values() if one.name == "order")
    path = Path(stored.path)
    path.write_bytes(path.read_bytes()[: stored.offset_bytes + 8])
    with pytest.raises(offload.FileError, match=r"order: expected 24 bytes from .*, found 8"):
        stored_indices(stored)
    path.unlink()
    with pytest.raises(offload.FileError, match="order cannot be read"):
        stored_indices(stored)


class Orders(torch.nn.Module):
    """A table, by orders of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(8, 4))
        for n_rows in (8, 2, 6, 4):
            self.register_buffer(f"order_{n_rows}", torch.arange(n_rows))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        orders = (self.order_8, self.order_2, self.order_6, self.order_4)
        return [x + self.table.index_select(0, order) for order in orders]


@pytest.mark.parametrize(
    ("limit_bytes", "names"),
    [
        (1000, {"order_2", "order_4", "order_6", "order_8"}),
        (96, {"order_2", "order_4", "order_6"}),
        (95, {"order_2", "order_4"}),
        (15, set()),
    ],
)
def test_indices_are_limited_in_all(monkeypatch, tmp_path: Path, limit_bytes, names) -> None:
    monkeypatch.setattr("offload.interpreter.made_up_inputs.INDICES_BYTES", limit_bytes)
    save_weights(Orders(), tmp_path)
    with torch.no_grad():
        captured = offload.capture(without_memory(Orders), torch.randn(1, 4), weights=tmp_path)
    stored = captured.bindings.stored
    assert {stored[index].name for index in index_weights(captured.bindings)} == names
