"""Modes of torch that a call switches inside: followed, or refused by name."""

import contextlib

import pytest
import torch
from checks import assert_same, capture, normal
from torch import nn
from torch.export import Dim

import offload

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch's own, about its flags


@contextlib.contextmanager
def switched(read, write, value):
    """A mode set by a function, and set back."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def attribute(holder, name, value):
    """A mode set by an attribute, and set back."""
    return switched(
        lambda: getattr(holder, name), lambda given: setattr(holder, name, given), value
    )


@contextlib.contextmanager
def flushing_denormals():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


backends = torch.backends
# What a call enters, and what the refusal names.
REFUSED = {
    "onednn": (lambda: backends.mkldnn.flags(enabled=False), r"mkldnn.flags\(enabled=...\): True"),
    "deterministic_onednn": (
        lambda: backends.mkldnn.flags(enabled=True, deterministic=True),
        r"mkldnn.flags\(deterministic=...\): False before, True now",
    ),
    "precision": (
        lambda: switched(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
        ),
        "torch.set_float32_matmul_precision",
    ),
    "precision_of_convolutions": (
        lambda: attribute(backends.mkldnn.conv, "fp32_precision", "bf16"),
        "mkldnn.conv.fp32_precision",
    ),
    "deterministic": (
        lambda: switched(
            torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
        ),
        "torch.use_deterministic_algorithms: False before, True now",
    ),
    "filled_memory": (
        lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
        "fill_uninitialized_memory",
    ),
    "default_dtype": (
        lambda: switched(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        "torch.set_default_dtype: torch.float32 before, torch.float64 now",
    ),
    "threads": (
        lambda: switched(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
        "torch.set_num_threads",
    ),
    "denormals": (flushing_denormals, "torch.set_flush_denormal: False before, True now"),
    "nnpack": (lambda: backends.nnpack.flags(enabled=False), "nnpack"),
}


def under(mode):
    """A call with launches before, within and behind a mode."""

    def call(x):
        y = x.sin()
        with mode():
            y = y @ y.mT + torch.zeros(1)
        return y.cos()

    return call


@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_a_mode_that_a_call_switches_is_named(name, varies):
    mode, told = REFUSED[name]
    shapes = {"dynamic_shapes": ({0: Dim("n", min=2, max=9)},)} if varies else {}
    with pytest.raises(offload.CaptureError, match=rf"test_switched_modes.py.*{told}"):
        offload.capture(under(mode), normal(3, 4), **shapes)


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_a_mode_around_the_capture_and_the_execution_is_eagers(name):
    mode, _ = REFUSED[name]
    call, given, x = under(contextlib.nullcontext), normal(3, 4), normal(3, 4)
    with mode():
        captured = offload.capture(call, given)
        assert_same(captured(x), call(x))


@torch.no_grad()
def test_a_switch_in_an_earlier_call_is_seen_at_its_first_launch():
    """A call that leaves a mode switched: only a call that finds it so computes alike."""

    def call(x):
        torch.set_float32_matmul_precision("medium")
        return x @ x.mT

    with switched(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"
    ):
        with pytest.raises(offload.CaptureError, match="set_float32_matmul_precision"):
            offload.capture(call, normal(3, 4))
        captured, x = offload.capture(call, normal(3, 4)), normal(3, 4)
        assert_same(captured(x), call(x))


# torch resolves these before it calls kernels: what they do is recorded.
FOLLOWED = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "without_autocast": lambda: torch.autocast("cpu", enabled=False),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
    "device": lambda: torch.device("cpu"),
    "attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "graphics_cards": lambda: backends.cudnn.flags(enabled=False, deterministic=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("name", FOLLOWED)
def test_other_modes_are_followed(name, varies):
    layer = nn.Linear(8, 8).eval()

    def call(x):
        with FOLLOWED[name]():
            y = layer(x) + torch.ones(8)
            y = nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])
        return (y * 2).detach()

    shapes = {"dynamic_shapes": ({0: Dim("n", min=2, max=9)},)} if varies else {}
    with torch.no_grad():
        captured = offload.capture(call, normal(5, 8), **shapes)
        for n in (2, 9) if varies else (5,):
            x = normal(n, 8)
            assert_same(captured(x), call(x))


def test_a_mode_under_which_nothing_is_launched_is_no_matter():
    def call(x):
        with backends.mkldnn.flags(enabled=False):
            y = x.view(-1)
        return y.sin()

    captured, x = capture(call, normal(3, 4)), normal(3, 4)
    assert_same(captured(x), call(x))


def test_a_refusal_that_the_call_swallows_is_raised():
    def call(x):
        try:
            with backends.mkldnn.flags(enabled=False):
                return x @ x.mT
        except offload.CaptureError:
            return x + 1

    with pytest.raises(offload.CaptureError, match="mkldnn"):
        capture(call, normal(3, 3))
