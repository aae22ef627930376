"""Calls of the Ascend runtime's C ABI from Python."""

from __future__ import annotations

import ctypes


class AclError(Exception):
    """A call of the runtime failed, with this code and text."""

    def __init__(self, function: str, code: int, text: str):
        super().__init__(f"{function} gave {code}: {text}")
        self.code = code


class AclCalls:
    """Functions of one library of the runtime, or of a process that has loaded all of them."""

    def __init__(self, library: ctypes.CDLL):
        self.library = library

    def has(self, function: str) -> bool:
        """Return whether the library has such a function."""
        return hasattr(self.library, function)

    def code(self, function: str, *arguments: object) -> int:
        """Call a function of the ABI and return its error code; integers are passed in 64 bits."""
        called = getattr(self.library, function)
        return called(*(_argument(argument) for argument in arguments))

    def call(self, function: str, *arguments: object) -> None:
        """Call a function of the ABI. AclError with the code and text if it fails."""
        code = self.code(function, *arguments)
        if code != 0:
            raise AclError(function, code, self.recent_text())

    def make(self, function: str, *arguments: object) -> int:
        """Return the value that a function puts into its first argument, a pointer to 8 bytes."""
        result = ctypes.c_uint64()
        self.call(function, ctypes.byref(result), *arguments)
        return result.value

    def recent_text(self) -> str:
        """Return the text of aclGetRecentErrMsg, which clears it."""
        ask = self.library.aclGetRecentErrMsg
        ask.restype = ctypes.c_char_p
        return (ask() or b"").decode(errors="replace")


def _argument(value: object) -> object:
    if isinstance(value, int):
        return ctypes.c_int64(value) if value < 0 else ctypes.c_uint64(value)
    return value
