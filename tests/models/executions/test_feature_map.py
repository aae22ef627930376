"""A feature map given by the caller: used in place at each execution, or refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from checks import binding_refused, calls_of

import offload


def eager_chain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sin().exp()


@pytest.fixture
def chain() -> Iterator[offload.Executable]:
    """One result, and activations in the feature map."""
    with offload.capture(eager_chain) as captured:
        captured(torch.randn(64))
    with captured.load() as executable:
        yield executable


def arena(run: offload.Executable, extra: int = 0) -> torch.Tensor:
    return torch.empty(run.feature_map_bytes + extra, dtype=torch.uint8)


def test_new_addresses_every_time(model, run):
    """Inputs, outputs and feature map have new addresses at each execution and are used there."""
    for _ in range(4):
        args, kwargs = model.arguments()
        memory = arena(run)
        memory.fill_(255)
        out = (torch.full((2, 4), 9.0), torch.full((2,), 9.0), None)
        got = run(*args, **kwargs, out=out, feature_map=memory)
        assert got[0] is out[0]
        assert got[1] is out[1]
        assert run.last_execution.bytes_copied == 0
        with torch.no_grad():
            hidden = torch.relu(model.first(args[0]))
            torch.testing.assert_close(out[0], model.second(hidden), rtol=1e-6, atol=1e-6)
        assert run.feature_map_bytes == 0 or not torch.equal(memory, torch.full_like(memory, 255))
        assert got[2].data_ptr() == args[1].data_ptr() + 4


def test_old_memory_is_left_alone(chain):
    """Memory of an earlier execution stays unchanged in a later one."""
    x, out, memory = torch.randn(64), torch.empty(64), arena(chain)
    chain(x, out=out, feature_map=memory)
    poison = [torch.full_like(one, 77) for one in (x, out, memory)]
    for one, value in zip((x, out, memory), poison, strict=True):
        one.copy_(value)
    y = torch.randn(64)
    assert torch.equal(chain(y, out=torch.empty(64), feature_map=arena(chain)), eager_chain(y))
    assert torch.equal(chain(y), eager_chain(y))
    for one, value in zip((x, out, memory), poison, strict=True):
        assert torch.equal(one, value)


def test_feature_map_in_the_middle_of_memory(chain):
    """Only the bytes that the executable requires are written."""
    memory = torch.full((chain.feature_map_bytes + 256,), 7, dtype=torch.uint8)
    inner = memory[128 : 128 + chain.feature_map_bytes]
    x = torch.randn(64)
    assert torch.equal(chain(x, feature_map=inner), eager_chain(x))
    assert bool((memory[:128] == 7).all())
    assert bool((memory[128 + chain.feature_map_bytes :] == 7).all())


def test_two_executables_share_a_feature_map(chain, two_results):
    size = max(chain.feature_map_bytes, two_results.feature_map_bytes)
    memory = torch.empty(size, dtype=torch.uint8)
    x, a, b = torch.randn(64), torch.randn(4), torch.randn(4)
    tickets = []
    for _ in range(20):
        tickets.append((chain.submit(x, feature_map=memory), eager_chain(x)))
        tickets.append((two_results.submit(a, b, feature_map=memory), (a + b, (a * b).sin())))
    for ticket, expected in tickets:
        torch.testing.assert_close(ticket.result(), expected, rtol=0, atol=0)


def test_feature_map_for_a_program_without_activations():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.ones(4))
    run = captured.load()
    assert run.feature_map_bytes == 0
    x = torch.randn(4)
    assert torch.equal(run(x, feature_map=torch.empty(0, dtype=torch.uint8)), x * 2)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda n: torch.empty(n - 1, dtype=torch.uint8), ["bytes", "feature_map_bytes"]),
        (lambda n: torch.empty(0, dtype=torch.uint8), ["bytes"]),
        (lambda n: torch.empty(n + 64, dtype=torch.uint8)[1:], ["align"]),
        (lambda n: torch.empty(n, dtype=torch.int8), ["uint8"]),
        (lambda n: torch.empty(n, dtype=torch.float32), ["uint8"]),
        (lambda n: torch.empty(2 * n, dtype=torch.uint8)[::2], ["contiguous"]),
        (lambda n: torch.empty(n, dtype=torch.uint8, device="meta"), ["meta"]),
        (lambda n: torch.empty(n, dtype=torch.uint8).to_sparse(), []),
    ],
    ids=["small", "empty", "misaligned", "int8", "float", "strided", "meta", "sparse"],
)
def test_unusable_feature_map(chain, make, parts):
    assert chain.feature_map_bytes
    x = torch.randn(64)
    for call in calls_of(chain):
        with binding_refused(chain, [x], "feature_map", *parts):
            call(x, feature_map=make(chain.feature_map_bytes))


def test_feature_map_of_another_type(chain):
    with pytest.raises((offload.BindingError, TypeError)):
        chain(torch.randn(64), feature_map=bytearray(chain.feature_map_bytes))


def test_feature_map_that_overlaps(chain):
    memory = arena(chain, extra=512)
    as_floats = memory[: 64 * 4].view(torch.float32)
    as_floats.fill_(0.5)
    x = torch.randn(64)
    with binding_refused(chain, [memory], "feature_map", "args[0]", "overlap"):
        chain(as_floats, feature_map=memory)
    with binding_refused(chain, [memory, x], "feature_map", "out", "overlap"):
        chain(x, out=as_floats, feature_map=memory)


def test_feature_map_that_overlaps_a_weight():
    memory = torch.zeros(4096, dtype=torch.uint8)
    weight = memory[256 : 256 + 64].view(torch.float32)
    weight.fill_(3.0)
    with offload.capture(lambda x: ((x * 2).exp() + 1) * weight) as captured:
        captured(torch.ones(16))
    run = captured.load()
    for start in (0, 256):
        with binding_refused(run, [memory], "feature_map", "overlap"):
            run(torch.ones(16), feature_map=memory[start:])
