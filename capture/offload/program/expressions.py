"""Expressions: numbers of a Program with varying sizes, as arithmetic over these sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from offload.native import _planner

Instruction = tuple[str, int | float]
"""An operation of native/include/offload/expressions.hpp, and its number if it has one."""

INTEGER, REAL, SIZE = "integer", "real", "size"

_SIGNS = {
    "add": "+", "multiply": "*", "floor_divide": "//", "modulo": "%", "power": "**",
    "equal": "==", "not_equal": "!=", "less": "<", "less_equal": "<=", "true_divide": "/",
    "and": "and", "or": "or",
}  # fmt: skip
_OPERANDS = {
    "not": 1, "to_real": 1, "square_root": 1, "logarithm": 1, "floor": 1, "ceiling": 1,
    "truncate": 1, "round": 1, "exponential": 1, "binary_logarithm": 1, "sine": 1, "cosine": 1,
    "where": 3,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Expression:
    """One number as postfix code over sizes; `size` instructions name a Dim by its position."""

    code: tuple[Instruction, ...]

    def text(self, names: Sequence[str]) -> str:
        """The expression in infix form.

        Args:
            names: of the Dims.
        """
        stack: list[str] = []
        for operation, number in self.code:
            if operation == SIZE:
                stack.append(names[int(number)])
            elif operation in (INTEGER, REAL):
                stack.append(repr(number))
            else:
                n_operands = _OPERANDS.get(operation, 2)
                operands = stack[-n_operands:]
                del stack[-n_operands:]
                sign = _SIGNS.get(operation)
                if sign is None:
                    stack.append(f"{operation}({', '.join(operands)})")
                else:
                    stack.append(f"({operands[0]} {sign} {operands[1]})")
        text = stack[0]
        return text[1:-1] if text.startswith("(") and text.endswith(")") else text

    @property
    def dims(self) -> frozenset[int]:
        """The positions of the Dims that it depends on."""
        return frozenset(int(number) for operation, number in self.code if operation == SIZE)


def expressions(n_dims: int, codes: Sequence[Expression]) -> _planner.Expressions:
    """Compile expressions over the same Dims for native evaluation.

    Raises:
        BindingError: one is not an expression over `n_dims` Dims.
    """
    return _planner.Expressions(n_dims, [list(one.code) for one in codes])
