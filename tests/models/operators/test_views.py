"""Views of inputs and activations: read, returned and written through; shapes changed in place."""

from __future__ import annotations

import warnings

import pytest
import torch
from checks import Call, check, normal, normals, refusal

HERE = "test_views.py:"

VIEWS = {
    "alias": lambda x: x.view_as(x),
    "as_strided": lambda x: x.as_strided((2, 3), (3, 1), 2),
    "broadcast_to": lambda x: x.broadcast_to(3, 4, 6),
    "chunk": lambda x: x.chunk(2, dim=1)[1],
    "detach": lambda x: x.detach(),
    "diagonal": lambda x: x.diagonal(),
    "expand": lambda x: x[:1].expand(5, 6),
    "flatten": lambda x: x.flatten(),
    "index": lambda x: x[1:, None, ..., 2],
    "mT": lambda x: x.mT,
    "movedim": lambda x: x.movedim(0, 1),
    "narrow": lambda x: x.narrow(1, 2, 3),
    "permute": lambda x: x.permute(1, 0),
    "ravel": lambda x: x.ravel(),
    "real": lambda x: x.real,
    "reshape": lambda x: x.reshape(3, 8),
    "select": lambda x: x.select(0, 1),
    "slice": lambda x: x[::2, 1::3],
    "split": lambda x: x.split([1, 2, 3], dim=1)[2],
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "tensor_split": lambda x: x.tensor_split(3, dim=1)[1],
    "transpose": lambda x: x.transpose(0, 1)[2:],
    "unbind": lambda x: x.unbind(1)[3],
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "view": lambda x: x.view(2, 12),
    "view as bytes": lambda x: x.view(torch.uint8)[:, 4:8].view(torch.float32),
    "view as complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)).real,
    "view as complex, conjugate": lambda x: torch.view_as_complex(x.view(4, 3, 2)).conj().imag,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", VIEWS)
def test_views(kind):
    """On an activation and on an input: read, returned, and written through where possible."""
    view = VIEWS[kind]
    calls = normals(2, 4, 6)
    check(lambda x: view(x) * 2, *calls)
    check(lambda x: view(x * 1), *calls)
    check(view, *calls)
    if torch._debug_has_internal_overlap(view(normal(4, 6))) or kind == "unfold":
        return

    def through_activation(x):
        y = x * 1
        view(y).mul_(3).add_(1)
        return y, view(y)

    def through_input(x):
        view(x).mul_(3).add_(1)
        return x.sum()

    check(through_activation, *calls)
    check(through_input, *calls)


def test_storage_offsets_are_the_callers():
    """as_strided counts from the beginning of the storage, wherever the input lies in it."""

    def function(x):
        return x.as_strided((2, 2), (2, 1), 6) * 2, torch.ones(3) * x.storage_offset()

    def call():
        return Call(normal(20)[5:15])

    check(function, call(), call())


def test_views_beyond_the_input_are_refused():
    """A replay's input may have no memory there."""
    base = normal(20)
    assert HERE in refusal(lambda x: x.as_strided((2,), (1,), 2) * 2, base[5:15])
    assert HERE in refusal(lambda x: x.as_strided((2,), (1,), 14) * 2, base[5:15])


def test_in_place_changes_of_shape():
    def function(x):
        y = (x * 2).t_()
        y.unsqueeze_(0).squeeze_().transpose_(0, 1)
        return y, y.resize_(2, 3) if y.numel() == 6 else y

    check(function, *normals(2, 3, 4))


def test_out_into_an_empty_tensor():
    def function(x):
        grown = torch.empty(0)
        torch.add(x, 1, out=grown)
        torch.mul(grown, 2, out=grown)
        return grown, torch.sin(x, out=torch.empty_like(x))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(function, *normals(2, 3))
