"""Weights that a resident graph copies from the host: the same bits, whatever runs when."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from simulator import RANDOM
from stored import Wide, compute_wide, save_weights, without_memory, write_wide
from test_stored_weights import MODELS
from test_streaming import Deep, weight_bytes

import offload
from offload.backends.cuda import backend as cuda_backend
from offload.backends.cuda import streaming
from offload.backends.cuda.graph import call
from offload.byte_sizes import show_bytes
from offload.report import report_on, report_table

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from device_streaming import GIVEN, ORDERS, check, expected_of, floor_on, poison_after_last_use


@pytest.mark.parametrize("name", [*sorted(MODELS.keys() - {"decoder"}), "deep"])
def test_every_budget_gives_the_same_bits(name, backend, simulator, tmp_path):
    build, make = {**MODELS, "deep": (Deep, lambda: torch.randn(*GIVEN))}[name]
    save_weights(build().eval(), tmp_path)
    captured = offload.capture(without_memory(build), make(), weights=tmp_path)
    inputs = [make() for _ in range(4)]
    expected = expected_of(captured, inputs * len(ORDERS))  # the models count their executions
    floor, whole = floor_on(captured, backend), weight_bytes(captured.program)
    for budget in [floor, *range(floor, whole, max(1, (whole - floor) // 4)), floor + whole]:
        with captured.load(backend.name, weights_budget=budget, verify=False) as run:
            assert run.streaming.plan.memory_bytes <= budget
            for number, order in enumerate(ORDERS):
                simulator.set_node_order(*order)
                check(run, inputs, expected[number * len(inputs) :][: len(inputs)])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("extra_kib", [0, 60, 200])
def test_slots_are_poisoned_after_their_last_use(
    order, extra_kib, backend, simulator, deep, device_floor
):
    inputs = [torch.randn(*GIVEN) for _ in range(5)]
    expected = expected_of(deep, inputs)
    simulator.set_node_order(*order)
    with deep.load(backend.name, weights_budget=device_floor + 1024 * extra_kib) as run:
        assert run.streaming.plan.transfers
        poison_after_last_use(backend, run)
        check(run, inputs, expected)


def test_each_pass_moves_what_does_not_stay(backend, simulator, deep, device_floor):
    with deep.load(backend.name, weights_budget=device_floor + 100 * 1024) as run:
        plan = run.streaming.plan
        assert plan.transfer_bytes == weight_bytes(deep.program) - plan.resident_bytes
        run(torch.randn(*GIVEN))
        moved, copied = run.streaming.bytes_moved, simulator.bytes_from_host
        for _ in range(5):
            launches = simulator.calls("cuGraphLaunch")
            run(torch.randn(*GIVEN))
            assert run.last_execution.bytes_streamed == plan.transfer_bytes
            assert simulator.calls("cuGraphLaunch") == launches + 1
        assert run.streaming.bytes_moved - moved == 5 * plan.transfer_bytes
        assert simulator.bytes_from_host - copied == 5 * plan.transfer_bytes


def test_no_host_work_for_each_weight(backend, simulator, deep, device_floor):
    """After the first execution, one with the same addresses makes the same few calls."""
    given, out = torch.randn(*GIVEN), torch.empty(*GIVEN)
    functions = ("cuMemcpyHtoDAsync", "cuGraphExecMemcpyNodeSetParams", "cuMemcpyHtoD",
                 "cuGraphExecKernelNodeSetParams", "cuStreamSynchronize")  # fmt: skip
    with deep.load(backend.name, weights_budget=device_floor) as run:
        run(given, out=out)
        before = {name: simulator.calls(name) for name in functions}
        run(given, out=out)
        assert {name: simulator.calls(name) for name in functions} == before


def test_the_store_is_as_large_as_what_is_streamed(backend, simulator, deep, device_floor):
    n_pinned, n_physical = simulator.host_bytes, simulator.physical_bytes
    run = deep.load(backend.name, weights_budget=device_floor, verify=False)
    plan = run.streaming.plan
    rounding = 4096 * len(plan.transfers)
    assert plan.transfer_bytes <= simulator.host_bytes - n_pinned <= plan.transfer_bytes + rounding
    run.close()
    assert simulator.host_bytes == n_pinned
    assert simulator.live("executable") == 0
    assert simulator.live("stream") == 0
    del run
    assert simulator.physical_bytes == n_physical


def test_addresses_may_be_new_and_executions_submitted(backend, simulator, deep, device_floor):
    inputs = [torch.randn(*GIVEN) for _ in range(6)]
    expected = expected_of(deep, inputs)
    simulator.set_eager(False)
    simulator.set_node_order(RANDOM, 3)
    with deep.load(backend.name, weights_budget=device_floor) as run:
        outputs = [torch.empty(*GIVEN) for _ in inputs]
        tickets = [run.submit(one, out=out) for one, out in zip(inputs, outputs, strict=True)]
        for ticket, out, (wanted,) in zip(tickets, outputs, expected, strict=True):
            ticket.wait()
            assert torch.equal(out, wanted)


def test_outputs_are_ready_before_the_last_copies(backend, simulator, deep, device_floor):
    """The device runs no further than somebody waits: an execution does not wait for its tail."""
    inputs = [torch.randn(*GIVEN) for _ in range(10)]
    expected = expected_of(deep, inputs)
    simulator.set_eager(False)
    simulator.set_node_order(RANDOM, 5)
    with deep.load(backend.name, weights_budget=device_floor + 60 * 1024) as run:
        assert any(one.after_pass < 0 for one in run.streaming.plan.transfers)
        before = simulator.bytes_from_host
        n_ahead = 0
        for given, (wanted,) in zip(inputs, expected, strict=True):
            out = run(given)
            run._loaded.resident.finish()
            assert torch.equal(out, wanted)
            n_ahead += simulator.bytes_from_host - before < run.streaming.bytes_moved
        assert n_ahead


def test_the_lane_waits_for_what_the_caller_has_enqueued(backend, simulator, deep, device_floor):
    """Whichever stream the device comes to first: an input is written before it is read."""
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    expected = expected_of(deep, inputs)
    given, out = torch.zeros(*GIVEN), torch.empty(*GIVEN)
    with deep.load(backend.name, weights_budget=device_floor) as run:
        simulator.set_eager(False)
        for source, (wanted,) in zip(inputs, expected, strict=True):
            call("cuMemcpyAsync", given.data_ptr(), source.data_ptr(), given.nbytes, 0)
            run(given, out=out)
            call("cuCtxSynchronize")  # which begins with the streams that were made
            assert torch.equal(out, wanted)


@pytest.mark.slow
def test_a_copy_of_more_than_256_mib_is_several_nodes(backend, simulator, tmp_path):
    width, n_layers = 8200, 2
    write_wide(tmp_path, width, n_layers)
    given = torch.full((1, width), 0.5)
    captured = offload.capture(
        without_memory(lambda: Wide(width, n_layers)), given, weights=tmp_path
    )
    expected = compute_wide(tmp_path, width, n_layers)
    budget = floor_on(captured, backend)
    n_nodes = simulator.calls("cuGraphAddMemcpyNode")
    with captured.load(backend.name, weights_budget=budget, verify=False) as run:
        n_transfers = len(run.streaming.plan.transfers)
        assert 4 * width**2 > 256 * 2**20
        assert n_transfers > 0
        assert simulator.calls("cuGraphAddMemcpyNode") - n_nodes == 2 * n_transfers
        for _ in range(2):
            torch.testing.assert_close(run(given), expected)


def test_two_executables_have_memories_of_their_own(backend, deep, device_floor):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 3)
    with (
        deep.load(backend.name, weights_budget=device_floor) as one,
        deep.load(backend.name, weights_budget=2 * device_floor) as other,
    ):
        for (wanted,) in expected:
            assert torch.equal(one(given), wanted)
            assert torch.equal(other(given), wanted)


def test_host_scheduling_streams_alike(backend, deep, device_floor):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given] * 2)
    with deep.load(backend.name, weights_budget=device_floor, scheduling="host") as run:
        check(run, [given] * 2, expected)
        assert run.last_execution.bytes_streamed == run.streaming.plan.transfer_bytes


@pytest.mark.parametrize("extra_bytes", [0, 10**7])
def test_weights_are_replaced_between_executions(
    extra_bytes, backend, simulator, deep, device_floor, tmp_path
):
    given = torch.randn(*GIVEN)
    other = Deep().eval()
    (tmp_path / "other").mkdir()
    save_weights(other, tmp_path / "other")
    again = offload.capture(without_memory(Deep), given, weights=tmp_path / "other")
    first = expected_of(deep, [given])
    second = expected_of(again, [given] * 2)
    with deep.load(backend.name, weights_budget=device_floor + extra_bytes) as run:
        check(run, [given], first)
        new = {name: one.detach().clone() for name, one in other.state_dict().items()}
        run.streaming.replace(new)
        for tensor in new.values():
            tensor.fill_(float("nan"))  # a copy was taken
        check(run, [given] * 2, second)
        if not extra_bytes:  # the store is the only copy of what is streamed
            names = [one.name for one in deep.program.values if one.index in deep.program.stored]
            modes = dict(zip(names, run._loaded.stream.read_modes, strict=True))
            assert set(modes.values()) == {"memory"}


def test_changed_files_are_read_again(backend, deep, device_floor, tmp_path):
    given = torch.randn(*GIVEN)
    first = expected_of(deep, [given])
    path = tmp_path / "model.safetensors"
    with deep.load(backend.name, weights_budget=device_floor) as run:
        check(run, [given], first)
        changed = {name: one * 2 for name, one in safetensors.torch.load_file(path).items()}
        with path.open("r+b") as file:
            file.write(safetensors.torch.save(changed))
        second = expected_of(deep, [given] * 2)
        run.streaming.refresh()
        check(run, [given] * 2, second)


def test_the_proof_runs_without_the_weights(backend, deep, device_floor):
    with deep.load(backend.name, weights_budget=device_floor, verify=True) as run:
        assert run.streaming.plan.transfers


def test_auto_takes_what_is_free(backend, monkeypatch, deep, device_floor):
    given = torch.randn(*GIVEN)
    expected = expected_of(deep, [given])
    with deep.load(backend.name, weights_budget="auto") as run:
        assert not run.streaming.plan.transfers
        check(run, [given], expected)
    room = device_floor * 5 // 4
    monkeypatch.setattr(type(backend), "free_bytes", lambda self, program: room)
    with deep.load(backend.name, weights_budget="auto") as run:
        assert run.streaming.plan.transfers
        assert run.streaming.plan.memory_bytes <= room
        check(run, [given], expected)


def test_free_memory_and_the_link_are_those_of_the_device(backend, simulator, deep):
    simulator.set_memory_limit(2**30)
    assert backend.free_bytes(deep.program) == 2**30 - simulator.physical_bytes
    streaming._links.clear()
    n_held = simulator.live_bytes, simulator.host_bytes, simulator.live("event")
    link = streaming.measure_link(0)
    assert link.bytes_per_second > 0
    assert link.overhead_ns >= 0
    assert (simulator.live_bytes, simulator.host_bytes, simulator.live("event")) == n_held
    n_calls = simulator.calls("cuMemcpyHtoDAsync")
    assert streaming.measure_link(0) == link
    assert simulator.calls("cuMemcpyHtoDAsync") == n_calls
    streaming._links.clear()


def test_free_memory_is_that_of_the_programs_device(backend, deep, monkeypatch):
    asked = []
    monkeypatch.setattr(cuda_backend, "free_bytes", lambda device: asked.append(device) or 0)
    monkeypatch.setattr(cuda_backend, "current_device", lambda: 0)
    monkeypatch.setattr(cuda_backend, "device_of", lambda program: 1)
    assert backend.free_bytes(deep.program) == 0
    assert asked == [1]


def test_what_nobody_knows_is_not_said_to_be_measured(backend, deep, device_floor):
    """A graph's launches and copies have no times, and a call returns before they have ended."""
    with deep.load(backend.name, weights_budget=device_floor) as run:
        run(torch.randn(*GIVEN))
        last, text = run.last_execution, run.streaming.explain()
        report = report_on(run, [last]).streaming
        plan = run.streaming.plan
    assert "waited" not in text
    assert "/s and" in text  # of the link alone
    assert text.count("/s") == 1
    assert f"{show_bytes(last.bytes_streamed)} brought" in text
    assert "times of launches were measured" in text
    assert plan.estimated == ""
    assert "streamed at" not in str(last)
    assert "waited" not in str(last)
    assert (report.bytes_per_second, report.wait_ns, report.measured_ns) == (None, None, None)
    rows = dict(
        zip(*(one.cells for one in report_table(report_on(run, [last])).columns), strict=True)
    )
    assert "  streamed by an execution" in rows
    assert not {"  brought at", "  launches waited", "  execution, measured"} & rows.keys()
    with deep.load(backend.name) as run:  # all weights stay
        run(torch.randn(*GIVEN))
        text = run.streaming.explain()
    assert "all of which stay" in text
    assert "measured" not in text
    assert "waited" not in text


def test_weights_on_the_device_have_no_store(backend):
    with torch.no_grad():
        captured = offload.capture(Deep().eval(), torch.randn(*GIVEN))
    with pytest.raises(offload.BackendUnavailable, match="capture with weights="):
        captured.load(backend.name, weights_budget="1 GiB")


def test_an_opaque_launch_keeps_its_weights():
    program = SimpleNamespace(opaque=SimpleNamespace(reason="it was compiled"), stored={0: None})
    with pytest.raises(offload.BackendUnavailable, match=r"one opaque launch.*it was compiled"):
        streaming.refuse_unstored(program)


def test_progress_counts_every_byte_that_is_read(backend, deep, device_floor):
    seen: list[tuple[int, int]] = []
    with deep.load(
        backend.name, weights_budget=device_floor, progress=lambda *one: seen.append(one)
    ):
        pass
    whole = weight_bytes(deep.program)
    assert seen[0] == (0, whole)
    assert seen[-1] == (whole, whole)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_a_closed_executable_gives_its_weight_memory_back(backend, simulator, deep, device_floor):
    run = deep.load(backend.name, weights_budget=device_floor)
    physical_bytes = simulator.physical_bytes
    memory_bytes = run.streaming.plan.memory_bytes
    run.close()
    assert simulator.physical_bytes <= physical_bytes - memory_bytes


class ReadsNothing(torch.nn.Module):
    """Reads a weight of which nothing is taken: no kernel runs for that."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (
            torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(3))) for _ in range(2)
        )
        self.extra = torch.nn.Parameter(torch.randn(64, 128))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        hidden = self.before(given)
        return self.after(torch.cat([hidden, self.extra[:0].clone()]))


def test_a_streamed_weight_that_no_node_reads(backend, tmp_path):
    save_weights(ReadsNothing().eval(), tmp_path)
    captured = offload.capture(without_memory(ReadsNothing), torch.randn(*GIVEN), weights=tmp_path)
    inputs = [torch.randn(*GIVEN) for _ in range(3)]
    with captured.load(backend.name, weights_budget=floor_on(captured, backend)) as run:
        plan = run.streaming.plan
        after_passes = {
            captured.program.values[plan.pieces[one.piece].value].name: one.after_pass
            for one in plan.transfers
        }
        assert after_passes["extra"] == 0  # in the middle of a pass
        check(run, inputs, expected_of(captured, inputs))
