"""Each driver call of an action fails once: what is raised, what is left, and what works after it.

Used by `failing_cases`. The simulated driver lets a call do nothing and return an error.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch

import offload
from offload.backends.cuda import backend as cuda_backend

UNKNOWN, OUT_OF_MEMORY = 999, 2

# What they were to give back stays, and nothing can be done about it: without a wait for the device
# (cuCtxSynchronize) it is not known whether memory of weights is in use.
RELEASING = (
    "cuCtxSynchronize", "cuDevicePrimaryCtxRelease", "cuEventDestroy", "cuGraphDestroy",
    "cuGraphExecDestroy", "cuMemAddressFree", "cuMemFree", "cuMemFreeHost", "cuMemHostUnregister",
    "cuMemRelease", "cuMemUnmap", "cuModuleUnload", "cuStreamDestroy",
)  # fmt: skip

TAKING = (
    "cuEventCreate", "cuGraphInstantiateWithFlags", "cuMemAlloc", "cuMemAddressReserve",
    "cuMemCreate", "cuMemHostAlloc", "cuMemMap", "cuModuleLoadData", "cuStreamCreate",
)  # fmt: skip

KINDS = (
    "stream", "event", "graph", "executable", "module", "mapping", "reservation", "memory handle",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Action:
    """Something of which a driver call fails.

    Attributes:
        begin: called before each attempt; returns what `act` and `check` take.
        act: is made to fail.
        check: called after it, also with whether it raised; requires that the same works now, and
            releases what `begin` and `act` made.
    """

    begin: Callable[[], Any]
    act: Callable[[Any], object]
    check: Callable[[Any, bool], object]


def held(cuda: Any) -> dict[str, int]:
    """What the process holds of the device, without the caches of torch and its libraries."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    simulator, allocator = cuda.simulator, cuda.allocator
    return {
        **{kind: simulator.live(kind) for kind in KINDS},
        "bytes": simulator.physical_bytes,
        "host bytes": simulator.host_bytes,
        "torch's bytes": allocator.allocated_bytes,
        "torch's filters": len(allocator.filters),
    }


def calls_of(cuda: Any, action: Action) -> dict[str, int]:
    """By function, the calls of an action that does not fail."""
    held(cuda)  # as `attempt`, which begins without caches
    given = action.begin()
    cuda.simulator.forget_calls()
    action.act(given)
    calls: dict[str, int] = cuda.simulator.all_calls()
    action.check(given, False)
    return calls


def positions(n_calls: int, most: int) -> Iterator[int]:
    """At most `most` of the calls 1 to `n_calls`: the middle one, or both ends and some between."""
    n = min(n_calls, most)
    for index in range(n):
        yield 1 + (index * (n_calls - 1) // (n - 1) if n > 1 else (n_calls - 1) // 2)


def attempt(cuda: Any, action: Action, function: str, nth: int, code: int) -> tuple[str, list[str]]:
    """Fail the nth call of a function; return the outcome in words, and what is wrong."""
    wrong: list[str] = []
    before = held(cuda)
    given = action.begin()
    cuda.simulator.forget_calls()
    cuda.simulator.fail(function, code, nth)
    failed, outcome = True, "nothing raised"
    try:
        action.act(given)
        failed = False
    except offload.OffloadError as error:
        outcome = f"{type(error).__name__}: {error}"
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
        wrong.append(f"raised {outcome}")
    cuda.simulator.forget_calls()
    cuda.allocator.error = None  # of a callback: torch has reported it
    try:
        numbers = torch.arange(8.0)
        if not torch.equal((numbers.to("cuda") + 1).to("cpu"), numbers + 1):
            wrong.append("torch computes something else afterwards")
        action.check(given, failed)
    except BaseException as error:
        wrong.append(f"afterwards {type(error).__name__}: {error}")
    del given
    after = held(cuda)
    if function not in RELEASING and after != before:
        changes = {key: (was, after[key]) for key, was in before.items() if after[key] != was}
        wrong.append(f"left {changes}")
    return outcome, wrong


def sweep(
    cuda: Any, action: Action, most: int, log: Callable[[str], object] = lambda _: None
) -> list[str]:
    """Fail calls of an action one by one, at most `most` of each function; return what is wrong.

    `log` receives a line for each, for a run by hand.
    """
    calls = calls_of(cuda, action)
    found = []
    for function, n_calls in sorted(calls.items()):
        codes = (UNKNOWN, OUT_OF_MEMORY) if function in TAKING else (UNKNOWN,)
        for nth, code in ((nth, code) for nth in positions(n_calls, most) for code in codes):
            cuda_backend._known.clear()  # so that each load makes the same calls
            outcome, wrong = attempt(cuda, action, function, nth, code)
            line = f"{function}, call {nth} of {n_calls} returns {code}: {outcome}"
            log(" WRONG ".join([line, *wrong]))
            found += [f"{line}: {one}" for one in wrong]
    return found
