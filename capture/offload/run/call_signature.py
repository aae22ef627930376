"""The signature of executables, whose call is native."""

from __future__ import annotations

import inspect


class CallSignature:
    """What `inspect.signature` returns for an executable; a class has none."""

    _found = inspect.signature(lambda *args, out=None, feature_map=None, **kwargs: None)

    def __get__(self, executable: object, owner: type) -> inspect.Signature:
        if executable is None:
            raise AttributeError("the class is called to make one")
        return self._found
