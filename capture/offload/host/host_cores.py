"""The requested host cores for the stages of launches at varying sizes."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Literal

from offload.backends import SizeChanger
from offload.errors import BindingError, CaptureError, ExecutionError
from offload.host.sized_executable import SizedExecutable
from offload.load.options import AUTO
from offload.load.trial import taken_anew_in_turns_ns
from offload.program.family import Family

VARIABLE = "MAX_RUNTIME_CORE_NUMBER"
"""The environment variable of Ascend's graph engine for the same choice."""

MOST_CORES = 64

STAGED_CORES = 3
"""How many cores `auto` compares with one: infer shapes and tile, write addresses, launch."""

HostCores = int | Literal["auto"] | None


_TILED_FIRST = (
    "the program writes inputs or weights, draws random numbers, or calls an operator whose other "
    "effects are not known, so every launch is tiled before the first one is launched: an error "
    "in between would leave that half done"
)


def asked_host_cores(
    given: HostCores, changer: SizeChanger, family: Family
) -> int | Literal["auto"]:
    """Return how many cores of the host a load requests.

    Args:
        given: the option. It takes precedence over the environment variable.
        changer: the device's.
        family: the loaded Family.

    Raises:
        BindingError: the option, or the variable where it applies, is not a valid number; or the
            option requests several cores where stages stay on one.
    """
    one_core = changer.one_host_core
    if given != AUTO and family.program.leaves_something:
        one_core = one_core or _TILED_FIRST
    if given is None:
        return 1 if one_core else _from_environment()
    refuse_host_cores(given, one_core)
    return given


def refuse_host_cores(given: HostCores, why: str) -> None:
    """Refuse an option that is not a number of cores, or not 1 where `why` is given.

    Raises:
        BindingError: it is refused.
    """
    if given is None:
        return
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if given != AUTO and not (is_number and 1 <= int(given) <= MOST_CORES):
        raise BindingError(
            f"host_cores: expected a number from 1 to {MOST_CORES}, or 'auto', got {given!r}"
        )
    if given != 1 and why:
        raise BindingError(f"host_cores={given!r}: {why}: load without host_cores=")


def _from_environment() -> int:
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return 1
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_CORES):
        raise BindingError(
            f"{VARIABLE}={text!r} in the environment: expected a number from 1 to {MOST_CORES}; "
            "host_cores= takes precedence over it"
        )
    return int(text)


def chosen_host_cores(family: Family, load: Callable[[int], SizedExecutable]) -> tuple[int, str]:
    """Return how many cores make executions at new sizes faster, and the reason for people.

    Args:
        family: both are tried at its recorded sizes, in turns, on made-up inputs; before each
            execution the instance of these sizes is dropped, so that they are new again.
        load: makes an executable with this many cores; those tried are closed.
    """
    if family.program.leaves_something:
        return 1, f"stages on 1 core of the host: {_TILED_FIRST}"
    try:
        with (inline := load(1)), (staged := load(STAGED_CORES)):
            found = taken_anew_in_turns_ns(
                "timing host stages",
                [(inline, inline.forget_sizes), (staged, staged.forget_sizes)],
            )
    except (BindingError, CaptureError, ExecutionError) as error:
        return 1, f"stages on 1 core of the host, untried: a trial failed: {error}"
    inline_ns, staged_ns = (statistics.median(times) for times in found)
    n_cores = STAGED_CORES if staged_ns < inline_ns else 1
    sizes = ", ".join(f"{one.name} = {one.recorded}" for one in family.dims)
    return n_cores, (
        f"stages on {n_cores} core{'s' if n_cores > 1 else ''} of the host: at {sizes}, met as new "
        f"sizes, an execution took {inline_ns / 1e3:,.1f} us on 1 core, and "
        f"{staged_ns / 1e3:,.1f} us on {STAGED_CORES} (medians, made-up inputs)"
    )
