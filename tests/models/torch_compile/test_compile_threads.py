"""`torch.compile(model, backend="offload")` called from several threads."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checks import normal
from compiling import compiled, n_captures, n_executions
from torch import nn
from torch._dynamo.utils import counters

from offload.integrations import torch_compile

pytestmark = pytest.mark.usefixtures("compiler_reset")


def test_first_calls_from_several_threads(graphs):
    run = compiled(lambda x: (x + 1).exp())
    inputs = [normal(3) for _ in range(4)]
    results: dict[int, torch.Tensor] = {}
    begin = threading.Barrier(4)

    def call(turn: int) -> None:
        begin.wait()
        with torch.no_grad():
            for _ in range(3):
                results[turn] = run(inputs[turn])

    threads = [threading.Thread(target=call, args=(turn,)) for turn in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for turn, x in enumerate(inputs):
        assert torch.equal(results[turn], (x + 1).exp())
    assert sum(n_captures(graphs)) + n_executions(graphs) == 12
    assert not torch.compiler.is_compiling()


@pytest.mark.slow
@pytest.mark.parametrize("may_vary", [False, True])
def test_a_pool_of_threads_while_new_lengths_arrive(graphs, monkeypatch, may_vary):
    """Several threads meet each length at once; beyond the limit they run eagerly."""
    if not may_vary:
        monkeypatch.setattr(torch_compile, "dynamic_sizes", lambda graph_module, inputs: None)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)).eval()
    run = compiled(model, dynamic=True, options={"capture_limit": 12})
    captures, beyond = counters["offload"]["captures"], counters["offload"]["calls_beyond_limit"]

    def request(number: int) -> bool:
        length = 3 + number // 6 % 20
        tokens = torch.arange(2 * length).reshape(2, length) * (number + 1) % 16
        with torch.no_grad():
            return torch.equal(run(tokens), model(tokens))

    assert request(0)  # otherwise torch compiles once for each thread that arrives earlier
    with warnings.catch_warnings(record=True) as warned, ThreadPoolExecutor(6) as pool:
        warnings.simplefilter("always")
        assert all(pool.map(request, range(1, 600)))
    n_captured = 2 if may_vary else 12
    n_warned = len([one for one in warned if "its limit" in str(one.message)])
    assert n_warned == (0 if may_vary else 1)
    assert sum(n_captures(graphs)) == n_captured == counters["offload"]["captures"] - captures
    n_beyond = counters["offload"]["calls_beyond_limit"] - beyond
    assert n_executions(graphs) + n_beyond == 600 - n_captured
    assert (n_beyond == 0) is may_vary


def test_a_recording_holds_up_no_execution(graphs):
    recording, may_end = threading.Event(), threading.Event()

    @torch.library.custom_op("offload_tests::held_up", mutates_args=())
    def held_up(x: torch.Tensor) -> torch.Tensor:
        recording.set()
        assert may_end.wait(60)
        return x.clone()

    @held_up.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    known, slow = compiled(lambda x: x + 1), compiled(lambda x: held_up(x) * 2)
    x = normal(3)
    with torch.no_grad():
        known(x)

        def record() -> torch.Tensor:
            with torch.no_grad():
                return slow(x)

        with ThreadPoolExecutor(1) as pool:
            slowly = pool.submit(record)
            try:
                assert recording.wait(60)
                for _ in range(3):
                    assert torch.equal(known(x), x + 1)
                assert not slowly.done()
            finally:
                may_end.set()
            assert torch.equal(slowly.result(), x * 2)
    assert n_executions(graphs) == 3
