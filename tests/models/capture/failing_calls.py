"""Calls that fail in a capture, through a block or the handle."""

from __future__ import annotations

import contextlib

import pytest
import torch
from checks import normal
from torch import nn

import offload

THROUGH = pytest.mark.parametrize("through", ["model", "handle"])

SWALLOWED = pytest.mark.parametrize("swallowed", [False, True])


class OwnError(Exception):
    pass


class Linear(nn.Linear):
    """Runs an action of the test after its launch."""

    def __init__(self, then):
        super().__init__(2, 2)
        self.then = (then,)  # not an attribute that the recorder inspects

    def forward(self, x):
        y = super().forward(x)
        self.then[0](y)
        return y


def in_block(model, through, *, swallowed, x=None):
    """One call in a block, whose own code may suppress its error."""
    x = normal(1, 2) if x is None else x
    with (
        torch.no_grad(),
        offload.capture(model) as captured,
        contextlib.suppress(Exception) if swallowed else contextlib.nullcontext(),
    ):
        (model if through == "model" else captured)(x)


def record(model, through, *, swallowed, x=None):
    """Return the error of such a block."""
    try:
        in_block(model, through, swallowed=swallowed, x=x)
    except BaseException as error:
        assert not getattr(model, "_forward_hooks", None)
        assert not getattr(model, "_forward_pre_hooks", None)
        return error
    raise AssertionError("nothing was raised")


def raised_with_cause(kind):
    """An error with cause, context and notes."""
    error = kind("said once")
    error.__cause__ = KeyError("why")
    error.__context__ = IndexError("meanwhile")
    error.add_note("a note")
    return error


def is_whole(error):
    return (
        isinstance(error.__cause__, KeyError)
        and isinstance(error.__context__, IndexError)
        and error.__notes__[0] == "a note"
        and str(error) == "said once"
    )
