"""Wrappers of torch.distributed whose work no recording can follow: refused by name."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.errors import CaptureError

_REPLICATED = (
    "its reducer sends gradients in buckets from autograd's hooks, which the recorder cannot see: "
    "capture the module that it wraps (model.module), and in a step with training=True all_reduce "
    "the gradients (torch.distributed.all_reduce, or "
    "torch.distributed._functional_collectives.all_reduce)"
)
_SHARDED = (
    "it frees and gathers the storages of parameters around each module, which a replay would not "
    "find where they were: capture the model with whole parameters, and all_reduce the gradients "
    "in a step with training=True; or split it by DTensor (torch.distributed.tensor.parallel)"
)
# torch's classes by name, so that unused ones are not imported.
_WRAPPERS = {
    "DistributedDataParallel": _REPLICATED,
    "FullyShardedDataParallel": _SHARDED,
    "FSDPModule": _SHARDED,
}


def refuse_parallel_wrappers(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse modules that wrap others for data parallel training.

    Raises:
        CaptureError: one of them does; it names the wrapper, and what to capture instead.
    """
    for module in modules:
        for kind in type(module).__mro__:
            advice = _WRAPPERS.get(kind.__qualname__)
            if advice is not None and kind.__module__.startswith("torch."):
                raise CaptureError(f"{kind.__qualname__} cannot be captured: {advice}")
