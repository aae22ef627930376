"""Views of a Program as native tensor layouts."""

from __future__ import annotations

from offload.interpreter.torch_names import find_dtype
from offload.native import _native
from offload.program import TensorView


def native_layout(view: TensorView) -> _native.TensorLayout:
    """A view's shape, strides and dtype for the native side."""
    return _native.TensorLayout(
        view.shape, view.strides, find_dtype(view.dtype), view.conjugate, view.negative
    )
