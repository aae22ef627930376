"""Executions on every backend: addresses, counts, order, errors, lifetimes."""

from __future__ import annotations

import gc
import re
import textwrap
import threading
import weakref

import pytest
import torch
from chains import chain, preamble_on, run_script, same

import offload
from offload.load.options import delivering
from offload.plan import SlotKind


def fork(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = x.exp(), y.cos()
    return left @ right, (left + right).relu()


def test_empty_program(backend, load):
    run = load(lambda x: x, torch.ones(3))
    x = torch.randn(3)
    assert run(x) is x
    assert not run.program.launches


def test_one_launch(backend, load):
    run = load(torch.sin, torch.ones(3))
    x = torch.randn(3)
    assert same(backend, run(x), x.sin())
    assert len(run.program.launches) == 1


def test_chain(backend, load):
    run = load(chain, torch.ones(8))
    x = torch.randn(8)
    assert same(backend, run(x), chain(x))


ON_THE_DEVICE = {
    "cuda": "4 run as nodes of one graph on the device",
    "npu": "4 run as tasks of one model on the device",
}


def test_explain_says_who_launches(backend, load, scheduling):
    run = load(chain, torch.ones(8))
    run(torch.randn(8))
    used, text = delivering(backend, scheduling), run.explain()
    said = ON_THE_DEVICE.get(used.name.removesuffix("-simulated"))
    if used.dispatch is used:
        assert re.search("4 are .*, launched by the host into memory that they allocate", text)
    elif said is not None:
        assert said in text
    else:  # the host's own threads, or nobody
        assert "on the device" not in text


def test_fork_and_join(backend, load):
    run = load(fork, torch.ones(4, 4), torch.ones(4, 4))
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for got, expected in zip(run(x, y), fork(x, y), strict=True):
        assert same(backend, got, expected)


def test_rebinds_every_slot_with_old_memory_poisoned(backend, load):
    run = load(fork, torch.ones(4, 4), torch.ones(4, 4))
    inputs = [torch.randn(4, 4), torch.randn(4, 4)]
    arena = torch.empty(run.feature_map_bytes, dtype=torch.uint8)
    outputs = (torch.empty(4, 4), torch.empty(4, 4))
    run(*inputs, out=outputs, feature_map=arena)
    old = [*inputs, *outputs, arena.view(torch.float32)]
    expected = fork(*inputs)
    moved = [tensor.clone() for tensor in inputs]
    for tensor in old:
        tensor.fill_(float("nan"))
    new_outputs = (torch.empty(4, 4), torch.empty(4, 4))
    got = run(*moved, out=new_outputs, feature_map=torch.empty_like(arena))
    assert got[0] is new_outputs[0]
    assert got[1] is new_outputs[1]
    for one, other in zip(got, expected, strict=True):
        assert same(backend, one, other)
    assert all(tensor.isnan().all() for tensor in old)
    assert run.last_execution.policy == "all"
    assert run.last_execution.slots_changed == 5
    assert run.last_execution.bytes_copied == 0


def test_nothing_changed_patches_nothing(backend, load):
    run = load(chain, torch.ones(8))
    x, y = torch.randn(8), torch.empty(8)
    run(x, out=y)
    run(x, out=y)
    last = run.last_execution
    assert (last.policy, last.slots_changed, last.words_patched) == ("none", 0, 0)


def test_moved_input_patches_only_input_words(backend, load):
    run = load(chain, torch.ones(8))
    x, y = torch.randn(8), torch.empty(8)
    run(x, out=y)
    run(x.clone(), out=y)
    last = run.last_execution
    assert last.policy == "io"
    assert last.slots_changed == 1
    assert last.words_patched >= 1


@pytest.mark.slow
@pytest.mark.parametrize("n_launches", [10, 200])
def test_moved_feature_map_is_one_slot(backend, load, n_launches):
    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(n_launches):
            x = x.sin()
        return x

    run = load(deep, torch.ones(64))
    x, y = torch.randn(64), torch.empty(64)
    arenas = [torch.empty(run.feature_map_bytes, dtype=torch.uint8) for _ in range(2)]
    run(x, out=y, feature_map=arenas[0])
    run(x, out=y, feature_map=arenas[1])
    last = run.last_execution
    assert last.policy == "all"
    assert last.slots_changed == 1
    assert same(backend, y, deep(x))
    if backend.name == "cpu":
        assert last.words_patched == 1


def test_weights_are_bound_once(backend, load):
    linear = torch.nn.Linear(4, 4)
    run = load(linear, torch.ones(2, 4))
    x = torch.randn(2, 4)
    first = run(x)
    n_slots = run.last_execution.slots_changed
    n_weights = sum(1 for _ in run.plan.of_kind(SlotKind.WEIGHT))
    assert n_weights == 2
    assert n_slots >= n_weights + 2
    run(x, out=first)
    run(x, out=first)
    assert run.last_execution.slots_changed == 0


def test_two_tickets_in_flight(backend, load):
    run = load(chain, torch.ones(8))
    inputs = [torch.randn(8) for _ in range(20)]
    tickets = [run.submit(x) for x in inputs]
    for ticket, x in zip(tickets, inputs, strict=True):
        assert same(backend, ticket.result(), chain(x))
        assert ticket.done()
    assert tickets[0].result() is tickets[0].result()


def test_tickets_run_in_order(backend, load):
    def accumulate(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(2).add_(x)
        return state.clone()

    run = load(accumulate, torch.ones(1), torch.zeros(1))
    state = torch.zeros(1)
    steps = [torch.tensor([float(step)]) for step in range(8)]
    results = [ticket.result() for ticket in [run.submit(step, state) for step in steps]]
    if backend.capabilities.computes:
        expected, values = 0.0, []
        for step in range(8):
            expected = expected * 2 + step
            values.append(expected)
        assert [result.item() for result in results] == values


def test_call_comes_after_submitted_work(backend, load):
    def accumulate(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(2).add_(x)
        return state.clone()

    run = load(accumulate, torch.ones(1), torch.zeros(1))
    state = torch.zeros(1)
    run.submit(torch.ones(1), state)
    result = run(torch.ones(1), state)
    if backend.capabilities.computes:
        assert result.item() == 3.0


def test_executables_run_side_by_side(backend, load):
    runs = [load(chain, torch.ones(8)) for _ in range(4)]
    x = torch.randn(8)
    tickets = [run.submit(x) for run in runs for _ in range(5)]
    assert all(same(backend, ticket.result(), chain(x)) for ticket in tickets)


def test_two_executables_share_one_feature_map(backend, load):
    runs = [load(chain, torch.ones(512)) for _ in range(2)]
    arena = torch.empty(max(run.feature_map_bytes for run in runs), dtype=torch.uint8)
    inputs = [torch.randn(512) for _ in range(50)]
    tickets = [(x, run.submit(x, feature_map=arena)) for x in inputs for run in runs]
    for x, ticket in tickets:
        assert same(backend, ticket.result(), chain(x))


@pytest.mark.slow
def test_many_threads_call_one_executable(backend, load):
    run = load(chain, torch.ones(8))
    failures: list[object] = []
    device = backend.records()  # a default device holds for this thread alone

    def call(seed: int) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        for _ in range(200):
            x = torch.randn(8, generator=generator, device=device)
            got = run(x)
            if not same(backend, got, chain(x)):
                failures.append((x, got))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert run.last_execution.n_executions == 8 * 200


def test_too_small_feature_map(backend, load):
    run = load(chain, torch.ones(8))
    small = torch.empty(run.feature_map_bytes - 1, dtype=torch.uint8)
    with pytest.raises(offload.BindingError, match="feature_map: expected at least"):
        run(torch.ones(8), feature_map=small)
    assert run.last_execution.n_executions == 0


def test_use_after_close(backend, load):
    run = load(chain, torch.ones(8))
    run(torch.ones(8))
    run.close()
    run.close()
    assert run.closed
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(torch.ones(8))
    with pytest.raises(offload.ExecutionError, match="closed"):
        run.submit(torch.ones(8))


def test_close_waits_for_what_is_in_flight(backend, load):
    run = load(chain, torch.ones(8))
    x = torch.randn(8)
    tickets = [run.submit(x) for _ in range(50)]
    run.close()
    assert all(ticket.done() for ticket in tickets)
    assert all(same(backend, ticket.result(), chain(x)) for ticket in tickets)


def test_dropped_with_work_in_flight(backend, load):
    run = load(chain, torch.ones(8))
    x = torch.randn(8)
    tickets = [run.submit(x) for _ in range(50)]
    alive = weakref.ref(run)
    del run
    gc.collect()
    assert alive() is None
    assert all(same(backend, ticket.result(), chain(x)) for ticket in tickets)


def test_dropped_tickets_do_not_stop_the_work(backend, load):
    def count(state: torch.Tensor) -> torch.Tensor:
        return state.add_(1)

    run = load(count, torch.zeros(1))
    state = torch.zeros(1)
    for _ in range(100):
        run.submit(state)
    run.close()
    if backend.capabilities.computes:
        assert state.item() == 100.0


def test_inputs_stay_alive_until_the_ticket_is_done(backend, load):
    run = load(chain, torch.ones(4096))
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    expected, tickets = [], []
    for _ in range(50):
        x = torch.randn(4096, generator=generator)
        expected.append(chain(x))
        tickets.append(run.submit(x))
        del x
    for ticket, wanted in zip(tickets, expected, strict=True):
        assert same(backend, ticket.result(), wanted)


def test_failing_launch_surfaces_at_the_wait(backend, load):
    run = load(lambda table, index: table[index], torch.ones(4), torch.tensor([1, 2]))
    if not backend.capabilities.computes:
        pytest.skip("a device that computes nothing has no failing launch")
    table = torch.arange(4.0)
    queued = "LAUNCH_FAILED|AICORE_EXCEPTION"
    named = r"test_executions\.py:\d+: aten::index.*out of bounds"
    words = queued if backend.capabilities.queues_work else named
    ticket = run.submit(table, torch.tensor([1, 9]))
    for _ in range(2):
        with pytest.raises(offload.ExecutionError, match=words):
            ticket.result()
    if backend.capabilities.queues_work:
        return
    with pytest.raises(offload.ExecutionError, match=named):
        run(table, torch.tensor([1, 9]))
    assert torch.equal(run(table, torch.tensor([3, 0])), torch.tensor([3.0, 0.0]))


@pytest.mark.slow
def test_interpreter_exit_with_work_in_flight(backend):
    done = run_script(preamble_on(backend) + "tickets = [run.submit(x) for _ in range(200)]\n")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_interpreter_exit_from_a_thread_that_never_ends(backend):
    done = run_script(
        preamble_on(backend)
        + textwrap.dedent(
            """
            def forever():
                while True:
                    run.submit(x)
            try:
                threading.Thread(target=forever, daemon=True).start()
            except RuntimeError:
                pass
            """
        )
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_interpreter_exit_from_threads_in_calls(backend):
    """Each requests the GIL at the end of its call, and never gets it.

    They make no tensors: torch ends the process when such a thread drops a tensor.
    """
    done = run_script(
        preamble_on(backend)
        + textwrap.dedent(
            """
            begun, out = [threading.Event() for _ in range(3)], torch.empty_like(x)
            def forever(one):
                while True:
                    run(x, out=out)
                    one.set()
            for one in begun:
                threading.Thread(target=forever, args=(one,), daemon=True).start()
            for one in begun:
                one.wait()
            """
        )
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_fork_with_work_in_flight(backend):
    done = run_script(
        preamble_on(backend)
        + textwrap.dedent(
            """
            tickets = [run.submit(x) for _ in range(200)]
            child = os.fork()
            if child == 0:
                ok = run(x).shape == x.shape and run.submit(x).result().shape == x.shape
                os._exit(0 if ok else 1)
            assert os.waitpid(child, 0)[1] == 0
            for ticket in tickets:
                ticket.wait()
            """
        )
    )
    assert (done.returncode, done.stderr) == (0, "")
