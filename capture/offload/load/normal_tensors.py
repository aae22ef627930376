"""Tensors of executables do not depend on the inference mode of the load's caller."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def normal_tensors() -> Iterator[None]:
    """Let what is loaded have normal tensors, also for a caller in inference mode.

    Views of tensors made in inference mode require no gradients, by which recurrent layers choose
    their kernels (`run/recurrent_call.hpp`).
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
