"""The decoder with weights streamed to a GPU; as a process, its peak: see bench_cuda_streaming.

Usage: device_streaming_process.py FOLDER BUDGET_BYTES. Prints the same as streaming_process.py.
`imported_bytes` include CUDA's context and the libraries that a matrix product loads, which any
process that computes on the device has. Host memory that is registered with the driver counts, as
do all anonymous mappings.
"""

from __future__ import annotations

import json
import sys

import torch

import device_decoder
import streaming_process

N_TOKENS = 256


def main(folder: str, budget_bytes: str) -> None:
    """Measure the decoder under a budget, and print it."""
    square = torch.ones(64, 64, dtype=device_decoder.DTYPE, device="cuda")
    (square @ square).sum().item()
    imported_bytes = streaming_process.memory_bytes()
    found = streaming_process.execute(
        device_decoder.without_memory,
        device_decoder.inputs(N_TOKENS, "cuda"),
        folder,
        int(budget_bytes),
    )
    print(json.dumps({"imported_bytes": imported_bytes, **found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
