"""Calibration: measures the costs of this machine once, and again after drift."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from offload.api import capture
from offload.api.captured import Captured
from offload.backends import find_backend
from offload.console.progress import Progress, advance, reporting, stage
from offload.console.switches import measuring
from offload.costs import (
    DRIFT,
    CostModel,
    HeaderModel,
    HeaderShape,
    Observation,
    delivery_costs_ns,
    load_cost_model,
    save_cost_model,
)
from offload.errors import CostModelError
from offload.run import Executable
from offload.run.forecast import cost_key
from offload.timeline import Scheduling

_N_EXECUTIONS = 60
_N_ROUNDS = 5
_N_WARM_UP = 30
_N_CHECKS = 100
_ITEMS = 64

# Programs as (inputs, outputs, weights): each term of the model varies alone, and with others.
_FITTED = (
    (1, 1, 0), (2, 1, 0), (4, 1, 0), (8, 1, 0), (16, 1, 0),
    (1, 2, 0), (1, 4, 0), (1, 8, 0), (1, 16, 0),
    (1, 1, 4), (1, 1, 16), (1, 1, 64),
    (4, 4, 16), (8, 2, 32),
)  # fmt: skip
_CHECKED = ((3, 2, 8), (6, 3, 24))
_Probe: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Operators that may displace headers from the caches, as functions of `rows` of this shape.
_ROWS, _COLUMNS = 16, 64
_INDICES, _FILTER = torch.arange(_ROWS), torch.ones(1, 1, 1, 1)
_PROBES: tuple[_Probe, ...] = (
    lambda rows, square: functional.gelu(rows),
    lambda rows, square: functional.silu(rows),
    lambda rows, square: rows.sigmoid(),
    lambda rows, square: rows.tanh(),
    lambda rows, square: rows.exp(),
    lambda rows, square: rows.mul(rows),
    lambda rows, square: rows.softmax(1),
    lambda rows, square: rows.mean(1, keepdim=True),
    lambda rows, square: rows.mm(square),
    lambda rows, square: torch.addmm(rows, rows, square),
    lambda rows, square: torch.bmm(rows[None], square[None])[0],
    lambda rows, square: torch.cat([rows, rows])[:_ROWS],
    lambda rows, square: rows.t().contiguous().t(),
    lambda rows, square: functional.embedding(_INDICES, rows),
    lambda rows, square: functional.conv2d(rows[None, None], _FILTER)[0, 0],
    lambda rows, square: _attend(rows.view(1, 4, _ROWS, 16)).reshape(_ROWS, _COLUMNS),
)
_PROBE_ROUNDS, _PROBE_LAUNCHES = 5, 6
# Programs of several probes each, every second, fourth and eighth: all are held out of the fit.
_MIXED_STEPS = (2, 4, 8)
_DELIVERED_LAUNCHES = 200


def calibrate(
    device: str = "cpu",
    *,
    folder: Path | None = None,
    refit: bool = False,
    progress: Progress = None,
) -> CostModel:
    """The costs of this machine: the kept ones if they still hold, else measured now.

    Measuring takes some seconds on a quiet machine, and more than a minute on a busy one.

    Args:
        device: of the costs.
        folder: where they are kept; by default the user's cache folder.
        refit: measure in any case.
        progress: None shows it on stderr, if that is a terminal, after two seconds; False shows
            nothing. A function is called between measurements with (done, total, what): the present
            measurement, and its progress. Each `what` begins at 0 and reaches its total on success.
            An exception of the function ends the calibration.

    Raises:
        BackendUnavailable: the device is not available here.
        BindingError: `progress` is something else.
        CostModelError: SciPy is missing, or the model cannot be kept.
    """
    with reporting(progress), measuring():
        return _calibrate(device, folder, refit=refit)


def _calibrate(device: str, folder: Path | None, *, refit: bool) -> CostModel:
    key = cost_key(find_backend(device).machine())
    kept = None if refit else load_cost_model(key, folder)
    if kept is not None and _error(kept, device) <= DRIFT:
        return kept
    try:
        # Only a fit needs SciPy.
        from offload.costs.fit import fit_header_model, n_fits  # noqa: PLC0415
    except ImportError as error:
        raise CostModelError(
            f"fitting costs needs SciPy ({error}): `pip install 'offload[costs]'`"
        ) from error
    with stage("measuring headers", _N_ROUNDS * len(_FITTED)):
        observations = list(_observe(_FITTED, device, _N_EXECUTIONS, _N_ROUNDS))
    with stage("fitting the header's costs", n_fits(len(_FITTED))):
        fitted = fit_header_model(observations)
    header = dataclasses.replace(fitted, displaced_ns=_displacements(device))
    with stage("measuring mixed programs", sum(_MIXED_STEPS)):
        mixed = _mixed_ratios(header, device)
    header = dataclasses.replace(header, held_out_ratios=(*fitted.held_out_ratios, *mixed))
    issue_ns, handoff_ns = _delivery(device)
    model = CostModel(header, issue_ns, handoff_ns, {} if kept is None else kept.launch_ns)
    save_cost_model(model, key, folder)
    return model


def _error(kept: CostModel, device: str) -> float:
    with stage("checking the costs that were kept", len(_CHECKED)):
        return kept.header.error(_observe(_CHECKED, device, _N_CHECKS))


def observe(
    run: Executable, arguments: Sequence[tuple[Sequence[torch.Tensor], Any]], n_executions: int
) -> Iterator[Observation]:
    """Execute with sets of (inputs, out) in turn, and yield each header's observation.

    The first tenth is not yielded: it warms up, and proves out-variants.
    """
    for step in range(n_executions):
        inputs, out = arguments[step % len(arguments)]
        run(*inputs, out=out)
        if step >= max(_N_WARM_UP, n_executions // 10):
            yield observation_of(run)


def observation_of(run: Executable) -> Observation:
    """The latest execution of an executable as an observation."""
    last = run.last_execution
    stages_ns = {
        "convert": float(last.convert_ns),
        "drain": float(last.drain_ns),
        "policy": float(last.policy_ns),
        "patch": float(last.patch_ns),
        "submit": float(last.submit_ns),
    }
    return Observation(header_shape(run), stages_ns)


def header_shape(run: Executable) -> HeaderShape:
    """The work of the header of an executable's latest execution."""
    last = run.last_execution
    return run.header_shape(last.outputs_allocated, last.slots_changed, last.words_patched)


def _program(n_inputs: int, n_outputs: int, n_weights: int) -> Callable[..., list[torch.Tensor]]:
    """A program of additions, which displace almost nothing."""
    weights = [torch.zeros(_ITEMS) for _ in range(n_weights)]

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        total = inputs[0]
        for one in (*inputs[1:], *weights):
            total = total + one
        return [total + float(output) for output in range(n_outputs)]

    return function


def _attend(heads: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(heads, heads, heads)


def _displacements(device: str) -> dict[str, float]:
    """By operator, the additional header duration of a mixed program that also runs it."""
    displaced = {}
    base = _probe_program([])
    operators = {launch.name for launch in base.program.launches}
    probing = stage("measuring what operators displace", _PROBE_ROUNDS * len(_PROBES))
    with probing as probed, base.load(device) as base_run:
        for probe in _PROBES:
            captured = _probe_program([probe])
            added = [
                launch.name for launch in captured.program.launches if launch.name not in operators
            ]
            with captured.load(device) as run:
                times_ns = []
                for _ in range(_PROBE_ROUNDS):
                    times_ns.append([_m_l_t_ns(one, _N_CHECKS) for one in (run, base_run)])
                    probed.advance()
            difference = statistics.median(with_it - without for with_it, without in times_ns)
            displaced[added[0]] = max(0.0, difference)
    return displaced


def _mixed_ratios(header: HeaderModel, device: str) -> list[tuple[float, float]]:
    """Measured / predicted m_l_t of programs that run several of the probes, in the same order."""
    ratios = []
    for step in _MIXED_STEPS:
        for first in range(step):
            with _probe_program(_PROBES[first::step]).load(device) as run:
                sets = [([_numbers(_ROWS, _COLUMNS)], None) for _ in range(2)]
                ratios.append(header.ratios(observe(run, sets, _N_CHECKS)))
            advance()
    return ratios


def _probe_program(probes: Sequence[_Probe]) -> Captured:
    """A program of operators that many models run, with the probes between them."""
    weights, square = _numbers(_PROBE_LAUNCHES, 2, _COLUMNS), torch.eye(_COLUMNS)

    def function(rows: torch.Tensor) -> torch.Tensor:
        for scale, shift in weights.unbind():
            normal = functional.layer_norm(torch.relu(rows + shift), (_COLUMNS,), scale, shift)
            rows = sum((probe(normal, square) for probe in probes), normal)
        return rows

    return _captured(function, _numbers(_ROWS, _COLUMNS))


def _numbers(*shape: int) -> torch.Tensor:
    """Numbers between 0 and 1, from a separate generator."""
    return torch.rand(shape, generator=torch.Generator())


def _m_l_t_ns(run: Executable, n_executions: int) -> float:
    sets = [([_numbers(_ROWS, _COLUMNS)], None) for _ in range(2)]
    return statistics.median(one.m_l_t_ns for one in observe(run, sets, n_executions))


def _observe(
    programs: Sequence[tuple[int, int, int]], device: str, n_executions: int, n_rounds: int = 1
) -> Iterator[Observation]:
    """Executions of each program: nothing moved, everything moved, and fresh outputs.

    The programs alternate over several rounds, so that a slow moment of the machine does not affect
    a single program.
    """
    with contextlib.ExitStack() as stack:
        runs = []
        for n_inputs, n_outputs, n_weights in programs:
            sets = [
                (
                    [torch.zeros(_ITEMS) for _ in range(n_inputs)],
                    [torch.zeros(_ITEMS) for _ in range(n_outputs)],
                )
                for _ in range(2)
            ]
            captured = _captured(_program(n_inputs, n_outputs, n_weights), *sets[0][0])
            runs.append((stack.enter_context(captured.load(device)), sets))
        for _ in range(n_rounds):
            for run, sets in runs:
                fresh = [(inputs, None) for inputs, _ in sets]
                for arguments in (sets[:1], sets, fresh[:1], fresh):
                    yield from observe(run, arguments, n_executions)
                advance()


def _captured(function: Callable[..., Any], *inputs: torch.Tensor) -> Captured:
    with capture(function) as captured:
        captured(*inputs)
    return captured


def _delivery(device: str) -> tuple[float, float]:
    """The host's cost of delivering a launch, from a program of tiny launches."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_DELIVERED_LAUNCHES):
            x = x.neg()
        return x

    captured = _captured(chain, torch.zeros(_ITEMS))
    measuring = stage("measuring the delivery of launches", 1)
    with measuring, captured.load(device, scheduling=Scheduling.HOST) as run:
        for _ in range(_N_WARM_UP):
            run(torch.zeros(_ITEMS))
        with run.timeline() as timeline:
            for _ in range(_N_CHECKS):
                run(torch.zeros(_ITEMS))
    return delivery_costs_ns(timeline.executions)
