"""The header model recovers known costs; predictions follow the pipeline that they describe."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random

import pytest
import torch

import offload
from offload.costs import (
    COVERAGE,
    DRIFT,
    STAGES,
    Coefficient,
    CostKey,
    CostModel,
    HeaderModel,
    HeaderShape,
    Observation,
    delivery_costs_ns,
    load_cost_model,
    save_cost_model,
)
from offload.costs.fit import fit_header_model
from offload.timeline import ExecutionTimeline, Scheduling, Span, SpanKind

TRUTH_NS = {
    "convert": {
        "execution": 600.0,
        "input": 55.0,
        "output allocated": 140.0,
        "outputs given at all": 210.0,
        "output given": 390.0,
        "range looked up": 18.0,
        "weight": 24.0,
    },
    "drain": {"execution": 0.0},
    "policy": {"execution": 46.0, "slot changed": 3.0},
    "patch": {"patched at all": 94.0, "word": 17.0},
    "submit": {"execution": 70.0},
}
SHAPES = [
    HeaderShape(n_inputs, outputs - given, given, n_weights, moved, moved)
    for n_inputs, outputs, n_weights in itertools.product((1, 4, 16), (1, 8), (0, 5, 40))
    for given in (0, outputs)
    for moved in (0, n_inputs + given)
]


def exact_model() -> HeaderModel:
    return HeaderModel(
        {
            stage: {term: Coefficient(value, value, value) for term, value in terms.items()}
            for stage, terms in TRUTH_NS.items()
        },
        1,
        {"aten::gelu": 1500.0},
    )


def observations(noise: float = 0.0, outliers: float = 0.0, n: int = 30) -> list[Observation]:
    draw, model = random.Random(1), exact_model()
    found = []
    for shape in SHAPES:
        for _ in range(n):
            factor = draw.uniform(1 - noise, 1 + noise)
            factor *= 50 if draw.random() < outliers else 1
            times = {stage: model.stage_ns(stage, shape) * factor for stage in STAGES}
            found.append(Observation(shape, times))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "outliers", "tolerance"), [(0, 0, 1e-3), (0.1, 0.1, 0.1)])
def test_known_costs_are_recovered(noise, outliers, tolerance):
    model = fit_header_model(observations(noise, outliers), n_resamples=20)
    for stage, terms in TRUTH_NS.items():
        for term, value_ns in terms.items():
            found = model.coefficients[stage][term]
            assert found.value_ns == pytest.approx(value_ns, rel=tolerance, abs=2), (stage, term)
            assert found.low_ns <= found.high_ns
    for shape in SHAPES:
        assert model.m_l_t_ns(shape) == pytest.approx(exact_model().m_l_t_ns(shape), rel=0.05)


@pytest.mark.slow
def test_intervals_grow_with_noise():
    calm, noisy = (
        fit_header_model(observations(noise), n_resamples=50).coefficients["convert"]["execution"]
        for noise in (0.02, 0.3)
    )
    for one in (calm, noisy):
        assert one.low_ns * 0.95 <= 600 <= one.high_ns * 1.05
    assert calm.high_ns - calm.low_ns < noisy.high_ns - noisy.low_ns


@pytest.mark.slow
def test_the_same_observations_give_the_same_model():
    found = observations(0.1)
    assert fit_header_model(found, n_resamples=5) == fit_header_model(found, n_resamples=5)


def test_one_shape_is_not_enough():
    with pytest.raises(offload.CostModelError, match="two shapes"):
        fit_header_model([one for one in observations() if one.shape == SHAPES[0]])


def test_operators_displace_headers():
    model, shape = exact_model(), SHAPES[3]
    with_gelu = dataclasses.replace(shape, operators=frozenset({"aten::gelu", "aten::relu"}))
    assert model.m_l_t_ns(with_gelu) == pytest.approx(model.m_l_t_ns(shape) + 1500)
    assert model.stage_ns("patch", with_gelu) == model.stage_ns("patch", shape)


def test_error_is_of_the_median_shape():
    model = exact_model()
    assert model.error(observations()) == pytest.approx(0)
    slower = [
        dataclasses.replace(one, stages_ns={name: 2 * ns for name, ns in one.stages_ns.items()})
        for one in observations()
    ]
    assert model.error(slower) == pytest.approx(0.5)
    with pytest.raises(offload.CostModelError, match="no executions"):
        model.error([])


# ---- intervals -----------------------------------------------------------------------------------


def test_each_program_is_predicted_by_a_fit_to_the_others():
    programs = {shape.program for shape in SHAPES}
    exact = fit_header_model(observations(), n_resamples=0)
    assert len(exact.held_out_ratios) == len(programs)
    assert all(one == pytest.approx((1, 1), rel=1e-2) for one in exact.held_out_ratios)
    odd = SHAPES[-1].program  # twice as slow as all others suggest
    found = [
        dataclasses.replace(one, stages_ns={name: 2 * ns for name, ns in one.stages_ns.items()})
        if one.shape.program == odd
        else one
        for one in observations()
    ]
    ratios = fit_header_model(found, n_resamples=0).held_out_ratios
    assert max(ratios) == pytest.approx((2, 2), rel=1e-2)


def test_the_interval_holds_as_many_unseen_programs_as_it_says():
    draw = random.Random(2)
    n_trials, n_covered = 2000, 0
    for _ in range(n_trials):
        *known, unseen = (math.exp(draw.gauss(0.1, 0.3)) for _ in range(40))
        model = dataclasses.replace(
            exact_model(), held_out_ratios=tuple((one, one) for one in known)
        )
        low, high = model.interval_ratios()
        n_covered += low * (1 + DRIFT) <= unseen <= high * (1 - DRIFT)
    assert COVERAGE - 0.02 <= n_covered / n_trials <= COVERAGE + 0.06


def test_intervals_are_of_the_worst_shapes_and_widened_by_drift():
    model = dataclasses.replace(exact_model(), held_out_ratios=(*[(0.9, 1.1)] * 18, (0.6, 1.6)))
    low, high = 0.6 / (1 + DRIFT), 1.6 / (1 - DRIFT)
    assert model.interval_ratios() == pytest.approx((low, high))
    predicted_ns = model.m_l_t_ns(SHAPE)
    interval_ns = pytest.approx((low * predicted_ns, high * predicted_ns))
    assert model.m_l_t_interval_ns(SHAPE) == interval_ns
    costs = CostModel(model, 100, 50, {})
    found = costs.predict_launches([10], SHAPE, Scheduling.OFFLOAD)
    assert found.m_l_t_interval_ns == interval_ns
    found = costs.predict_launches([10], SHAPE, Scheduling.HOST)
    without_submit_ns = predicted_ns - 70
    assert found.m_l_t_interval_ns == pytest.approx(
        (low * without_submit_ns, high * without_submit_ns)
    )


def test_too_few_programs_tell_nothing():
    model = dataclasses.replace(exact_model(), held_out_ratios=((0.9, 1.1),) * 18)
    assert model.interval_ratios() == (0, math.inf)
    assert exact_model().m_l_t_interval_ns(SHAPE) == (0, math.inf)


# ---- predictions ---------------------------------------------------------------------------------

SHAPE = HeaderShape(1, 1, 0, 0, 2, 2)


def cost_model(issue_ns: float, handoff_ns: float) -> CostModel:
    return CostModel(exact_model(), issue_ns, handoff_ns, {})


def test_offload_is_the_header_and_then_the_launches():
    model = cost_model(100, 50)
    found = model.predict_launches([10, 20, 30], SHAPE, Scheduling.OFFLOAD)
    header_ns = exact_model().m_l_t_ns(SHAPE)
    assert found.m_l_t_ns == pytest.approx(header_ns)
    assert found.total_ns == pytest.approx(header_ns + 60)
    assert found.issues == ()


def test_a_host_slower_than_the_device_sets_the_pace():
    found = cost_model(100, 50).predict_launches([10] * 5, SHAPE, Scheduling.HOST)
    first = found.issues[0][0]
    assert [round(begin - first) for begin, _ in found.issues] == [0, 100, 200, 300, 400]
    assert [round(begin - first) for begin, _ in found.launches] == [150, 250, 350, 450, 550]
    assert first == pytest.approx(found.m_l_t_ns) == exact_model().m_l_t_ns(SHAPE) - 70


def test_a_device_slower_than_the_host_sets_the_pace():
    found = cost_model(10, 50).predict_launches([100] * 4, SHAPE, Scheduling.HOST)
    first = found.issues[0][0]
    assert [round(begin - first) for begin, _ in found.launches] == [60, 160, 260, 360]


@pytest.mark.slow
def test_break_even():
    # One launch: offload pays submit (70 ns), the host the issue and the hand-off.
    assert cost_model(100, 50).break_even_launches(1000, SHAPE) == 1
    # Beyond the header the host takes 20 n + 10 + 5 ns, and offload 70 + 5 n.
    assert cost_model(20, 10).break_even_launches(5, SHAPE) == 4
    # A host faster than the device never loses its gain.
    assert cost_model(20, 10).break_even_launches(1000, SHAPE) is None


def test_unknown_launches_are_not_guessed():
    with offload.capture(lambda x: x.sin()) as captured:
        captured(torch.ones(4))
    model = cost_model(1, 1)
    with pytest.raises(offload.CostModelError, match=r"aten::sin\(float32\[4\]\).*never measured"):
        model.predict(captured.program, SHAPE, Scheduling.OFFLOAD)


def host_scheduled(spans: list[tuple[SpanKind, int, int, int]]) -> ExecutionTimeline:
    made = tuple(
        Span(kind, "aten::neg", "host" if kind is SpanKind.ISSUE else "device", begin, end, launch)
        for kind, launch, begin, end in spans
    )
    return ExecutionTimeline(1, Scheduling.HOST, made, (), "io", 2, 2, 0)


def test_delivery_costs():
    issue, launch = SpanKind.ISSUE, SpanKind.LAUNCH
    execution = host_scheduled(
        [
            (issue, 0, 0, 10), (launch, 0, 40, 45),  # idle device: 30 from issue to begin
            (issue, 1, 50, 62), (launch, 1, 92, 200),  # idle again
            (issue, 2, 70, 80), (launch, 2, 200, 210),  # the device was busy: no information
        ]
    )  # fmt: skip
    assert delivery_costs_ns([execution]) == (10, 30)
    with pytest.raises(offload.CostModelError, match="scheduling='host'"):
        delivery_costs_ns([host_scheduled([(launch, 0, 0, 1)])])


# ---- stored on disk ------------------------------------------------------------------------------

KEY = CostKey("a processor", "cpu", (("torch", "2.13.0"),))


def test_kept_models_come_back(tmp_path):
    header = dataclasses.replace(exact_model(), held_out_ratios=((0.9, 1.25), (1.0, 1.5)))
    model = CostModel(header, 60, 20_000, {"aten::sin(float32[4])": 900.5})
    assert load_cost_model(KEY, tmp_path) is None
    save_cost_model(model, KEY, tmp_path / "new")
    assert load_cost_model(KEY, tmp_path / "new") == model
    for other in (
        dataclasses.replace(KEY, machine="another"),
        dataclasses.replace(KEY, device="null"),
        dataclasses.replace(KEY, versions=(("torch", "2.14.0"),)),
    ):
        assert load_cost_model(other, tmp_path / "new") is None


NO_STAGES = '{"format": 3, "header": {"coefficients": {}, "n_observations": 1, "displaced_ns": {}}}'


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"format": 4}', '{"format": 3, "header": 3}', NO_STAGES]
)
def test_damaged_files_are_refused(tmp_path, damage):
    path = save_cost_model(cost_model(1, 1), KEY, tmp_path)
    path.write_text(damage)
    expected = "expected of" if damage == NO_STAGES else "damaged"
    with pytest.raises(offload.CostModelError, match=expected):
        load_cost_model(KEY, tmp_path)


def test_a_model_of_an_older_format_is_none(tmp_path):
    path = save_cost_model(cost_model(1, 1), KEY, tmp_path)
    path.write_text(path.read_text().replace('"format": 3', '"format": 2'))
    assert load_cost_model(KEY, tmp_path) is None


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(offload.CostModelError, match="cannot be kept"):
        save_cost_model(cost_model(1, 1), KEY, tmp_path / "file")


def test_files_are_plain_json(tmp_path):
    document = json.loads(save_cost_model(cost_model(1, 2), KEY, tmp_path).read_text())
    assert document["key"]["machine"] == "a processor"
    assert document["header"]["coefficients"]["patch"]["word"]["value_ns"] == 17
