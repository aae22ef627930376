"""A process whose memory is limited below its model's size: captures the model and executes it.

Usage: limited_process.py FOLDER BUDGET_BYTES LIMIT_BYTES. The limit is on address space beyond that
of the process after all imports, so that mappings count. Prints JSON: `checksum` of the result,
`peak_bytes` resident beyond the imports, `streamed_bytes` per pass.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import torch
from stored import LAYERS, WIDTH, Wide, without_memory

import offload


def status_bytes(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(folder: str, budget_bytes: str, limit_bytes: str) -> None:
    """Limit the memory, capture, and execute twice."""
    torch.set_num_threads(1)
    torch.randn(8, 8) @ torch.randn(8, 8)  # libraries allocate memory at their first use
    before = status_bytes("VmRSS")
    limit = status_bytes("VmSize") + int(limit_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    model = without_memory(lambda: Wide(WIDTH, LAYERS))
    given = torch.full((1, WIDTH), 0.5)
    with offload.capture(model, weights=folder) as captured:
        model(given)
    with captured.load(weights_budget=int(budget_bytes)) as run:
        results = [run(given) for _ in range(2)]
        streamed_bytes = run.last_execution.bytes_streamed
    assert torch.equal(*results)
    print(
        json.dumps(
            {
                "checksum": float(results[0].double().sum()),
                "peak_bytes": status_bytes("VmHWM") - before,
                "streamed_bytes": streamed_bytes,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
