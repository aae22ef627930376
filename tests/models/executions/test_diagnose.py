"""Diagnosis of real models on the CPU: the report's structure and counts, never its times."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import DiagnosisError
from offload.observe.diagnosis import (
    Confidence,
    Diagnosis,
    Effort,
    MeasuredGain,
    UnknownGain,
    Verdict,
    diagnose_call,
    diagnose_saved,
)
from offload.observe.diagnosis.operators import device_ns_by_launch, operator_costs
from offload.observe.diagnosis.stopwatch import SteadyClock
from offload.timeline import ExecutionTimeline, Span, SpanKind

SHORT = Effort(turns=4, sample_ns=1, budget_ns=0, least_turns=3)


class ManyTiny(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = torch.relu(torch.sigmoid(x))
        return x


def diagnose(model: Any, *args: Any, **kwargs: Any) -> Diagnosis:
    return diagnose_call(model, args, kwargs, effort=SHORT)


def test_many_tiny_operators() -> None:
    found = diagnose(ManyTiny(), torch.randn(16))
    assert (found.subject, found.device, found.n_launches) == ("ManyTiny", "cpu", 40)
    assert [one.test for one in found.findings] == ["replay"]
    assert [one.test for one in found.not_applied] == ["enqueue"]
    assert "the device has no queue" in found.not_applied[0].reason
    assert isinstance(found.gain, MeasuredGain)
    assert found.trace is None
    for name in ("eager", "replay"):
        timing = found.timing(name)
        assert timing is not None
        assert len(timing.samples_ns) == 3
    assert found.operators is not None
    counts = {one.signature: one.n_launches for one in found.operators.operators}
    assert counts == {"aten::relu(float32[16])": 20, "aten::sigmoid(float32[16])": 20}
    assert {one.called_as for one in found.operators.operators} == {"torch.relu", "torch.sigmoid"}


def test_one_large_matmul() -> None:
    found = diagnose(torch.matmul, torch.randn(256, 256), torch.randn(256, 256))
    assert (found.subject, found.n_launches) == ("matmul", 1)
    assert found.operators is not None
    (cost,) = found.operators.operators
    assert cost.signature == "aten::mm(float32[256, 256], float32[256, 256])"
    assert cost.called_as == "torch.mm"


def test_without_options_of_ours() -> None:
    """All keywords belong to the model."""
    found = offload.diagnose(torch.add, torch.ones(2), torch.ones(2), alpha=2)
    assert found.n_launches == 1
    assert found.operators is not None
    assert found.operators.operators[0].signature == "aten::add.Tensor(float32[2], float32[2], 2)"


def make_model() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Linear(3, 3), (torch.ones(2, 3),)


@pytest.mark.parametrize(
    ("model", "inputs", "got"),
    [
        ("model.py:make", (), "got a str; the command `offload diagnose` takes files, and names"),
        (3.5, (), "got a float"),
        (None, (), "got a NoneType"),
        (torch.ones(3), (), "got a Tensor"),
        (lambda: 1, (), "a call of <lambda> with these arguments launches nothing that depends on"),
        (lambda x: x, (torch.ones(3),), "a call of <lambda> with these arguments launches"),
        (len, ([1],), "a call of len with these arguments launches nothing"),
        (make_model, (), "got the function make_model, which makes a model: give the model"),
        (nn.Linear, (3, 3), "got the class Linear itself: make an instance first"),
        (nn.Linear(3, 3), (), "cannot be called with these arguments: missing a required argum"),
        (lambda: 1, (torch.ones(3),), "cannot be called with these arguments: too many"),
        (offload.Captured(), (), "got a Captured, which is already captured"),
    ],
)
def test_what_is_no_model_is_refused(model: Any, inputs: tuple[Any, ...], got: str) -> None:
    expected = (
        "expected a module or a function on tensors, and its inputs: offload.diagnose(model, x); "
    )
    with pytest.raises(DiagnosisError) as error:
        offload.diagnose(model, *inputs, progress=False)
    assert str(error.value).startswith(expected)
    assert got in str(error.value)


def test_a_model_without_arguments_is_diagnosed() -> None:
    weight = torch.randn(3, 3)
    diagnosis = offload.diagnose(lambda: weight.relu().exp(), progress=False)
    assert diagnosis.n_launches == 2


def test_hooks_that_give_a_model_its_arguments_are_asked() -> None:
    model = nn.Linear(3, 3)
    model.register_forward_pre_hook(lambda module, args: (torch.ones(2, 3),))
    with torch.no_grad():
        assert offload.diagnose(model, progress=False).subject == "Linear"


def test_a_refused_capture() -> None:
    found = diagnose(lambda x: x * float(x.sum()), torch.ones(2))
    assert (found.verdict, found.confidence) == (Verdict.UNDECIDED, Confidence.NONE)
    assert [one.test for one in found.not_applied] == ["enqueue", "replay"]
    assert isinstance(found.gain, UnknownGain)
    assert "capture is refused" in found.gain.reason
    assert found.operators is None
    assert found.n_launches is None
    assert [one.name for one in found.timings] == ["eager"]


class Stateful(nn.Module):
    """Writes a buffer and an input, draws random numbers, gathers rows by an index input."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 8)
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, index: torch.Tensor, history: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        rows = self.table((index + self.steps).remainder(4))
        history.add_(rows.detach().sum(0))
        return nn.functional.dropout(rows, 0.5, training=True)


@pytest.mark.parametrize("grad", [True, False])
def test_buffers_and_inputs_are_put_back_and_draws_are_told(grad: bool) -> None:
    model, index, history = Stateful(), torch.tensor([0, 3]), torch.randn(8)
    before = history.clone()
    with torch.set_grad_enabled(grad):
        found = diagnose(model, index, history=history)
    assert model.steps.item() == 0
    assert torch.equal(history, before)
    assert sum("generator has advanced" in note for note in found.notes) == 1
    assert found.operators is not None, found.notes
    assert len(found.operators.operators) == found.operators.n_signatures
    assert any("autograd" in note for note in found.notes) == grad


def test_operators_run_on_the_values_of_the_program() -> None:
    """A factorisation of a matrix that is not positive definite would fail."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x @ x.T + torch.eye(4))

    found = diagnose(function, torch.randn(4, 4))
    assert found.operators is not None, found.notes
    assert any("cholesky" in one.signature for one in found.operators.operators)


def test_a_saved_program(tmp_path: Any) -> None:
    with offload.capture(ManyTiny()) as captured:
        captured(torch.randn(16))
    captured.save(tmp_path / "m.offload")
    opened = offload.open(tmp_path / "m.offload")
    found = diagnose_saved(opened, (torch.randn(16),), {}, effort=SHORT)
    assert (found.verdict, found.n_launches) == (Verdict.UNDECIDED, 40)
    assert [one.name for one in found.timings] == ["replay"]
    assert "not the model to call eagerly" in found.reasons[0]
    assert found.operators is not None
    assert sum(one.n_launches for one in found.operators.operators) == 40


def test_a_saved_program_with_wrong_inputs(tmp_path: Any) -> None:
    with offload.capture(ManyTiny()) as captured:
        captured(torch.randn(16))
    with pytest.raises(offload.BindingError):
        diagnose_saved(captured, (torch.randn(17),), {}, effort=SHORT)


# ---- with timelines ------------------------------------------------------------------------------


def test_host_time_is_eager_less_device() -> None:
    with offload.capture(ManyTiny()) as captured:
        captured(torch.randn(16))
    spans = [
        Span(SpanKind.LAUNCH, "x", "cpu device", 0, 100 if index % 2 else 300, index)
        for index in range(40)
    ]
    executions = [ExecutionTimeline(1, "offload", tuple(spans), (), "none", 0, 0, 0)] * 3
    costs = operator_costs(
        captured.bound, [torch.randn(16)], SteadyClock(), device_ns_by_launch(executions)
    )
    by_name = {one.called_as: one for one in costs.operators}
    assert by_name["torch.sigmoid"].device_ns == 300
    assert by_name["torch.relu"].device_ns == 100
    for one in costs.operators:
        assert one.device_ns is not None
        assert one.host_ns == one.eager_ns - one.device_ns
        assert one.total_ns == 20 * one.host_ns
    totals = [one.total_ns for one in costs.operators]
    assert totals == sorted(totals, reverse=True)


def test_a_timeline_gives_the_device_its_part() -> None:
    found = diagnose(ManyTiny(), torch.randn(16))
    assert found.operators is not None
    assert all(one.device_ns is not None for one in found.operators.operators)
    assert any("less its launch in a replay" in note for note in found.notes)
