"""Modules of offload with the names of functions that users look for: a call says what to call."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NoReturn

from offload.errors import BindingError

INSTEAD = {
    "compile": (
        "call torch.compile(model, backend='offload'), or offload.capture(model, x) without "
        "torch's compiler; load(fuse=True) of what that gives makes compiled kernels"
    ),
    "load": "call load() of what offload.capture(model, x) or offload.open(path) gives",
    "record": "call offload.capture(model, x), which records that call",
    "run": "call what offload.capture(model, x) gives, or what its load() gives",
    "save": "call save(path) of what offload.capture(model, x) gives",
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
            f"{name} is a part of offload's code, and no function: "
            f"{INSTEAD[name.rpartition('.')[2]]}"
        )


def is_not_called(name: str) -> None:
    """Make a module under import say what to call instead, if it is called."""
    sys.modules[name].__class__ = _NotCalled
