"""Memory that the caller provides: buffers for results (`out=`), and the feature map."""

from __future__ import annotations

from typing import Any

import torch

from offload.errors import BindingError
from offload.program.structure import Structure


def buffers_of(structure: Structure, n_results: int, out: Any) -> list[torch.Tensor | None]:
    """Return the buffers of `out=`, nested like the result, by leaf; None where absent.

    Raises:
        BindingError: `out` is nested differently, or holds anything but tensors and None.
    """
    buffers: list[torch.Tensor | None] = [None] * n_results
    _take(structure, out, "out", buffers)
    return buffers


def _take(structure: Structure, out: Any, where: str, buffers: list[torch.Tensor | None]) -> None:
    is_fixed = structure.kind == "constant" and not isinstance(out, torch.Tensor)
    if out is None or is_fixed:
        return
    if structure.kind == "tensor":
        if not isinstance(out, torch.Tensor):
            raise BindingError(
                f"{where}: expected a tensor or None, got a {type(out).__qualname__}"
            )
        if buffers[structure.leaf] is not None and buffers[structure.leaf] is not out:
            raise BindingError(f"{where}: two buffers for one tensor of the result")
        buffers[structure.leaf] = out
        return
    items: list[Any]
    if hasattr(out, "keys") and structure.keys:
        if set(out.keys()) - set(structure.keys):
            raise BindingError(
                f"{where}: expected keys among {list(structure.keys)}, got {list(out.keys())}"
            )
        items = [out.get(key) for key in structure.keys]
    elif isinstance(out, (list, tuple)) and len(out) == len(structure.children):
        items = list(out)
    elif structure.kind == "object" and structure.container is type(out):
        items = [getattr(out, name, None) for name in structure.keys]
    else:
        kept = f"{structure.type_name}, or " if structure.kind == "object" else ""
        raise BindingError(
            f"{where}: expected buffers nested like the result ({kept}a list, tuple or dict) of "
            f"{len(structure.children)} items, got a {type(out).__qualname__}"
        )
    for position, (child, item) in enumerate(zip(structure.children, items, strict=True)):
        _take(child, item, f"{where}[{position}]", buffers)


def check_feature_map(feature_map: object, *, moves: bool) -> None:
    """Check the argument of `feature_map=`; `moves`: the loaded program can use other memory.

    Raises:
        BindingError: it is not a tensor, or the program uses no other memory.
    """
    if not isinstance(feature_map, torch.Tensor):
        raise BindingError(
            f"feature_map: expected a uint8 tensor, got a {type(feature_map).__qualname__}"
        )
    if not moves:
        raise BindingError(
            "feature_map: the feature map of this program stays where it was loaded: execute "
            "without feature_map="
        )
