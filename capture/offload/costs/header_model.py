"""The header model: m_l_t from what an execution binds, moves and patches."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping

from offload.errors import CostModelError

STAGES = ("convert", "drain", "policy", "patch", "submit")

COVERAGE = 0.9
"""The share of held-out programs whose m_l_t lies in `m_l_t_interval_ns`."""

DRIFT = 0.2
"""A kept model whose error exceeds this is fitted again."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderShape:
    """The work of one execution's header; m_l_t depends on nothing else.

    Attributes:
        n_inputs: tensors passed.
        outputs_allocated: results without a given buffer.
        outputs_given: results with a given buffer.
        n_weights: weight storages, which are compared with those bound.
        slots_changed: slots whose address moved.
        words_patched: words that depend on them.
        operators: of the launches, by name. Between two headers their code and data displace from
            the processor's caches what headers need.
    """

    n_inputs: int
    outputs_allocated: int
    outputs_given: int
    n_weights: int
    slots_changed: int
    words_patched: int
    operators: frozenset[str] = frozenset()

    @property
    def program(self) -> tuple[int, int, int, frozenset[str]]:
        """The part that the program alone determines: inputs, outputs, weights, operators."""
        n_outputs = self.outputs_allocated + self.outputs_given
        return self.n_inputs, n_outputs, self.n_weights, self.operators

    @property
    def ranges_looked_up(self) -> int:
        """The number of memory ranges looked up among the buffers given for results."""
        return self.n_inputs + self.n_weights if self.outputs_given else 0

    def terms(self, stage: str) -> dict[str, float]:
        """The terms in which a stage's duration is linear, by name."""
        if stage == "convert":
            return {
                "execution": 1,
                "input": self.n_inputs,
                "output allocated": self.outputs_allocated,
                "outputs given at all": float(self.outputs_given > 0),
                "output given": self.outputs_given,
                "range looked up": self.ranges_looked_up,
                "weight": self.n_weights,
            }
        if stage == "policy":
            return {"execution": 1, "slot changed": self.slots_changed}
        if stage == "patch":
            return {"patched at all": float(self.words_patched > 0), "word": self.words_patched}
        return {"execution": 1}


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """The measured header of one execution: its shape, and each stage's ns by name."""

    shape: HeaderShape
    stages_ns: Mapping[str, float]

    @property
    def m_l_t_ns(self) -> float:
        """The sum of the stages."""
        return sum(self.stages_ns.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Coefficient:
    """The cost of one unit, in ns, with its 95 % confidence interval."""

    value_ns: float
    low_ns: float
    high_ns: float


@dataclasses.dataclass(frozen=True, slots=True)
class HeaderModel:
    """m_l_t = convert + drain + policy + patch + submit, each linear in what an execution does.

    Attributes:
        coefficients: by stage and term.
        n_observations: the number of fitted executions.
        displaced_ns: by operator, the additional duration of a header (in `convert`, its first
            stage) if launches of it ran since the header before. Other operators add nothing.
        held_out_ratios: for each held-out program, the least and the largest m_l_t measured /
            predicted over its shapes.
    """

    coefficients: Mapping[str, Mapping[str, Coefficient]]
    n_observations: int
    displaced_ns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    held_out_ratios: tuple[tuple[float, float], ...] = ()

    def stage_ns(self, stage: str, shape: HeaderShape) -> float:
        """The predicted duration of one stage."""
        known = self.coefficients[stage]
        linear = sum(known[term].value_ns * count for term, count in shape.terms(stage).items())
        if stage != "convert":
            return linear
        return linear + sum(self.displaced_ns.get(one, 0.0) for one in shape.operators)

    def stages_ns(self, shape: HeaderShape) -> dict[str, float]:
        """The predicted duration of each stage."""
        return {stage: self.stage_ns(stage, shape) for stage in STAGES}

    def m_l_t_ns(self, shape: HeaderShape) -> float:
        """The predicted header duration."""
        return sum(self.stages_ns(shape).values())

    def interval_ratios(self) -> tuple[float, float]:
        """The interval of measured / predicted m_l_t that holds `COVERAGE` of unseen programs.

        Its ends are order statistics of `held_out_ratios`, with half of what is not covered on each
        side: conformal prediction with residuals of held-out programs (Lei et al.,
        Distribution-Free Predictive Inference for Regression, 2018), as ratios. The coverage holds
        for programs like those of the calibration. `DRIFT`, up to which a kept model is used,
        widens the interval on both sides.

        Returns:
            The low and the high end; (0, infinity) if too few programs were held out.
        """
        n_programs = len(self.held_out_ratios)
        rank = math.ceil((n_programs + 1) * (1 + COVERAGE) / 2)
        if rank > n_programs:
            return 0.0, math.inf
        low = sorted((low for low, _ in self.held_out_ratios), reverse=True)[rank - 1]
        high = sorted(high for _, high in self.held_out_ratios)[rank - 1]
        return low / (1 + DRIFT), high / (1 - DRIFT)

    def m_l_t_interval_ns(self, shape: HeaderShape) -> tuple[float, float]:
        """The interval of the header duration of a program that was not fitted.

        `interval_ratios` defines it and its coverage.
        """
        low, high = self.interval_ratios()
        predicted_ns = self.m_l_t_ns(shape)
        return low * predicted_ns, high * predicted_ns

    def ratios(self, observations: Iterable[Observation]) -> tuple[float, float]:
        """The least and the largest median observed / predicted m_l_t over shapes.

        Raises:
            CostModelError: there is no observation.
        """
        found = [
            statistics.median(one.m_l_t_ns for one in group) / max(self.m_l_t_ns(shape), 1.0)
            for shape, group in _observed(observations).items()
        ]
        return min(found), max(found)

    def error(self, observations: Iterable[Observation]) -> float:
        """The model's error: the median over shapes of |predicted / median observed - 1|.

        Raises:
            CostModelError: there is no observation.
        """
        errors = []
        for shape, group in _observed(observations).items():
            observed = statistics.median(one.m_l_t_ns for one in group)
            errors.append(abs(self.m_l_t_ns(shape) / observed - 1))
        return statistics.median(errors)


def _observed(observations: Iterable[Observation]) -> dict[HeaderShape, list[Observation]]:
    by_shape = observations_by_shape(observations)
    if not by_shape:
        raise CostModelError("no executions were observed: execute the program first")
    return by_shape


def observations_by_shape(
    observations: Iterable[Observation],
) -> dict[HeaderShape, list[Observation]]:
    """Observations grouped by shape."""
    groups: dict[HeaderShape, list[Observation]] = {}
    for one in observations:
        groups.setdefault(one.shape, []).append(one)
    return groups
