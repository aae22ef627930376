"""A stack of blocks with weights on a disk; as a process, its peak: see bench_streaming_disk.

Usage: streaming_process.py FOLDER BUDGET_BYTES. Prints JSON: `imported_bytes` of memory after all
imports, `peak_bytes` the maximum, sampled every 20 ms, `streamed_bytes` of a pass, `checksum` of
the result. Memory is the proportional set size without files, such as libraries that other
processes share: the resident set counts a page of the ring once for each weight that is mapped
there.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

import offload
from models import Block


@dataclasses.dataclass(frozen=True)
class Stack:
    """Blocks in sequence, and their inputs."""

    n_blocks: int
    width: int
    heads: int
    tokens: int

    @property
    def title(self) -> str:
        """The title in tables and plots."""
        return f"{self.n_blocks} GPT blocks, width {self.width}, {self.tokens} tokens"

    def model(self) -> nn.Sequential:
        """The stack with its weights in memory, the same each time."""
        torch.manual_seed(0)
        return self._build()

    def without_memory(self) -> nn.Sequential:
        """The stack on the meta device."""
        with torch.device("meta"):
            return self._build()

    def inputs(self) -> torch.Tensor:
        """The stack's inputs, the same each time."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(1, self.tokens, self.width, generator=generator)

    def _build(self) -> nn.Sequential:
        return nn.Sequential(*(Block(self.width, self.heads) for _ in range(self.n_blocks))).eval()


STACK = Stack(n_blocks=8, width=1_024, heads=16, tokens=64)


def memory_bytes() -> int:
    """The process's proportional share of mappings that are not of files."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kinds = ("Pss_Anon:", "Pss_Shmem:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))


class Peak:
    """Samples the memory on a separate thread until it is stopped."""

    def __init__(self) -> None:
        self._most_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self._most_bytes = max(self._most_bytes, memory_bytes())

    def end(self) -> int:
        """Stop; return the most bytes found."""
        self._over.set()
        self._thread.join()
        return max(self._most_bytes, memory_bytes())


def execute(
    build_model: Callable[[], nn.Module],
    arguments: Sequence[torch.Tensor],
    folder: str,
    budget_bytes: int,
) -> dict[str, float]:
    """Capture the model and execute it five times; return the output without `imported_bytes`."""
    peak = Peak()
    try:
        with torch.no_grad():
            captured = offload.capture(build_model(), *arguments, weights=folder)
            with captured.load(weights_budget=budget_bytes) as run:
                for _ in range(5):
                    result = run(*arguments)
                checksum = float(result.double().abs().sum())
                streamed_bytes = run.last_execution.bytes_streamed
    finally:
        peak_bytes = peak.end()
    return {"peak_bytes": peak_bytes, "streamed_bytes": streamed_bytes, "checksum": checksum}


def main(folder: str, budget_bytes: str) -> None:
    """Measure the stack of blocks under a budget, and print it."""
    torch.set_num_threads(1)
    imported_bytes = memory_bytes()
    found = execute(STACK.without_memory, [STACK.inputs()], folder, int(budget_bytes))
    print(json.dumps({"imported_bytes": imported_bytes, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
