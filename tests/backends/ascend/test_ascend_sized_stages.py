"""Own kernels at sizes that vary: the host's stages on several cores, their threads and end."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from binary_kernels import (
    tile,
)
from sized_loading import N, inputs, loader, model, with_tile

import offload


@pytest.fixture
def load(ascend, monkeypatch):
    return loader(ascend, monkeypatch)


@pytest.mark.parametrize("host_cores", [1, 3])
def test_several_threads_call(host_cores, load):
    results = []
    with load(model, *inputs(6), host_cores=host_cores, options={"instances": 4000}) as run:

        def call(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for _ in range(12):
                n = int(torch.randint(1, 60, (1,), generator=generator))
                given = inputs(n)
                results.append(torch.equal(run(*given), model(*given)))

        threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [True] * 48


class Held:
    """Tiling data that wait until a test releases them."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def __call__(self, launch) -> bytes:
        self.begun.set()
        assert self.go.wait(60)
        return tile(launch)


@pytest.mark.parametrize("host_cores", [1, 3])
def test_close_waits_for_stages_under_way(host_cores, load):
    held = Held()
    run = load(model, *inputs(6), kernels=with_tile(held), host_cores=host_cores)
    held.begun.clear()
    held.go.clear()
    given = inputs(9)
    ticket = run.submit(*given)
    assert held.begun.wait(60)
    closing = threading.Thread(target=run.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive()
    held.go.set()
    closing.join()
    assert torch.equal(ticket.result(), model(*given))
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(*given)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("host_cores", [1, 3])
def test_a_fork_waits_for_stages_under_way(host_cores, load):
    """The runtime does not work in the child, which gets an error; the parent continues."""
    held = Held()
    with load(model, *inputs(6), kernels=with_tile(held), host_cores=host_cores) as run:
        held.begun.clear()
        held.go.clear()
        given = inputs(9)
        ticket = run.submit(*given)
        assert held.begun.wait(60)
        threading.Timer(0.05, held.go.set).start()
        child = os.fork()
        if child == 0:
            try:
                run(*inputs(4))
            except offload.OffloadError:
                os._exit(0)
            except BaseException:
                os._exit(2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(ticket.result(), model(*given))
        for n in (5, 12):
            given = inputs(n)
            assert torch.equal(run(*given), model(*given))


def test_what_is_dropped_leaves_nothing(ascend, load):
    n_threads = threading.active_count()
    before = ascend.live_bytes
    for _ in range(3):
        with load(model, *inputs(6), host_cores=3) as run:
            run(*inputs(9))
        del run
    assert ascend.live_bytes == before
    assert threading.active_count() == n_threads


def test_the_cpu_has_no_stages(monkeypatch):
    """An option is refused; the variable, which applies to all programs of the process, is not."""
    captured = offload.capture(model, *inputs(6), dynamic_shapes=({0: N}, {0: N}))
    for host_cores in (2, "auto"):
        with pytest.raises(offload.BindingError, match="operators infer shapes and tile inside"):
            captured.load(sizes=offload.Sizes(), host_cores=host_cores)
    monkeypatch.setenv("MAX_RUNTIME_CORE_NUMBER", "3")
    with captured.load(sizes=offload.Sizes()) as run:
        assert run.host_cores == 1


def test_the_variable_of_the_graph_engine(load, monkeypatch):
    monkeypatch.setenv("MAX_RUNTIME_CORE_NUMBER", "3")
    with load(model, *inputs(6)) as run:
        assert run.host_cores == 3
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))
        assert "on 3 cores of the host: infer shapes and tile (on 1)" in run.explain()
    with load(model, *inputs(6), host_cores=1) as run:
        assert run.host_cores == 1
    monkeypatch.setenv("MAX_RUNTIME_CORE_NUMBER", "many")
    with pytest.raises(offload.BindingError, match="MAX_RUNTIME_CORE_NUMBER='many' in the env"):
        load(model, *inputs(6))


def test_auto_keeps_what_was_quicker(load):
    with load(model, *inputs(6), host_cores="auto") as run:
        assert run.host_cores in (1, 3)
        assert f"stages on {run.host_cores} core" in run.explain()
        assert "on 1 core, and" in run.explain()
        given = inputs(9)
        assert torch.equal(run(*given), model(*given))
