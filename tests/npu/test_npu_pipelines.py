"""Pipelines on streams of torch_npu: map's three, a ticket's event, tickets between two."""

from __future__ import annotations

import pytest
import torch
from npu_loading import load
from on_npu import check_same

import offload


def test_map_copies_batches_there_and_results_back() -> None:
    with load(lambda x, y: (x + y, {"twice": x * 2}), *(torch.ones(16).npu(),) * 2) as run:
        batches = [(torch.randn(16), torch.randn(16)) for _ in range(8)]
        found = list(run.map(iter(batches), buffersize=3))
        assert len(found) == len(batches)
        for (x, y), (total, more) in zip(batches, found, strict=True):
            assert total.device.type == "cpu"
            assert torch.equal(total, x + y)
            assert torch.equal(more["twice"], x * 2)
        assert run.last_execution.n_executions == len(batches)


def test_batches_on_the_device_stay_there() -> None:
    with load(lambda x: x + 1, torch.ones(16).npu()) as run:
        batches = [torch.randn(16) for _ in range(5)]
        for x, y in zip(batches, run.map({"x": x.npu()} for x in batches), strict=True):
            assert y.device.type == "npu"
            check_same(y, x + 1)


def test_a_host_constant_stays_on_the_host() -> None:
    with load(lambda x, scale: x * scale, torch.ones(16).npu(), torch.tensor(3.0)) as run:
        [y] = run.map([(torch.full((16,), 2.0), torch.tensor(3.0))])
        assert torch.equal(y, torch.full((16,), 6.0))


def test_an_input_that_is_written_must_be_on_the_device() -> None:
    with load(lambda x: x.add_(1), torch.ones(16).npu()) as run:
        with pytest.raises(offload.BindingError, match="is written by the program"):
            list(run.map([torch.ones(16)]))
        x = torch.ones(16).npu()
        [y] = run.map([x])
        assert y is x
        check_same(x, torch.full((16,), 2.0))


def test_a_batch_that_does_not_fit_raises_in_its_place() -> None:
    with load(lambda x: x + 1, torch.ones(16).npu()) as run:
        results = run.map([torch.zeros(16), torch.zeros(17), torch.zeros(16)])
        assert torch.equal(next(results), torch.ones(16))
        with pytest.raises(offload.BindingError, match="expected float32"):
            next(results)
        assert torch.equal(run(torch.zeros(16).npu()).cpu(), torch.ones(16))


def test_a_stream_waits_for_a_tickets_event() -> None:
    with load(lambda x: x + 1, torch.ones(16).npu()) as run:
        side = torch.npu.Stream()
        ticket = run.submit(torch.ones(16).npu())
        event = ticket.event()
        assert isinstance(event, torch.Event)
        side.wait_event(event)
        with torch.npu.stream(side):
            doubled = ticket.result() * 2
        event.synchronize()
        side.synchronize()
        check_same(doubled, torch.full((16,), 4.0))


@pytest.mark.parametrize("beside", [False, True])
def test_a_ticket_of_another_stream_is_an_argument(beside: bool) -> None:
    """By an event between the streams; on one stream there is nothing to wait for."""
    with (
        load(lambda x: x + 1, torch.ones(16).npu()) as first,
        load(lambda x: x * 2, torch.ones(16).npu()) as second,
    ):
        side = torch.npu.Stream() if beside else torch.npu.current_stream()
        for step in range(10):
            x = torch.full((16,), float(step)).npu()
            ticket = first.submit(x)
            with torch.npu.stream(side):
                behind = second.submit(ticket)
            check_same(behind.result(), torch.full((16,), 2.0 * (step + 1)))


def test_a_task_keeps_the_stream_of_who_submitted_it() -> None:
    with load(lambda x: x + 1, torch.ones(16).npu()) as run, offload.tasks() as t:
        side = torch.npu.Stream()
        with torch.npu.stream(side):
            ticket = t.submit(run, t.submit(lambda: torch.ones(16).npu()))
            stream_id = side.stream_id
        ticket.wait()
        assert ticket._issued_to()[0] == stream_id
        check_same(ticket.result(), torch.full((16,), 2.0))
