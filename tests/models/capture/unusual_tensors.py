"""A process that captures models and inputs with tensors that do not view plain memory.

A separate process, since such a tensor taken for plain memory would end it. Prints JSON: for each
kind the error of the capture, as `Class: message`, or what it captured.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

import offload


def distributed() -> torch.Tensor:
    """A DTensor of a group of one process."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    return distribute_tensor(torch.rand(4, 4), init_device_mesh("cpu", (1,)), [Replicate()])


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "TwoTensor": lambda: TwoTensor(torch.rand(4, 4), torch.rand(4, 4)),
    "DTensor": distributed,
    "MaskedTensor": lambda: torch.masked.masked_tensor(torch.eye(4), torch.eye(4) > 0),
    "functional": lambda: torch._to_functional_tensor(torch.eye(4)),
    "zeros": lambda: torch._efficientzerotensor((4, 4)),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "compressed": lambda: torch.eye(4).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8),
    "mkldnn": lambda: torch.eye(4).to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([torch.eye(4)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.eye(4)], layout=torch.jagged),
    "meta": lambda: torch.eye(4, device="meta"),
}


class Holding(nn.Module):
    """A module that holds a tensor as an attribute, a buffer or in a list, or does not use it."""

    def __init__(self, tensor: torch.Tensor, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how
        if how == "list":
            self.held = [tensor]
        else:
            self.register_buffer("held", tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use the held tensor, unless it is to stay unused."""
        y = self.linear(x)
        if self.how == "unused":
            return y
        return y + (self.held[0] if self.how == "list" else self.held).detach().sum()


def outcome(capture: Callable[[], object]) -> str:
    """The outcome of a capture."""
    try:
        capture()
    except Exception as error:
        return f"{type(error).__qualname__}: {error}"
    return "captured"


def main() -> None:
    """Try each kind in each place."""
    warnings.simplefilter("ignore")
    found = {}
    x = torch.rand(4, 4)
    with contextlib.redirect_stderr(io.StringIO()):
        for kind, make in KINDS.items():
            tensor = make()
            for how in ("buffer", "list", "unused"):
                model = Holding(tensor, how)
                found[f"{kind} {how}"] = outcome(lambda model=model: offload.capture(model, x))
            found[f"{kind} closure"] = outcome(
                lambda tensor=tensor: offload.capture(lambda x: x + tensor.detach().sum(), x)
            )
            found[f"{kind} input"] = outcome(
                lambda tensor=tensor: offload.capture(lambda x: x + 1, tensor)
            )
        model = nn.Linear(4, 4, bias=False)
        model.weight = nn.Parameter(KINDS["TwoTensor"]())
        found["TwoTensor parameter"] = outcome(lambda: offload.capture(model, x))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
