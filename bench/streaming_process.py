"""A stack of blocks with weights on a disk, and as a process its peak: see bench_streaming_disk.

Usage: streaming_process.py FOLDER BUDGET_BYTES. Prints JSON: `imported_bytes` resident when all is
imported, `peak_bytes` the most ever resident, `streamed_bytes` of a pass, `checksum` of the result.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import nn

import offload
from memory_process import status_bytes
from models import Block

N_BLOCKS, WIDTH, HEADS, TOKENS = 8, 1_024, 16, 64
TITLE = f"{N_BLOCKS} GPT blocks, width {WIDTH}, {TOKENS} tokens"


def build() -> nn.Sequential:
    return nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(N_BLOCKS))).eval()


def model() -> nn.Sequential:
    """The stack with its weights in memory, the same each time."""
    torch.manual_seed(0)
    return build()


def without_memory() -> nn.Sequential:
    """The stack on the meta device."""
    with torch.device("meta"):
        return build()


def inputs() -> torch.Tensor:
    """What the stack takes, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, TOKENS, WIDTH, generator=generator)


def main(folder: str, budget_bytes: str) -> None:
    """Capture the stack, and execute it five times under a budget."""
    torch.set_num_threads(1)
    imported_bytes = status_bytes("VmRSS")
    with torch.no_grad():
        x = inputs()
        captured = offload.capture(without_memory(), x, weights=folder)
        with captured.load(weights_budget=int(budget_bytes)) as run:
            for _ in range(5):
                result = run(x)
            streamed_bytes = run.last_execution.bytes_streamed
    found = {
        "imported_bytes": imported_bytes,
        "peak_bytes": status_bytes("VmHWM"),
        "streamed_bytes": streamed_bytes,
        "checksum": float(result.double().abs().sum()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
