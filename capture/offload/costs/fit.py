"""Fits a header model. The only user of NumPy and SciPy in this package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from offload.console.progress import advance
from offload.costs.header_model import (
    STAGES,
    Coefficient,
    HeaderModel,
    HeaderShape,
    Observation,
    observations_by_shape,
)
from offload.errors import CostModelError

_N_RESAMPLES = 100


def n_fits(n_programs: int) -> int:
    """The number of fits for a header model of so many programs; each advances the stage."""
    return len(STAGES) * (1 + _N_RESAMPLES + n_programs)


def fit_header_model(
    observations: Sequence[Observation], *, n_resamples: int = _N_RESAMPLES, seed: int = 0
) -> HeaderModel:
    """Fit a model to executions of programs that differ in every term.

    Each shape counts by its median, so single slow executions have no effect. Over shapes the
    relative error is minimised under a loss that grows linearly (`soft_l1` of
    `scipy.optimize.least_squares`), with non-negative coefficients. Intervals are percentiles over
    resamples of the executions of each shape (bootstrap). Each program is also predicted by a fit
    to all others (leave one out): `held_out_ratios`.

    Args:
        observations: of at least two shapes, and several executions of each, of programs whose
            operators displace nothing.
        n_resamples: for the intervals.
        seed: of the resamples; the same observations give the same model.

    Raises:
        CostModelError: there are fewer than two shapes.
    """
    groups = list(observations_by_shape(observations).items())
    if len(groups) < 2:
        raise CostModelError(
            f"a header model needs executions of at least two shapes, got {len(groups)}"
        )
    generator = np.random.default_rng(seed)
    coefficients = {stage: _fit_stage(stage, groups, n_resamples, generator) for stage in STAGES}
    held_out = _held_out_ratios(observations)
    return HeaderModel(coefficients, len(observations), held_out_ratios=held_out)


def _held_out_ratios(observations: Sequence[Observation]) -> tuple[tuple[float, float], ...]:
    """For each program, `HeaderModel.ratios` of a model fitted to all others."""
    ratios = []
    for program in dict.fromkeys(one.shape.program for one in observations):
        rest = [one for one in observations if one.shape.program != program]
        groups = list(observations_by_shape(rest).items())
        if len(groups) < 2:
            continue
        generator = np.random.default_rng(0)  # draws nothing, without resamples
        model = HeaderModel(
            {stage: _fit_stage(stage, groups, 0, generator) for stage in STAGES}, len(rest)
        )
        ratios.append(model.ratios(one for one in observations if one.shape.program == program))
    return tuple(ratios)


def _fit_stage(
    stage: str,
    groups: Sequence[tuple[HeaderShape, Sequence[Observation]]],
    n_resamples: int,
    generator: np.random.Generator,
) -> dict[str, Coefficient]:
    terms = list(groups[0][0].terms(stage))
    counts = np.array([[shape.terms(stage)[term] for term in terms] for shape, _ in groups])
    times = [np.array([one.stages_ns[stage] for one in group]) for _, group in groups]
    fitted = _solve(counts, np.array([np.median(one) for one in times]))
    resampled = np.array(
        [
            _solve(
                counts,
                np.array([np.median(generator.choice(one, len(one))) for one in times]),
            )
            for _ in range(n_resamples)
        ]
    ).reshape(n_resamples, len(terms))
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0) if n_resamples else (fitted, fitted)
    return {
        term: Coefficient(float(fitted[index]), float(low[index]), float(high[index]))
        for index, term in enumerate(terms)
    }


def _solve(counts: NDArray[np.float64], times_ns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative coefficients with small relative errors, robust against outliers."""
    scale = np.maximum(times_ns, 1.0)  # avoids division by 0; 1 ns is the resolution
    first, _ = optimize.nnls(counts / scale[:, None], times_ns / scale)
    found = optimize.least_squares(
        lambda coefficients: (counts @ coefficients - times_ns) / scale,
        np.maximum(first, 1e-9),
        bounds=(0, np.inf),
        loss="soft_l1",
        f_scale=0.05,
    )
    advance()
    solution: NDArray[np.float64] = found.x
    return solution
