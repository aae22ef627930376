"""Modules of offload with the names of functions that users look for: a call says what to call."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from offload.errors import BindingError

INSTEAD = {
    "compile": (
        "call torch.compile(model, backend='offload'), or offload.capture(model, x) without "
        "torch's compiler; load(fuse=True) of its result makes compiled kernels"
    ),
    "load": "call load() of the result of offload.capture(model, x) or offload.open(path)",
    "record": "call offload.capture(model, x), which records that call",
    "run": "call the result of offload.capture(model, x), or the result of its load()",
    "save": "call save(path) of the result of offload.capture(model, x)",
}
"""What to call instead, by a name in `offload`."""


class _NotCalled(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse the call.

        Raises:
            BindingError: always; it says what to call.
        """
        name = self.__name__
        raise BindingError(
            f"{name} is a module of offload, not a function: {INSTEAD[name.rpartition('.')[2]]}"
        )


def is_not_called(name: str) -> None:
    """Make a module under import say what to call instead, if it is called."""
    sys.modules[name].__class__ = _NotCalled
