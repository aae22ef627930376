"""Calibration: measures the costs of this machine once, and again when they have drifted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.api import capture
from offload.backends import find_backend
from offload.costs import (
    CostKey,
    CostModel,
    HeaderShape,
    Observation,
    delivery_costs_ns,
    load_cost_model,
    save_cost_model,
)
from offload.errors import CostModelError
from offload.replay import Executable
from offload.timeline import Scheduling

# Beyond this error of m_l_t a kept model is fitted anew.
DRIFT = 0.2

_N_EXECUTIONS = 130
_N_WARM_UP = 30
_N_CHECKS = 100
_ITEMS = 8

# Programs as (inputs, outputs, weights): each term of the model varies alone, and with others.
_FITTED = (
    (1, 1, 0), (2, 1, 0), (4, 1, 0), (8, 1, 0), (16, 1, 0),
    (1, 2, 0), (1, 4, 0), (1, 8, 0), (1, 16, 0),
    (1, 1, 4), (1, 1, 16), (1, 1, 64),
    (4, 4, 16), (8, 2, 32),
)  # fmt: skip
_CHECKED = ((3, 2, 8), (6, 3, 24))
# Programs touch about so many bytes: within the first cache, the second, and beyond.
_TOUCHED_BYTES = (0, 256 * 1024, 1024 * 1024, 4 * 1024 * 1024)
_DELIVERED_LAUNCHES = 200


def calibrate(device: str = "cpu", *, folder: Path | None = None, refit: bool = False) -> CostModel:
    """The costs of this machine: those kept from before if they still hold, else measured now.

    Measuring takes some seconds; the machine should be quiet.

    Args:
        device: whose costs.
        folder: where they are kept; by default the user's cache.
        refit: measure in any case.

    Raises:
        BackendUnavailable: there is no such device here.
        CostModelError: SciPy is missing, or the model cannot be kept.
    """
    key = cost_key(device)
    kept = None if refit else load_cost_model(key, folder)
    if kept is not None and kept.header.error(_observe(_CHECKED, device, _N_CHECKS)) <= DRIFT:
        return kept
    try:
        from offload.costs.fit import fit_header_model  # noqa: PLC0415 - only a fit needs SciPy
    except ImportError as error:
        raise CostModelError(
            f"fitting costs needs SciPy ({error}): `pip install 'offload[costs]'`"
        ) from error
    observations = [
        dataclasses.replace(one, shape=dataclasses.replace(one.shape, touched_bytes=touched_bytes))
        for touched_bytes in _TOUCHED_BYTES
        for one in _observe(_FITTED, device, _N_EXECUTIONS, touched_bytes)
    ]
    header = fit_header_model(observations)
    issue_ns, handoff_ns = _delivery(device)
    model = CostModel(header, issue_ns, handoff_ns, {} if kept is None else kept.launch_ns)
    save_cost_model(model, key, folder)
    return model


def cost_key(device: str) -> CostKey:
    """What the costs of a device on this machine are kept under.

    Raises:
        BackendUnavailable: there is no such device here.
    """
    machine = find_backend(device).machine()
    return CostKey(machine.name, machine.device, (("torch", torch.__version__),))


def observe(
    run: Executable, arguments: Sequence[tuple[Sequence[torch.Tensor], Any]], n_executions: int
) -> Iterator[Observation]:
    """Execute with sets of (inputs, out) in turn, and yield what each header took.

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
        "policy": float(last.policy_ns),
        "patch": float(last.patch_ns),
        "submit": float(last.submit_ns),
    }
    return Observation(header_shape(run), stages_ns)


def header_shape(run: Executable) -> HeaderShape:
    """What the header of an executable's latest execution had to do."""
    last = run.last_execution
    return run.header_shape(last.outputs_allocated, last.slots_changed, last.words_patched)


def _program(
    n_inputs: int, n_outputs: int, n_weights: int, touched_bytes: int
) -> Callable[..., list[torch.Tensor]]:
    """A program of tiny launches, and one for each weight that reads its share of the bytes."""
    items = max(_ITEMS, touched_bytes // 4 // max(1, n_weights))
    weights = [torch.zeros(items) for _ in range(n_weights)]
    memory = torch.zeros(0 if n_weights else touched_bytes // 4)

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        total = inputs[0]
        if memory.numel():
            total = total + memory.sum()
        for weight in weights:
            total = total + weight.sum()
        for one in inputs[1:]:
            total = total + one
        return [total + float(output) for output in range(n_outputs)]

    return function


def _observe(
    programs: Sequence[tuple[int, int, int]],
    device: str,
    n_executions: int,
    touched_bytes: int = 0,
) -> Iterator[Observation]:
    """Executions of each program: nothing moved, everything moved, and fresh outputs."""
    for n_inputs, n_outputs, n_weights in programs:
        sets = [
            (
                [torch.zeros(_ITEMS) for _ in range(n_inputs)],
                [torch.zeros(_ITEMS) for _ in range(n_outputs)],
            )
            for _ in range(2)
        ]
        captured = _captured(_program(n_inputs, n_outputs, n_weights, touched_bytes), *sets[0][0])
        with captured.load(device) as run:
            fresh = [(inputs, None) for inputs, _ in sets]
            for arguments in (sets[:1], sets, fresh[:1], fresh):
                yield from observe(run, arguments, n_executions)


def _captured(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    with capture(function) as captured:
        captured(*inputs)
    return captured


def _delivery(device: str) -> tuple[float, float]:
    """What delivering a launch costs the host, from a program of tiny launches."""

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(_DELIVERED_LAUNCHES):
            x = x.neg()
        return x

    captured = _captured(chain, torch.zeros(_ITEMS))
    with captured.load(device, scheduling=Scheduling.HOST) as run:
        for _ in range(_N_WARM_UP):
            run(torch.zeros(_ITEMS))
        with run.timeline() as timeline:
            for _ in range(_N_CHECKS):
                run(torch.zeros(_ITEMS))
    return delivery_costs_ns(timeline.executions)
