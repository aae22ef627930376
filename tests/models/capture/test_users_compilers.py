"""Compilers of the user, given to torch.compile, are refused: they may compute anything."""

import pytest
import torch
from checks import capture, normal
from compiled_models import (
    Block,
    compiled_function,
    doubled,
    doubling,
    gelu_twice,
    hidden_doubling,
)
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager

import offload

pytestmark = pytest.mark.usefixtures("compiler_reset")


def eager(graph, example_inputs):  # the name of one of torch's compilers
    return doubled(graph, example_inputs)


def registered_by_name():
    """torch lists it beside its own."""
    name = "doubled_by_offload_tests"
    if name not in torch._dynamo.list_backends(exclude_tags=None):
        torch._dynamo.register_backend(doubled, name=name)
    return name


@pytest.mark.parametrize(
    "backend",
    [lambda: doubled, lambda: eager, registered_by_name, lambda: aot_autograd(fw_compiler=doubled)],
    ids=["its own", "named as torch's", "registered by name", "part of a compiler of torch's"],
)
@pytest.mark.parametrize(
    ("make", "name"), [(lambda: gelu_twice, "the function"), (Block, "the model")]
)
def test_a_users_compiler_is_refused(make, name, backend):
    model = torch.compile(make(), backend=backend())
    expected = rf"{name} is compiled by torch\.compile, .*capture the original.*_orig_mod"
    with pytest.raises(offload.CaptureError, match=expected):
        offload.capture(model, normal(3, 8))


def doubled_behind_a_reference(x):
    return hidden_doubling()(x)


def doubled_inside(x):
    return torch.compile(gelu_twice, backend=doubled)(x)


@pytest.mark.parametrize("function", [doubled_behind_a_reference, doubled_inside])
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_users_compiler_that_only_the_call_shows_is_refused(function, is_warm):
    if is_warm:
        assert torch.equal(function(normal(3, 8) * 0), torch.full((3, 8), 2.0))
    with pytest.raises(
        offload.CaptureError, match=r"gelu_twice is compiled by a function of your own"
    ):
        offload.capture(function, normal(3, 8))


def test_a_users_compiler_in_place_of_all_is_refused():
    with (
        torch.compiler.set_stance(force_backend=doubled),
        pytest.raises(offload.CaptureError, match="is compiled by a function of your own"),
    ):
        offload.capture(compiled_function, normal(3, 8))


@pytest.mark.parametrize("function", [doubling, doubled_behind_a_reference])
def test_originals_that_the_user_has_torch_call_are_recorded(function):
    """Whatever would compile them."""
    x = normal(3, 8)
    with torch.compiler.set_stance("force_eager"):
        captured = capture(function, x)
        assert torch.equal(captured(x), function(x))
    assert torch.equal(captured(x), gelu_twice(x))


def test_a_compiler_of_torchs_given_as_a_function():
    captured = capture(torch.compile(gelu_twice, backend=aot_eager), normal(3, 8))
    x = normal(3, 8)
    assert torch.equal(captured(x), gelu_twice(x))
