"""Refusals of an operator on a GPU: which are expected, and which are defects of offload.

The kinds are those of docs/backends/relocation.md that a torch operator can cause by its own work.
The others of that page mean that discovery did not understand a kernel (a word that is no address,
an address in pieces, padding that is read), or that a capture or the caller went wrong: for a torch
operator they are findings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from offload.errors import CaptureError

KINDS: Mapping[str, tuple[str, ...]] = {
    "host reads, and shapes that depend on data": (
        "which a replay cannot repeat",
        "is read on the host, and an execution would have to wait for",
        "has shapes that depend on data, and an execution would have to wait for",
    ),
    "tensors on another device, and copies to the host": (
        r"makes a tensor on \w+, which a graph on cuda cannot",
        "makes a tensor on the CPU and ",
        "the captured graph copies to the host",
    ),
    "work that is illegal under capture": (
        "cannot be captured in a CUDA graph",
        "ended the capture",
        "the capture of the program's launches failed",
    ),
    "nodes that are no kernels, copies or memsets": ("which cannot be executed at new addresses",),
    "a constant address that nobody is known to keep": (
        "something keeps that address between calls",
        "memory that neither the Program nor a known library owns",
    ),
    "other bits at each execution": ("computes different bits of .* at each execution",),
    "tensors that no device's recording takes": (
        "only plain strided tensors can be recorded",
        "pass the whole tensor as input",
    ),
}
"""By kind, patterns of its messages."""

NEVER_REFUSED = frozenset(
    {
        "abs", "add", "addmm", "amax", "baddbmm", "bmm", "cat", "clamp", "clone", "cos", "div",
        "exp", "log_softmax", "matmul", "maximum", "mean", "mm", "mul", "native_layer_norm", "neg",
        "nn.functional.gelu", "nn.functional.layer_norm", "nn.functional.linear",
        "nn.functional.relu", "nn.functional.silu", "permute", "reshape", "rsqrt", "sigmoid",
        "sin", "softmax", "sqrt", "sub", "sum", "tanh", "transpose", "where",
    }
)  # fmt: skip
"""Names in torch's operator database of operators that every model uses."""


def skip_reason(operator: str, error: CaptureError) -> str | None:
    """Return why an operator may be refused (kind and message), or None if it may not be.

    Args:
        operator: its name in torch's operator database.
        error: raised by its capture, load or execution.
    """
    if operator in NEVER_REFUSED:
        return None
    for kind, patterns in KINDS.items():
        if any(re.search(pattern, str(error)) for pattern in patterns):
            return f"{kind}: {error}"
    return None
