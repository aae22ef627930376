"""Verdicts on a virtual clock: host-bound and device-bound cases are always distinguished."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import offload
from offload.observe.diagnosis import (
    Confidence,
    Diagnosis,
    Effort,
    MeasuredGain,
    NamedTiming,
    NotApplied,
    Timing,
    UnknownGain,
    Verdict,
    diagnose_call,
)
from offload.observe.diagnosis.contenders import Contenders, Measurement, measure
from offload.observe.diagnosis.evidence import (
    ENQUEUE_THRESHOLDS,
    SHARE_THRESHOLDS,
    Finding,
    conclude,
    enqueue_test,
    replay_test,
)
from offload.observe.diagnosis.stopwatch import time_enqueue, time_in_turns

SHORT = Effort(turns=6, sample_ns=1000, budget_ns=10**12, least_turns=3)


class VirtualClock:
    def __init__(self) -> None:
        self.ns = 0

    def now_ns(self) -> int:
        return self.ns


@dataclasses.dataclass
class VirtualModel:
    """`n_launches` kernels of `kernel_ns`, each issued by the host in `issue_ns`."""

    n_launches: int
    issue_ns: int
    kernel_ns: int
    has_queue: bool
    submit_ns: int = 500
    clock: VirtualClock = dataclasses.field(default_factory=VirtualClock)
    device_free_ns: int = 0

    def _run(self, kernel_ns: int) -> None:
        self.device_free_ns = max(self.clock.ns, self.device_free_ns) + kernel_ns
        if not self.has_queue:
            self.synchronize()

    def synchronize(self) -> None:
        self.clock.ns = max(self.clock.ns, self.device_free_ns)

    def eager(self) -> None:
        for _ in range(self.n_launches):
            self.clock.ns += self.issue_ns
            self._run(self.kernel_ns)

    def replay(self) -> None:
        self.clock.ns += self.submit_ns
        self._run(self.n_launches * self.kernel_ns)

    def measured(self, replay: Callable[[], None] | NotApplied | None = None) -> Measurement:
        synchronize = self.synchronize if self.has_queue else None
        contenders = Contenders(self.eager, replay or self.replay, synchronize)
        return measure(contenders, self.clock, SHORT)


# ---- always distinguished ------------------------------------------------------------------------

models = {
    "n_launches": st.integers(20, 200),
    "short_ns": st.integers(1000, 20_000),
    "ratio": st.integers(10, 100),
    "has_queue": st.booleans(),
}


@given(**models)
def test_a_host_bound_model(n_launches: int, short_ns: int, ratio: int, has_queue: bool) -> None:
    model = VirtualModel(n_launches, short_ns * ratio, short_ns, has_queue)
    found = measured_verdict(model)
    assert found is Verdict.HOST_BOUND


@given(**models)
def test_a_device_bound_model(n_launches: int, short_ns: int, ratio: int, has_queue: bool) -> None:
    model = VirtualModel(n_launches, short_ns, short_ns * ratio, has_queue)
    assert measured_verdict(model) is Verdict.DEVICE_BOUND


def measured_verdict(model: VirtualModel) -> Verdict:
    measured = model.measured()
    conclusion = conclude(measured.findings)
    assert conclusion.confidence is Confidence.HIGH, conclusion.reasons
    assert [one.test for one in measured.findings] == (
        ["enqueue", "replay"] if model.has_queue else ["replay"]
    )
    assert [one.test for one in measured.not_applied] == ([] if model.has_queue else ["enqueue"])
    return conclusion.verdict


def test_the_fractions_are_those_of_the_clock() -> None:
    model = VirtualModel(n_launches=100, issue_ns=10_000, kernel_ns=1000, has_queue=True)
    measured = model.measured()
    enqueue, replay = measured.findings
    assert enqueue.fraction == pytest.approx(1_000_000 / 1_001_000)
    assert replay.fraction == pytest.approx(1 - 100_500 / 1_001_000)
    assert isinstance(measured.gain, MeasuredGain)
    assert measured.gain.speedup == pytest.approx(1_001_000 / 100_500)
    names = [one.name for one in measured.timings]
    assert names == ["eager, enqueue", "eager, one call", "eager", "replay"]


def test_balanced() -> None:
    model = VirtualModel(n_launches=100, issue_ns=400, kernel_ns=1000, has_queue=False)
    (finding,) = model.measured().findings
    assert finding.fraction == pytest.approx(0.28, abs=0.01)
    assert finding.verdict is Verdict.BALANCED


def test_a_refused_capture_leaves_the_enqueue_test() -> None:
    model = VirtualModel(n_launches=100, issue_ns=10_000, kernel_ns=1000, has_queue=True)
    measured = model.measured(NotApplied("replay", "capture is refused: it reads a tensor"))
    assert [one.test for one in measured.findings] == ["enqueue"]
    assert [one.reason for one in measured.not_applied] == ["capture is refused: it reads a tensor"]
    assert measured.gain == UnknownGain("capture is refused: it reads a tensor")


def test_a_clock_that_stands_still() -> None:
    model = VirtualModel(0, 0, 0, has_queue=False, submit_ns=0)
    measured = model.measured()
    assert measured.gain == UnknownGain("a replay was too short for the clock to measure")
    assert measured.findings[0].fraction == 0


# ---- how it is measured --------------------------------------------------------------------------


def test_contenders_take_turns_and_samples_have_many_calls() -> None:
    clock, order = VirtualClock(), []

    def contender(name: str, ns: int) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            clock.ns += ns

        return call

    effort = Effort(turns=4, sample_ns=1000, budget_ns=10**9, least_turns=2)
    timed = time_in_turns({"a": contender("a", 250), "b": contender("b", 5000)}, clock, effort)
    assert timed["a"] == Timing((250,) * 4, calls=4)
    assert timed["b"] == Timing((5000,) * 4, calls=1)
    assert order[8:] == [*"aaaab"] * 4


def test_the_budget_ends_the_turns_but_never_the_least() -> None:
    clock = VirtualClock()

    def slow() -> None:
        clock.ns += 10**9

    effort = Effort(turns=40, sample_ns=1, budget_ns=7 * 10**9, least_turns=3)
    assert len(time_in_turns({"slow": slow}, clock, effort)["slow"].samples_ns) == 8
    short = dataclasses.replace(effort, budget_ns=0)
    assert len(time_in_turns({"slow": slow}, clock, short)["slow"].samples_ns) == 3
    enqueue, total = time_enqueue(slow, lambda: None, clock, short)
    assert len(enqueue.samples_ns) == len(total.samples_ns) == 3


# ---- combined findings ---------------------------------------------------------------------------


def timing(*samples_ns: float) -> Timing:
    return Timing(samples_ns, 1)


def finding(test: str, fraction: float, spread: float = 0.0) -> Finding:
    thresholds = ENQUEUE_THRESHOLDS if test == "enqueue" else SHARE_THRESHOLDS
    return Finding(test, "x", fraction, fraction - spread, fraction + spread, thresholds)


@pytest.mark.parametrize(
    ("fraction", "verdict"),
    [
        (0.9, Verdict.HOST_BOUND),
        (0.89, Verdict.BALANCED),
        (0.71, Verdict.BALANCED),
        (0.7, Verdict.DEVICE_BOUND),
    ],
)
def test_thresholds_are_included(fraction: float, verdict: Verdict) -> None:
    assert ENQUEUE_THRESHOLDS.verdict(fraction) is verdict


def test_ratios_are_taken_within_a_turn() -> None:
    """If the machine slows down in between, both slow down."""
    found = replay_test(timing(100, 200, 300), timing(20, 40, 60))
    assert (found.lower, found.fraction, found.upper) == pytest.approx((0.8, 0.8, 0.8))
    found = enqueue_test(timing(50, 100), timing(100, 200))
    assert (found.lower, found.upper) == (0.5, 0.5)


def test_a_slower_replay_is_device_bound() -> None:
    found = replay_test(timing(100, 100), timing(150, 150))
    assert found.fraction == -0.5
    assert found.verdict is Verdict.DEVICE_BOUND


@pytest.mark.parametrize(
    ("findings", "verdict", "confidence", "reason"),
    [
        ([], Verdict.UNDECIDED, Confidence.NONE, "no test could be applied"),
        ([finding("enqueue", 0.95)], Verdict.HOST_BOUND, Confidence.HIGH, ""),
        (
            [finding("enqueue", 0.95), finding("replay", 0.05)],
            Verdict.HOST_BOUND,
            Confidence.LOW,
            "the replay test says device-bound",
        ),
        (
            [finding("enqueue", 0.95), finding("replay", 0.3)],
            Verdict.HOST_BOUND,
            Confidence.MEDIUM,
            "the replay test says balanced",
        ),
        (
            [finding("replay", 0.52, spread=0.1)],
            Verdict.HOST_BOUND,
            Confidence.MEDIUM,
            "between 0.42 and 0.62",
        ),
    ],
)
def test_conclusions(
    findings: list[Finding], verdict: Verdict, confidence: Confidence, reason: str
) -> None:
    conclusion = conclude(findings)
    assert (conclusion.verdict, conclusion.confidence) == (verdict, confidence)
    assert reason in "; ".join(conclusion.reasons)
    assert bool(conclusion.reasons) == (confidence is not Confidence.HIGH)


# ---- the report ---------------------------------------------------------------------------------


def shown(diagnosis: Diagnosis) -> str:
    printed = io.StringIO()
    diagnosis.show(Console(width=200, file=printed))
    return printed.getvalue()


def test_the_order_of_the_report() -> None:
    found = VirtualModel(100, 10_000, 1000, has_queue=True).measured()
    conclusion = conclude(found.findings)
    text = shown(
        Diagnosis(
            subject="a\x1b[31m [bold]model",
            device="virtual",
            verdict=conclusion.verdict,
            confidence=conclusion.confidence,
            reasons=conclusion.reasons,
            findings=found.findings,
            not_applied=(NotApplied("idle", "no trace [of it]"),),
            timings=(*found.timings, NamedTiming("more", timing(1000, 3000))),
            n_launches=100,
            gain=found.gain,
            notes=("mind this",),
        )
    )
    first, *rest = text.splitlines()
    assert first == r"a\x1b[31m [bold]model: host-bound (confidence high)"
    assert rest[-1] == "capture makes a call 9.96 times as fast (measured; quartiles 9.96 to 9.96)"
    for line in (
        "t_enqueue / t_total = 1.00, quartiles 1.00 to 1.00: host-bound (host-bound from 0.9, "
        "device-bound up to 0.7)",
        "not applied: no trace [of it]",
        "2.00 us (1.50 us to 2.50 us, 2 samples)",
        "mind this",
    ):
        assert line in text


# ---- what cannot be diagnosed --------------------------------------------------------------------


def test_what_is_no_model() -> None:
    with pytest.raises(offload.DiagnosisError, match="expected a module or a function"):
        offload.diagnose(3)


def test_a_model_on_the_meta_device() -> None:
    with pytest.raises(offload.DiagnosisError, match=r"on one device that computes, got meta"):
        offload.diagnose(torch.relu, torch.empty(2, device="meta"))


def test_arguments_whose_tensors_cannot_be_listed() -> None:
    with pytest.raises(offload.DiagnosisError, match="use lists, tuples"):
        offload.diagnose(lambda tensors: next(iter(tensors)), {torch.ones(2)})


def test_the_models_own_errors_come_through() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        diagnose_call(fails, (torch.ones(1),), {})
