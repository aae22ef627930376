"""Models that draw random numbers on an NPU, and the states of its generators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from ascend_simulator import AscendSimulator

import offload

N = 64


def default_generator() -> torch.Generator:
    torch.npu.init()
    return torch.npu.default_generators[0]


def states(generators: Sequence[torch.Generator]) -> list[tuple[int, int]]:
    return [(one.initial_seed(), one.get_offset()) for one in generators]


def check_draws(
    run: offload.Executable,
    model: Callable[..., torch.Tensor],
    *inputs: torch.Tensor | torch.Generator,
) -> torch.Tensor:
    """Check that an execution gives eager's results from the same states, and advances them so."""
    used = [default_generator(), *(one for one in inputs if isinstance(one, torch.Generator))]
    before = [one.get_state() for one in used]
    expected, after = model(*inputs), states(used)
    for generator, state in zip(used, before, strict=True):
        generator.set_state(state)
    got = run(*inputs)
    assert torch.equal(got, expected)
    assert states(used) == after
    return got


OPERATORS = {
    "dropout": lambda x: F.dropout(x, 0.25, training=True),
    "rand": lambda x: x + torch.rand(N, device=x.device),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(N, device=x.device),
    "uniform": lambda x: x.clone().uniform_(2, 3),
    "normal": lambda x: x.clone().normal_(1, 2),
    "integers": lambda x: x + torch.randint(0, 9, (N,), device=x.device),
    "exponential": lambda x: x.clone().exponential_(),
    "several": lambda x: (
        F.dropout(x, 0.5, training=True) * torch.rand_like(x) + torch.randn_like(x)
    ),
}


def draw_from_both(
    x: torch.Tensor, first: torch.Generator, second: torch.Generator
) -> torch.Tensor:
    """Draw from each generator, and from torch's own."""
    x = x.clone().uniform_(generator=second) + torch.rand_like(x)
    return x + x.clone().normal_(generator=first) * x.clone().uniform_(generator=second)


def copies_of(
    simulator: AscendSimulator, run: offload.Executable, *inputs: torch.Tensor
) -> list[str]:
    """The calls of an execution that copy or launch."""
    torch.npu.synchronize()
    simulator.start_trace()
    run(*inputs[:-1], out=inputs[-1])
    torch.npu.synchronize()
    names = ("aclrtMemcpyAsync", "aclrtLaunch", "aclmdlRIExecuteAsync")
    return [one for one in simulator.trace if one.startswith(names)]
