"""Executions under a budget of weights: the bits of executions with resident weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import Deep, Shared, budgets_of, floor_of, weight_bytes
from stored import Packed, save_weights, without_memory
from stored_models import MODELS, results
from streamed_cases import KIB, Layers

import offload
from offload import Captured
from offload.backends import NullBackend

OWN = {
    "deep": (Deep, lambda: torch.randn(4, 128)),
    "shared": (Shared, lambda: torch.randn(4, 128)),
}


@pytest.fixture(params=[*MODELS, *OWN])
def case(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Callable[[], Any], Callable[[], torch.Tensor], Path, Any]:
    """A function that builds a model, an input, the folder of its weights, the model in memory."""
    build, make = {**MODELS, **OWN}[request.param]
    model = build().eval()
    save_weights(model, tmp_path)
    return build, make, tmp_path, model


@pytest.mark.slow
def test_every_budget_gives_the_same_bits(case: Any) -> None:
    build, make, folder, _ = case
    captured = offload.capture(without_memory(build), make(), weights=folder)
    inputs = [make() for _ in range(3)]
    with captured.load() as resident:
        assert resident.streaming is not None
        assert not resident.streaming.plan.transfers
        expected = [results(resident(one)) for one in inputs]
    for budget in budgets_of(captured):
        with captured.load(weights_budget=budget) as run:
            plan = run.streaming.plan
            assert plan.memory_bytes <= budget
            for given, wanted in zip(inputs, expected, strict=True):
                for got, tensor in zip(results(run(given)), wanted, strict=True):
                    assert torch.equal(got, tensor)
            assert run.last_execution.bytes_streamed == plan.transfer_bytes


def test_resident_weights_give_the_bits_of_the_model_in_memory(case: Any) -> None:
    build, make, folder, model = case
    given = make()
    with torch.no_grad(), offload.capture(model) as in_memory:
        model(given)
    save_weights(model, folder)  # as the recorded call left them
    with in_memory.load() as run:
        expected = [one.clone() for one in results(run(given))]
    captured = offload.capture(without_memory(build), given, weights=folder)
    with captured.load(weights_budget=floor_of(captured)) as run:
        for got, tensor in zip(results(run(given)), expected, strict=True):
            assert torch.equal(got, tensor)


def test_a_shared_block_is_copied_for_each_layer_where_it_does_not_fit(tmp_path: Path) -> None:
    model = Shared().eval()
    save_weights(model, tmp_path)
    given = torch.randn(4, 128)
    captured = offload.capture(without_memory(Shared), given, weights=tmp_path)
    floor = floor_of(captured)
    wide, small = (
        256 * 128 * 4,
        sum(one.numel() * 4 for one in model.parameters() if one.dim() == 1),
    )
    assert wide + small <= floor < 2 * wide  # of 2.5: a resident block would take all of it
    with captured.load() as whole, captured.load(weights_budget=floor) as run:
        expected = whole(given)
        for _ in range(3):
            assert torch.equal(run(given), expected)
        plan = run.streaming.plan
        n_copies = [one.piece for one in plan.transfers]
        assert max(map(n_copies.count, n_copies)) == model.n_layers
        assert run.last_execution.bytes_streamed == plan.transfer_bytes > 4 * wide
        assert "wide.weight 128.00 KiB, 4 times" in run.streaming.explain()
        run.streaming.replace({"wide.weight": model.wide.weight.detach() * 2})
        changed = Shared().eval()
        changed.load_state_dict(model.state_dict())
        changed.wide.weight.data.mul_(2)
        with offload.capture(changed) as again:
            changed(given)
        with again.load() as other:
            assert torch.equal(run(given), other(given))


def test_packed_weights_are_streamed_packed(tmp_path: Path) -> None:
    save_weights(Packed().eval(), tmp_path)
    captured = offload.capture(without_memory(Packed), torch.randn(4, 128), weights=tmp_path)
    packed_bytes = sum(one.numel() * one.element_size() for one in Packed().buffers())
    assert weight_bytes(captured.program) == packed_bytes  # as floats they would be four times that
    given = torch.randn(4, 128)
    with captured.load() as run:
        expected = run(given)
    for budget in budgets_of(captured)[:-1]:
        with captured.load(weights_budget=budget) as run:
            assert torch.equal(run(given), expected)
            streamed_bytes = run.last_execution.bytes_streamed
            assert streamed_bytes == packed_bytes - run.streaming.plan.resident_bytes


def test_a_model_in_memory_is_its_own_store(case: Any) -> None:
    _, make, _, model = case
    given = make()
    with torch.no_grad():
        captured = offload.capture(model, given)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    with captured.load() as run:
        expected = [one.clone() for one in results(run(given))]
    for budget in budgets_of(captured)[::3]:
        model.load_state_dict(state)
        with captured.load(weights_budget=budget) as run:
            for got, tensor in zip(results(run(given)), expected, strict=True):
                assert torch.equal(got, tensor)


@pytest.fixture
def deep(tmp_path: Path) -> Captured:
    save_weights(Deep().eval(), tmp_path)
    return offload.capture(without_memory(Deep), torch.randn(4, 128), weights=tmp_path)


def test_a_budget_below_the_floor_says_what_is_needed(deep: Captured) -> None:
    floor = floor_of(deep)
    deep.load(weights_budget=floor).close()
    with pytest.raises(offload.PlanError) as refused:
        deep.load(weights_budget=floor - 1)
    message = str(refused.value)
    assert str(floor) in message
    assert str(floor - 1) in message
    assert "layers.2" in message  # the largest weight sets the floor


@pytest.mark.parametrize("budget", ["128KiB", "0.125 MiB", 128 * KIB, "131072"])
def test_a_budget_is_bytes_or_text(deep: Captured, budget: int | str) -> None:
    with pytest.raises(offload.PlanError, match="131072"):
        deep.load(weights_budget=budget)


def test_text_says_how_much_may_be_used(deep: Captured) -> None:
    n_kib = floor_of(deep) // KIB + 1
    with deep.load(weights_budget=f"{n_kib} KiB") as run:
        assert run.streaming.plan.budget_bytes == n_kib * KIB


@pytest.mark.parametrize("budget", ["2 gallons", "", -1, "-1", 2.5, True])
def test_other_budgets_are_refused(deep: Captured, budget: Any) -> None:
    with pytest.raises(offload.BindingError, match=r"weights_budget.*expected a number of bytes"):
        deep.load(weights_budget=budget)


def test_each_pass_moves_what_does_not_stay(deep: Captured) -> None:
    with deep.load(weights_budget=floor_of(deep) + 100 * KIB) as run:
        plan = run.streaming.plan
        assert plan.transfer_bytes == weight_bytes(deep.program) - plan.resident_bytes
        for _ in range(5):
            run(torch.randn(4, 128))
            assert run.last_execution.bytes_streamed == plan.transfer_bytes


def test_addresses_may_be_new_and_executions_submitted(deep: Captured) -> None:
    with deep.load() as run:
        inputs = [torch.randn(4, 128) for _ in range(8)]
        expected = [run(one).clone() for one in inputs]
    with deep.load(weights_budget=floor_of(deep)) as run:
        arenas = [torch.empty(run.feature_map_bytes, dtype=torch.uint8) for _ in range(2)]
        outputs = [torch.empty(4, 128) for _ in inputs]
        tickets = [
            run.submit(one, out=out, feature_map=arena)
            for one, out, arena in zip(inputs, outputs, itertools.cycle(arenas))
        ]
        for ticket, out, tensor in zip(tickets, outputs, expected, strict=True):
            assert ticket.result() is out
            assert torch.equal(out, tensor)


def test_host_scheduling_streams_alike(deep: Captured) -> None:
    given = torch.randn(4, 128)
    with deep.load() as run:
        expected = run(given)
    with deep.load(weights_budget=floor_of(deep), scheduling="host") as run:
        assert torch.equal(run(given), expected)


def test_two_executables_have_memories_of_their_own(deep: Captured) -> None:
    given = torch.randn(4, 128)
    floor = floor_of(deep)
    with deep.load() as run:
        expected = [run(given).clone() for _ in range(3)]
    with deep.load(weights_budget=floor) as one, deep.load(weights_budget=2 * floor) as other:
        for wanted in expected:
            assert torch.equal(one(given), wanted)
            assert torch.equal(other(given), wanted)


def test_explain_says_what_stays_and_what_sets_the_floor(deep: Captured) -> None:
    floor = floor_of(deep)
    with deep.load(weights_budget=floor + 64 * KIB) as run:
        text = run.streaming.explain()
    assert "streamed: layers.2" in text
    for word in ("stay", "ring", "predicted", "no plan is quicker", "least budget", "set by"):
        assert word in text


def test_a_device_that_cannot_stream_says_so_at_once(deep: Captured, monkeypatch) -> None:
    monkeypatch.setattr(NullBackend, "prepare", lambda *_: pytest.fail("nothing is prepared"))
    with pytest.raises(
        offload.BackendUnavailable, match=r"cannot stream weights from a store .* without weights=,"
    ):
        deep.load(device="null")


@pytest.mark.parametrize(
    ("end", "other"),
    [
        (lambda other: 7 // other, torch.tensor([2, 3])),
        (torch.linalg.cholesky, torch.eye(3) * 4),
    ],
)
@pytest.mark.parametrize("budget", [128 * KIB, "auto"])
@pytest.mark.parametrize("known", [True, False])
def test_inputs_that_cannot_be_made_up_leave_estimates(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    end: Any,
    other: torch.Tensor,
    budget: Any,
    known: bool,
) -> None:
    """The content of recorded inputs need not be made up; a file's program has none of it."""
    if not known:
        monkeypatch.setattr("offload.record.watched_call.input_samples", lambda given: ())
    model = Layers(end)
    save_weights(model, tmp_path)
    given = torch.randn(4, 128)
    captured = offload.capture(model, given, other, weights=tmp_path)
    monkeypatch.setattr("offload.backends.cpu.streaming.free_bytes", lambda: 200 * KIB)
    with captured.load(weights_budget=budget) as run, torch.no_grad():
        assert run.streaming.plan.transfers
        assert ("times of launches are estimates" in run.streaming.explain()) != known
        for got, expected in zip(run(given, other), model(given, other), strict=True):
            torch.testing.assert_close(got, expected)
