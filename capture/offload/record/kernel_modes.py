"""Modes of torch by which kernels choose how they compute, apart from their arguments.

An execution computes under the modes of its caller, as eager does, and does not switch them between
launches. A call that switches one inside is refused, unless no launch runs meanwhile. Modes that
torch resolves before it calls kernels need no such care: autocast, the default device, gradients
and the choice of attention become other launches or arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import backends

from offload.errors import CaptureError

_Modes = Mapping[str, Callable[[], object]]

# The least positive double: 0 in arithmetic that flushes denormal numbers.
_LEAST = 2.0**-1074


def _flushes_denormals() -> bool:
    return _LEAST * 1.0 == 0.0


def _of(holder: object, name: str) -> Callable[[], object]:
    """Read an attribute, which torch computes; None where this torch lacks it.

    Args:
        holder: of the attribute.
        name: its name, or a path of names.
    """
    *outer, last = name.split(".")

    def read() -> object:
        found = holder
        for one in outer:
            found = getattr(found, one, None)
        return getattr(found, last, None)

    return read


_GENERAL: _Modes = {
    "torch.set_default_dtype": torch.get_default_dtype,
    "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "torch.utils.deterministic.fill_uninitialized_memory": _of(
        torch.utils.deterministic, "fill_uninitialized_memory"
    ),
    "torch.backends.fp32_precision": _of(backends, "fp32_precision"),
}
_OF_CPU: _Modes = {
    "torch.backends.mkldnn.flags(enabled=...)": _of(backends.mkldnn, "enabled"),
    "torch.backends.mkldnn.flags(deterministic=...)": _of(backends.mkldnn, "deterministic"),
    "torch.backends.mkldnn.flags(fp32_precision=...)": _of(backends.mkldnn, "fp32_precision"),
    "torch.set_float32_matmul_precision": _of(backends.mkldnn, "matmul.fp32_precision"),
    "torch.backends.mkldnn.conv.fp32_precision": _of(backends.mkldnn, "conv.fp32_precision"),
    "torch.backends.mkldnn.rnn.fp32_precision": _of(backends.mkldnn, "rnn.fp32_precision"),
    "torch.backends.nnpack.flags": torch._C._get_nnpack_enabled,
    "torch.backends.quantized.engine": _of(backends.quantized, "engine"),
    "torch.set_num_threads": torch.get_num_threads,
    "torch.set_flush_denormal": _flushes_denormals,
}
_OF_CUDA: _Modes = {
    "torch.backends.cudnn.flags(enabled=...)": _of(backends.cudnn, "enabled"),
    "torch.backends.cudnn.flags(benchmark=...)": _of(backends.cudnn, "benchmark"),
    "torch.backends.cudnn.flags(deterministic=...)": _of(backends.cudnn, "deterministic"),
    "torch.backends.cudnn.flags(fp32_precision=...)": _of(backends.cudnn, "fp32_precision"),
    "torch.backends.cudnn.conv.fp32_precision": _of(backends.cudnn, "conv.fp32_precision"),
    "torch.backends.cudnn.rnn.fp32_precision": _of(backends.cudnn, "rnn.fp32_precision"),
    "torch.set_float32_matmul_precision": _of(backends.cuda, "matmul.fp32_precision"),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": _of(
        backends.cuda, "matmul.allow_fp16_reduced_precision_reduction"
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": _of(
        backends.cuda, "matmul.allow_bf16_reduced_precision_reduction"
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": _of(
        backends.cuda, "matmul.allow_fp16_accumulation"
    ),
    "torch.backends.cuda.preferred_blas_library": backends.cuda.preferred_blas_library,
    "torch.backends.cuda.preferred_linalg_library": backends.cuda.preferred_linalg_library,
}
_OF_NPU: _Modes = {
    "torch.npu.matmul.allow_hf32": _of(torch, "npu.matmul.allow_hf32"),
    "torch.npu.conv.allow_hf32": _of(torch, "npu.conv.allow_hf32"),
}
_OF_DEVICE: Mapping[str, _Modes] = {"cpu": _OF_CPU, "cuda": _OF_CUDA, "npu": _OF_NPU}


class KernelModes:
    """The modes when a call began. Owner: one Recorder, on whose thread it is used."""

    def __init__(self, device: torch.device) -> None:
        """Note the modes.

        Args:
            device: of the recording; modes of other devices are not read.
        """
        self._modes = {**_GENERAL, **_OF_DEVICE.get(device.type, {})}
        self._at_begin = self._now()

    def _now(self) -> list[object]:
        return [read() for read in self._modes.values()]

    def change(self) -> str:
        """Return the first mode that differs now, in words; empty if none does."""
        now = self._now()
        if now == self._at_begin:
            return ""
        both = zip(self._modes, self._at_begin, now, strict=True)
        return next(f"{name}: {was} before, {is_} now" for name, was, is_ in both if was != is_)


def switched(place: str, operator: str, change: str) -> CaptureError:
    """The refusal of a launch under modes that the call has switched.

    Args:
        place: the user's line.
        operator: the launch's.
        change: as `KernelModes.change` returns it.
    """
    return CaptureError(
        f"{place}: {operator} runs after the call has switched a mode of torch ({change}), which "
        "an execution does not switch: set it before the call instead, and around each execution"
    )
