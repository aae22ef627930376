"""Numbers that optimizer steps pass beside tensors, kept as tensors without dimensions.

torch makes a tensor of such a number at each launch and casts it to the dtype of the other operand,
which takes longer than the launch itself where tensors are small. Optimizer steps have many such
numbers on small tensors: counters, `eps`, decays. Only in float32 and float64 do the kernels
receive the same bits: from numbers beside bfloat16 they take more bits than a tensor of that dtype
has.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.record.storages import StorageTable

_DTYPES = (torch.float32, torch.float64)

_OPERANDS = frozenset(
    f"aten::{name}.Tensor" for name in ("add_", "sub_", "mul_", "div_", "add", "sub", "mul", "div")
)

# For each operator, the operator that takes a tensor, and the arguments behind the tensor.
_OF_LISTS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "aten::_foreach_add_.Scalar": ("aten::_foreach_add_.Tensor", (1,)),
    "aten::_foreach_mul_.Scalar": ("aten::_foreach_mul_.Tensor", ()),
    "aten::_foreach_div_.Scalar": ("aten::_foreach_div_.Tensor", ()),
}


class KeptNumbers:
    """The numbers of one recording, each kept once.

    Owner: one LaunchRecorder.
    """

    def __init__(self, table: StorageTable) -> None:
        self._table = table
        self._kept: dict[tuple[torch.dtype, float], torch.Tensor] = {}
        self._indices: set[int] = set()

    def has(self, value: int) -> bool:
        """Whether a Value is one of the kept numbers."""
        return value in self._indices

    def instead(
        self, name: str, arguments: list[Any]
    ) -> tuple[str, list[Any], tuple[torch.Tensor, ...]]:
        """The launch with tensors in place of numbers.

        Args:
            name: the operator's name.
            arguments: in schema order.

        Returns:
            The operator's name, its arguments, and the tensors inserted in them.
        """
        given = arguments[1] if len(arguments) > 1 else None
        if not isinstance(given, (int, float)) or isinstance(given, bool):
            return name, arguments, ()
        if name not in _OPERANDS and name not in _OF_LISTS:
            return name, arguments, ()
        tensors = arguments[0] if isinstance(arguments[0], (list, tuple)) else [arguments[0]]
        dtypes = {one.dtype for one in tensors if isinstance(one, torch.Tensor)}
        on_host = all(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in tensors)
        if not on_host or len(dtypes) != 1 or not dtypes.issubset(_DTYPES):
            return name, arguments, ()
        kept = self._tensor(next(iter(dtypes)), float(given))
        other, behind = _OF_LISTS.get(name, (name, tuple(arguments[2:])))
        return other, [arguments[0], kept, *behind], (kept,)

    def _tensor(self, dtype: torch.dtype, number: float) -> torch.Tensor:
        key = dtype, number
        if key not in self._kept:
            self._kept[key] = torch.tensor(number, dtype=dtype)
            tracked = self._table.add_weight(self._kept[key])
            tracked.known = True
            self._indices.add(tracked.value.index)
        return self._kept[key]
