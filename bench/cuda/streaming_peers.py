"""Peers that run a model larger than its budget of device memory, with weights on the host.

Each peer gets a decoder on the CPU, and returns a call that takes tensors of the GPU. Their budget
is what their own scheme allows; a peer that keeps on the device only weights in use has no budget.
"""

from __future__ import annotations

import collections
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from measurements import reason

Peer = Callable[[nn.Module, int], Callable[..., Any]]


def accelerate_offload(model: nn.Module, budget_bytes: int) -> Callable[..., Any]:
    """accelerate.cpu_offload: each module's weights are copied just before it runs."""
    accelerate = importlib.import_module("accelerate")
    offloaded: Callable[..., Any] = accelerate.cpu_offload(model, torch.device("cuda"))
    return offloaded


def diffusers_groups(model: nn.Module, budget_bytes: int) -> Callable[..., Any]:
    """Group offloading of diffusers: the next leaf is copied on a separate stream."""
    hooks = importlib.import_module("diffusers.hooks")
    hooks.apply_group_offloading(
        model,
        onload_device=torch.device("cuda"),
        offload_device=torch.device("cpu"),
        offload_type="leaf_level",
        use_stream=True,
    )
    return model


class LeastRecentlyUsed:
    """Layers in as many places as the budget has, the next one copied while this one runs.

    Weights are pinned on the host. The least recently used layer is evicted, which in a cycle is
    the next one needed.
    """

    def __init__(self, model: nn.Module, budget_bytes: int) -> None:
        self._model = model
        self._layers = list(model.layers)
        for layer in self._layers:
            for parameter in layer.parameters():
                parameter.data = parameter.data.pin_memory()
        rest = [one for name, one in model.named_children() if name != "layers"]
        for module in rest:
            module.cuda()
        self._host = [[one.data for one in layer.parameters()] for layer in self._layers]
        layer_bytes = sum(one.nbytes for one in self._host[0])
        n_places = max(2, min(len(self._layers), budget_bytes // layer_bytes))
        self._places = [[torch.empty_like(one, device="cuda") for one in self._host[0]]
                        for _ in range(n_places)]  # fmt: skip
        self._free = list(range(n_places))
        self._held: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._copying = torch.cuda.Stream()
        self._arrived: dict[int, torch.cuda.Event] = {}
        self._used: dict[int, torch.cuda.Event] = {}  # by place, its last reader
        for index, layer in enumerate(self._layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._before(index))
            layer.register_forward_hook(lambda *_, index=index: self._after(index))

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Run the model."""
        result: torch.Tensor = self._model(*inputs)
        return result

    @property
    def n_places(self) -> int:
        """The number of layers on the device at once."""
        return len(self._places)

    def _before(self, index: int) -> None:
        self._fetch(index)
        self._held.move_to_end(index)
        torch.cuda.current_stream().wait_event(self._arrived[index])
        place = self._places[self._held[index]]
        for parameter, memory in zip(self._layers[index].parameters(), place, strict=True):
            parameter.data = memory
        self._fetch((index + 1) % len(self._layers))

    def _after(self, index: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._used[self._held[index]] = event

    def _fetch(self, index: int) -> None:
        if index in self._held:
            return
        if self._free:
            place = self._free.pop()
        else:
            _, place = self._held.popitem(last=False)
        self._held[index] = place
        with torch.cuda.stream(self._copying):
            if place in self._used:
                self._copying.wait_event(self._used[place])
            for memory, host in zip(self._places[place], self._host[index], strict=True):
                memory.copy_(host, non_blocking=True)
            self._arrived[index] = torch.cuda.Event()
            self._arrived[index].record()


PEERS: Mapping[str, Peer] = {
    "accelerate, cpu_offload": accelerate_offload,
    "diffusers, group offloading": diffusers_groups,
    "LRU, one layer ahead": LeastRecentlyUsed,
}


def prepare(
    make: Callable[[], nn.Module],
    inputs: tuple[torch.Tensor, ...],
    expected: torch.Tensor,
    budget_bytes: int,
    names: tuple[str, ...] = tuple(PEERS),
) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """Return the peers with the expected result, and the others with the reason.

    `make` returns a new model with its weights on the CPU for each peer.
    """
    present, absent = {}, {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = PEERS[name](make(), budget_bytes)
                torch.testing.assert_close(call(*inputs), expected, rtol=3e-2, atol=3e-2)
        except Exception as error:  # any error of a peer is reported as its absence
            absent[name] = reason(error)
        else:
            present[name] = call
    return present, absent
