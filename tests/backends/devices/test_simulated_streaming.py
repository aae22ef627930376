"""Weights that a device copies from the host during launches: the same bits in any order.

On each simulated device: as nodes of a CUDA graph, and as copies in an Ascend model.
"""

from __future__ import annotations

import gc

import pytest
import safetensors.torch
import torch
from budgets import Deep, Shared, budget_steps, weight_bytes
from cost_models import NO_HEADER
from device_streaming import GIVEN, check, expected_of, floor_on, poison_after_last_use
from stored import Packed, save_weights, without_memory
from stored_models import MODELS

import offload
from offload.console.amounts import show_bytes
from offload.observe.report import report_on, report_table
from offload.timeline import SpanKind


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(MODELS.keys() - {"decoder"}), "deep", "shared", "packed"])
def test_every_step_of_the_budget_gives_the_same_bits(name, device, tmp_path):
    others = {
        "deep": (Deep, lambda: torch.randn(*GIVEN)),
        "shared": (Shared, lambda: torch.randn(*GIVEN)),
        "packed": (Packed, lambda: torch.randn(4, 128)),
    }
    build, make = {**MODELS, **others}[name]
    save_weights(build().eval(), tmp_path)
    captured = offload.capture(without_memory(build), make(), weights=tmp_path)
    inputs = [make() for _ in range(4)]
    # The models count their executions.
    expected = expected_of(captured, inputs * len(device.orders))
    budgets = budget_steps(captured, device.backend)
    if len(budgets) > 24 or name == "resnet":  # all of them would take minutes
        budgets = [*budgets[: -1 : max(1, len(budgets) // 12)], budgets[-1]]
    for budget in budgets:
        with captured.load(device.backend.name, weights_budget=budget, verify=False) as run:
            plan = run.streaming.plan
            assert plan.taken_bytes <= budget
            for number, order in enumerate(device.orders):
                device.set_order(order)
                check(run, inputs, expected[number * len(inputs) :][: len(inputs)], device.settle)
                assert run.last_execution.bytes_streamed == plan.transfer_bytes
    assert plan.is_resident


@pytest.mark.slow
@pytest.mark.parametrize("extra_kib", [0, 60, 200])
def test_slots_are_poisoned_after_their_last_use(extra_kib, device, deep, least_budget):
    inputs = [torch.randn(*GIVEN) for _ in range(5)]
    expected = expected_of(deep, inputs)
    budget = least_budget + 1024 * extra_kib
    for order in device.orders:
        device.set_order(order)
        with deep.load(device.backend.name, weights_budget=budget) as run:
            assert run.streaming.plan.transfers
            poison_after_last_use(device.backend, run)
            check(run, inputs, expected, device.settle)


def test_each_pass_moves_what_does_not_stay(device, deep, least_budget):
    with deep.load(device.backend.name, weights_budget=least_budget + 100 * 1024) as run:
        plan = run.streaming.plan
        assert plan.transfer_bytes == weight_bytes(deep.program) - plan.resident_bytes
        run(torch.randn(*GIVEN))
        moved, copied = run.streaming.bytes_moved, device.controls.bytes_from_host
        for _ in range(5):
            launches = device.controls.calls(device.execute)
            run(torch.randn(*GIVEN))
            assert run.last_execution.bytes_streamed == plan.transfer_bytes
            assert device.controls.calls(device.execute) == launches + 1
        assert run.streaming.bytes_moved - moved == 5 * plan.transfer_bytes
        assert device.controls.bytes_from_host - copied == 5 * plan.transfer_bytes


def test_addresses_may_be_new_and_executions_submitted(device, deep, least_budget):
    inputs = [torch.randn(*GIVEN) for _ in range(6)]
    expected = expected_of(deep, inputs)
    device.set_order(device.orders[-1])
    device.controls.set_eager(False)
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        outputs = [torch.empty(*GIVEN) for _ in inputs]
        tickets = [run.submit(one, out=out) for one, out in zip(inputs, outputs, strict=True)]
        for ticket, out, (wanted,) in zip(tickets, outputs, expected, strict=True):
            ticket.wait()
            assert torch.equal(out, wanted)


def test_outputs_are_ready_before_the_last_copies(device, deep, least_budget):
    """The device runs only as far as a wait requires: an execution does not wait for its tail."""
    inputs = [torch.randn(*GIVEN) for _ in range(10)]
    expected = expected_of(deep, inputs)
    device.set_order(device.orders[-1])
    device.controls.set_eager(False)
    with deep.load(device.backend.name, weights_budget=least_budget + 60 * 1024) as run:
        assert any(one.after_pass < 0 for one in run.streaming.plan.transfers)
        before = device.controls.bytes_from_host
        n_ahead = 0
        for given, (wanted,) in zip(inputs, expected, strict=True):
            out = run(given)
            run._loaded.resident.finish()
            assert torch.equal(out, wanted)
            n_ahead += device.controls.bytes_from_host - before < run.streaming.bytes_moved
        assert n_ahead


def test_the_lane_waits_for_what_the_caller_has_enqueued(device, deep, least_budget):
    """Whichever stream the device runs first: an input is written before it is read."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    given, out = torch.zeros(*GIVEN), torch.empty(*GIVEN)
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        device.controls.set_eager(False)
        for source, (wanted,) in zip(inputs, expected, strict=True):
            device.enqueue_copy(given, source)
            run(given, out=out)
            device.synchronize()
            assert torch.equal(out, wanted)


def test_two_executables_have_memories_of_their_own(device, deep, least_budget):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 3)
    with (
        deep.load(device.backend.name, weights_budget=least_budget) as one,
        deep.load(device.backend.name, weights_budget=2 * least_budget) as other,
    ):
        for (wanted,) in expected:
            assert torch.equal(one(given), wanted)
            assert torch.equal(other(given), wanted)


def test_host_scheduling_streams_alike(device, deep, least_budget):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 2)
    with deep.load(device.backend.name, weights_budget=least_budget, scheduling="host") as run:
        check(run, [given] * 2, expected, device.settle)
        assert run.last_execution.bytes_streamed == run.streaming.plan.transfer_bytes


@pytest.mark.slow
@pytest.mark.parametrize("extra_bytes", [0, 10**7])
def test_weights_are_replaced_between_executions(extra_bytes, device, deep, least_budget, tmp_path):
    given = torch.randn(*GIVEN)
    other = Deep().eval()
    (tmp_path / "other").mkdir()
    save_weights(other, tmp_path / "other")
    again = offload.capture(without_memory(Deep), given, weights=tmp_path / "other")
    first = expected_of(deep, [given])
    second = expected_of(again, [given] * 2)
    with deep.load(device.backend.name, weights_budget=least_budget + extra_bytes) as run:
        check(run, [given], first, device.settle)
        new = {name: one.detach().clone() for name, one in other.state_dict().items()}
        run.streaming.replace(new)
        for tensor in new.values():
            tensor.fill_(float("nan"))  # a copy was taken
        check(run, [given] * 2, second, device.settle)
        if not extra_bytes:  # the store is the only copy of streamed weights
            names = [one.name for one in deep.program.values if one.index in deep.bindings.stored]
            modes = dict(zip(names, run._loaded.weights.stream.read_modes, strict=True))
            assert set(modes.values()) == {"memory"}


@pytest.mark.slow
@pytest.mark.parametrize("scheduling", ["offload", "host"])
@pytest.mark.parametrize("extra_bytes", [0, 10**7])
def test_what_was_submitted_before_has_the_old_content(
    extra_bytes, scheduling, device, deep, least_budget, tmp_path
):
    given = torch.randn(*GIVEN)
    other = Deep().eval()
    save_weights(other, tmp_path)
    again = offload.capture(without_memory(Deep), given, weights=tmp_path)
    first = expected_of(deep, [given] * 20)
    second = expected_of(again, [given] * 3)
    device.controls.set_eager(False)
    budget = least_budget + extra_bytes
    with deep.load(device.backend.name, weights_budget=budget, scheduling=scheduling) as run:
        outs = [torch.empty(*GIVEN) for _ in (*first, *second)]
        tickets = [run.submit(given, out=out) for out in outs[:20]]
        run.streaming.replace({name: one.detach() for name, one in other.state_dict().items()})
        tickets += [run.submit(given, out=out) for out in outs[20:]]
        for ticket, out, (wanted,) in zip(tickets, outs, [*first, *second], strict=True):
            ticket.wait()
            assert torch.equal(out, wanted)


def test_changed_files_are_read_again(device, deep, least_budget, tmp_path):
    given = torch.randn(*GIVEN)
    first = expected_of(deep, [given])
    path = tmp_path / "model.safetensors"
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        check(run, [given], first, device.settle)
        changed = {name: one * 2 for name, one in safetensors.torch.load_file(path).items()}
        with path.open("r+b") as file:
            file.write(safetensors.torch.save(changed))
        second = expected_of(deep, [given] * 2)
        run.streaming.refresh()
        check(run, [given] * 2, second, device.settle)


def test_auto_takes_what_is_free(device, monkeypatch, deep, least_budget):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given])
    with deep.load(device.backend.name, weights_budget="auto") as run:
        assert not run.streaming.plan.transfers
        check(run, [given], expected, device.settle)
    room = least_budget * 5 // 4
    monkeypatch.setattr(type(device.backend.weights), "free_bytes", lambda self, program: room)
    with deep.load(device.backend.name, weights_budget="auto") as run:
        assert run.streaming.plan.transfers
        assert run.streaming.plan.taken_bytes <= room
        check(run, [given], expected, device.settle)


def test_what_nobody_knows_is_not_said_to_be_measured(device, deep, least_budget):
    """A graph's launches and copies have no times, and a call returns before they have ended."""
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        run(torch.randn(*GIVEN))
        last, text = run.last_execution, run.streaming.explain()
        report = report_on(run, [last]).streaming
        plan = run.streaming.plan
    assert "waited" not in text
    assert "/s and" in text  # only of the link
    assert text.count("/s") == 1
    assert f"{show_bytes(last.bytes_streamed)} streamed" in text
    assert "times of launches were measured, on made-up inputs: made up" in text
    assert plan.estimated == ""
    assert "streamed at" not in str(last)
    assert "waited" not in str(last)
    assert (report.bytes_per_second, report.wait_ns, report.measured_ns) == (None, None, None)
    rows = dict(
        zip(*(one.cells for one in report_table(report_on(run, [last])).columns), strict=True)
    )
    assert "  streamed by an execution" in rows
    assert not {"  streamed at", "  launches waited", "  execution, measured"} & rows.keys()
    with deep.load(device.backend.name) as run:  # all weights stay resident
        run(torch.randn(*GIVEN))
        text = run.streaming.explain()
    assert "all of which stay" in text
    assert "measured" not in text
    assert "waited" not in text


def test_a_timeline_counts_bytes_and_predicts_what_was_planned(device, deep, least_budget):
    """Waits and copies are predicted with the launch durations of the plan."""
    with deep.load(device.backend.name, weights_budget=least_budget) as run:
        run(torch.randn(*GIVEN))
        with run.timeline(NO_HEADER) as timeline:
            run(torch.randn(*GIVEN))
        plan, program = run.streaming.plan, run.program
    (one,) = timeline.executions
    assert one.bytes_streamed == plan.transfer_bytes
    if not one.times_weights:  # a model of an NPU; reports of graphs are tested elsewhere
        assert not one.of_kind(SpanKind.WEIGHTS)
        assert not one.of_kind(SpanKind.WAIT)
    assert one.times_weights == (device.execute == "cuGraphLaunch")
    assert plan.launch_ns == (1000.0,) * len(program.launches)
    predicted = {kind: [span for span in one.predicted if span.kind is kind] for kind in SpanKind}
    assert [span.duration_ns for span in predicted[SpanKind.LAUNCH]] == [
        round(launch_ns) for launch_ns in plan.launch_ns
    ]
    streamed = {program.values[plan.pieces[each.piece].value].name for each in plan.transfers}
    assert {span.name for span in predicted[SpanKind.WEIGHTS]} == streamed
    waited_ns = sum(span.duration_ns for span in predicted[SpanKind.WAIT])
    assert waited_ns == pytest.approx(plan.period_ns - plan.compute_ns, abs=len(program.launches))
    assert waited_ns > 0


def test_weights_on_the_device_have_no_store(device):
    with torch.no_grad():
        captured = offload.capture(Deep().eval(), torch.randn(*GIVEN))
    with pytest.raises(offload.BackendUnavailable, match="capture with weights="):
        captured.load(device.backend.name, weights_budget="1 GiB")


def test_progress_counts_every_byte_that_is_read(device, deep, least_budget):
    seen: list[tuple[int, int, str]] = []
    with deep.load(
        device.backend.name, weights_budget=least_budget, progress=lambda *one: seen.append(one)
    ):
        pass
    whole = weight_bytes(deep.program)
    assert seen[0] == (0, whole, "reading weights")
    assert seen[-1] == (whole, whole, "reading weights")
    assert [done for done, *_ in seen] == sorted({done for done, *_ in seen})


def test_a_closed_executable_gives_its_weight_memory_back(device, deep, least_budget):
    gc.collect()  # held by errors of refused budgets
    before = device.held()
    run = deep.load(device.backend.name, weights_budget=least_budget, verify=False)
    run(torch.randn(*GIVEN))
    held_bytes = device.held()[-1]
    memory_bytes = run.streaming.plan.memory_bytes
    run.close()
    assert device.held()[-1] <= held_bytes - memory_bytes
    del run
    gc.collect()
    assert device.held() == before


class ReadsNothing(torch.nn.Module):
    """Reads nothing of a weight: no kernel runs for that."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (
            torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3))) for _ in range(2)
        )
        self.extra = torch.nn.Parameter(torch.randn(64, 128))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = self.before(given)
        return self.after(torch.cat([hidden, self.extra[:0].clone()]))


def test_a_streamed_weight_that_no_node_reads(device, tmp_path):
    save_weights(ReadsNothing().eval(), tmp_path)
    captured = offload.capture(without_memory(ReadsNothing), torch.randn(*GIVEN), weights=tmp_path)
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    with captured.load(
        device.backend.name, weights_budget=floor_on(captured, device.backend)
    ) as run:
        plan = run.streaming.plan
        after_passes = {
            captured.program.values[plan.pieces[one.piece].value].name: one.after_pass
            for one in plan.transfers
        }
        assert after_passes["extra"] == 0  # in the middle of a pass
        check(run, inputs, expected_of(captured, inputs), device.settle)
