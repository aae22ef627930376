"""Host reads that a model avoids where `torch.compiler.is_compiling()` returns True."""

from __future__ import annotations

import gc
import queue
import weakref

import pytest
import torch
from checks import normal
from torch import nn

import offload


class Asks(nn.Module):
    """Reads a tensor on the host unless `is_compiling()` is true."""

    def __init__(self, compiling=lambda x: x * 2):
        super().__init__()
        self.compiling = (compiling,)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, into=None):
        self.count += 1
        if into is not None:
            into += x
        if torch.compiler.is_compiling():
            return self.compiling[0](x)
        return x * 2 if (x == x).all() else x


@pytest.mark.parametrize("host_reads", ["avoid", "guard"])
def test_is_compiling_is_false_in_a_first_recording(host_reads, monkeypatch):
    def function(x):
        return x * 1, torch.compiler.is_compiling()

    with offload.capture(function, host_reads=host_reads) as captured:
        assert not captured(normal(2))[1]
    # As seen from another thread that compiles at the same time.
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    assert not offload.capture(function, normal(2)).recorded_result[1]


@pytest.mark.parametrize("in_block", [False, True])
def test_a_read_that_is_compiling_avoids(in_block):
    model, x, into = Asks(), normal(3), torch.zeros(3)
    if in_block:
        with offload.capture(model) as captured:
            y = model(x, into)
    else:
        captured = offload.capture(model, x, into)
        y = captured.recorded_result
    assert torch.equal(y, x * 2)
    assert model.count.item() == 1
    assert torch.equal(into, x)
    (note,) = captured.program.host_reads
    assert "torch.compiler.is_compiling() returning True" in note
    assert "same bits" in note
    assert "test_compiling_models.py:" in note
    other = normal(3)
    assert torch.equal(captured(other, into), other * 2)
    assert model.count.item() == 2
    assert note in captured.explain()


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [(torch.float32, 1 + 5e-5), (torch.bfloat16, 1.03), (torch.complex64, 1 + 5e-5)],
)
def test_a_compiling_model_that_is_close(dtype, factor):
    x = torch.tensor([1.0, 3.0 if dtype.is_complex else torch.inf, 2.0]).to(dtype)
    captured = offload.capture(Asks(lambda x: x * 2 * factor), x)
    assert "but for the rounding of other kernels" in captured.program.host_reads[0]


@pytest.mark.parametrize(
    ("x", "compiling"),
    [
        (torch.ones(3), lambda x: x * 2 * (1 + 2e-4)),
        (torch.tensor([1.0, torch.inf]), lambda x: -x * 2),
        (torch.tensor([1.0, 2.0]), lambda x: x * 2 + torch.tensor([0.0, torch.nan])),
        (torch.tensor([1, 2]), lambda x: x * 2 + torch.tensor([0, 1])),
    ],
)
def test_a_compiling_model_that_is_not_close(x, compiling):
    with pytest.raises(offload.CaptureError, match="another result 0"):
        offload.capture(Asks(compiling), x)


def test_results_of_a_compiling_model_are_the_plain_calls():
    """The caller gets eager's result, also where kernels differ."""
    x = torch.ones(3)
    captured = offload.capture(Asks(lambda x: x * 2 + 1e-6), x)
    assert torch.equal(captured.recorded_result, x * 2)


@pytest.mark.parametrize("through", ["model", "handle"])
@pytest.mark.parametrize(
    ("compiling", "said"),
    [
        (lambda x: x * 3, "another result 0, which differs by up to 1"),
        (lambda x: (x * 2, x), "another result"),
        (lambda x: x.double() * 2, "another result 0"),
    ],
)
def test_a_compiling_model_that_gives_something_else(compiling, said, through):
    model, x, into = Asks(compiling), torch.ones(3), torch.zeros(3)
    with (
        pytest.raises(offload.CaptureError, match=said) as raised,
        offload.capture(model) as handle,
    ):
        (model if through == "model" else handle)(x, into)
    assert "test_compiling_models.py:" in str(raised.value)
    assert model.count.item() == 1  # the effect of one eager call
    assert torch.equal(into, x)
    notes = getattr(raised.value, "__notes__", [])
    assert any("torch.empty" in note for note in notes) == ("differs by" in said)


def test_a_compiling_model_that_changes_something_else():
    class Counts(Asks):
        def forward(self, x, into=None):
            if torch.compiler.is_compiling():
                self.count += 1
            return super().forward(x)

    model = Counts()
    with pytest.raises(offload.CaptureError, match="count"):
        offload.capture(model, torch.ones(2))
    assert model.count.item() == 1


def test_a_compiling_model_that_raises_or_reads():
    def fail(x):
        raise ValueError("not like this")

    with pytest.raises(offload.CaptureError, match="reads a tensor's value") as raised:
        offload.capture(Asks(fail), torch.ones(2))
    assert "ValueError: not like this" in raised.value.__notes__[0]
    with pytest.raises(offload.CaptureError, match="reads a tensor's value") as raised:
        offload.capture(Asks(lambda x: x * x.sum().item()), torch.ones(2))
    assert "CaptureError" in raised.value.__notes__[0]


@pytest.mark.parametrize("compiling", ["other", "fails"])
def test_a_refused_compiling_model_keeps_nothing(compiling):
    held = queue.SimpleQueue()

    def other(x):
        held.put(weakref.ref(y := x * 3))
        if compiling == "fails":
            raise ValueError
        return y

    gc.collect()
    gc.disable()
    try:
        with pytest.raises(offload.CaptureError):
            offload.capture(Asks(other), torch.ones(2))
        assert held.get()() is None
    finally:
        gc.enable()


def test_a_read_is_refused_at_once_where_nobody_asks():
    calls = []

    def function(x):
        calls.append(None)
        total = x.sum().item()
        calls.append(None)
        return x * total

    with pytest.raises(offload.CaptureError, match="reads a tensor's value"):
        offload.capture(function, normal(2))
    assert len(calls) == 1


def asks_and_draws(x):
    """Draws in place, into a result, as a function, and for a separate batch."""
    noise = torch.rand(3) + torch.empty(3).uniform_(1, 2)
    noise = nn.functional.dropout(noise, 0.5) + torch.bernoulli(torch.full((3,), 0.5))
    noise += torch.multinomial(torch.ones(8), 3) + torch.randperm(3)
    noise += torch.normal(0.0, 1.0, (3,), out=torch.empty(3))
    if not torch.compiler.is_compiling() and x.sum() > 1e9:
        return x
    return x + noise


def test_random_numbers_of_a_compiling_model():
    torch.manual_seed(4)
    captured = offload.capture(asks_and_draws, torch.zeros(3))
    replayed, after = captured(torch.ones(3)), torch.rand(3)
    assert captured.program.host_reads
    torch.manual_seed(4)
    assert torch.equal(captured.recorded_result, asks_and_draws(torch.zeros(3)))
    assert torch.equal(replayed, asks_and_draws(torch.ones(3)))
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize(
    "compiling",
    [
        lambda x: x * 2 + 0 * torch.rand(2),
        lambda x: x * 2 + 0 * torch.randn(3),
        lambda x: x * 2 + 0 * (torch.rand(3) + torch.rand(3)),
        lambda x: x * 2,
    ],
)
def test_a_compiling_model_that_draws_other_numbers(compiling):
    def function(x):
        if torch.compiler.is_compiling():
            return compiling(x)
        x = x * 2 + 0 * torch.rand(3)
        return x if (x == x).all() else -x

    torch.manual_seed(4)
    with pytest.raises(offload.CaptureError, match="reads a tensor's value"):
        offload.capture(function, torch.ones(3))
    after = torch.rand(3)
    torch.manual_seed(4)
    torch.rand(3)
    assert torch.equal(after, torch.rand(3))
