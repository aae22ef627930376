"""Operators whose loops could differ from torch's at values that no proof has seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

import offload
from offload.compile.toolchain import CompilerMissing, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.long]

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

Function = Callable[..., torch.Tensor]


def fused(function: Function, *given: torch.Tensor) -> offload.Executable:
    """The fused model, executed on the given inputs."""
    run = offload.capture(function, *(one.clone() for one in given)).load(fuse=True)
    run(*(one.clone() for one in given))
    return run


@pytest.mark.parametrize(
    "function",
    [torch.expm1, torch.erf, torch.atanh, functional.elu, functional.celu, functional.selu],
)
@torch.no_grad()
def test_numbers_near_zero_keep_their_digits(function):
    x = torch.rand(64) - 0.5
    run = fused(function, x)
    for scale in (1e-3, 1e-6, 1e-12, 1e-30):
        torch.testing.assert_close(run(x * scale), function(x * scale), rtol=1e-6, atol=0)


@torch.no_grad()
def test_what_vectors_cannot_hold_has_a_logarithm():
    x = torch.rand(64) + 1
    run = fused(lambda x: torch.acosh(x) * 2, x)
    for far in (x * 1e30, x * 1e18, (x - 1) * 1e-3 + 1):
        torch.testing.assert_close(run(far), torch.acosh(far) * 2, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@torch.no_grad()
def test_the_next_number_is_torchs(dtype):
    x, up = torch.rand(64).to(dtype), torch.full((64,), torch.inf, dtype=dtype)
    run = fused(lambda x, up: torch.nextafter(x * 2, up), x, up)
    other = torch.rand(64).to(dtype)
    assert torch.equal(run(other, up), torch.nextafter(other * 2, up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_the_inverse_of_erf_is_torchs_near_one(dtype):
    x = torch.linspace(-0.9, 0.9, 64, dtype=dtype)
    run = fused(lambda x: torch.erfinv(x) * 2, x)
    near = 1 - 10 ** -torch.linspace(1, 7, 64, dtype=dtype)
    assert torch.equal(run(near), torch.erfinv(near) * 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-0.5, 0.5, 2.0, -1.0, 1.5])
@torch.no_grad()
def test_powers_of_infinities_and_zeros_are_torchs(exponent, dtype):
    x = (torch.rand(64) + 0.5).to(dtype)
    run = fused(lambda x: torch.pow(x, exponent) + 1, x)
    special = x.clone()
    special[:6] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, -2.0])
    found, expected = run(special), torch.pow(special, exponent) + 1
    torch.testing.assert_close(found[:6], expected[:6], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@torch.no_grad()
def test_sums_of_bytes_in_bytes_wrap_around(dtype):
    x = torch.ones(4, 64, dtype=dtype)
    run = fused(lambda x: (x + 1).sum(-1, dtype=dtype), x)
    other = torch.arange(256).reshape(4, 64).to(dtype)
    assert torch.equal(run(other), (other + 1).sum(-1, dtype=dtype))
    assert run.fusion.n_kernels == 1  # and the sum stays fused


@pytest.mark.parametrize("n", [5, 64])
@torch.no_grad()
def test_remainders_of_numbers_far_apart_are_torchs(n):
    run = fused(lambda x, y: torch.fmod(x, y) + 1, torch.rand(n) + 1, torch.rand(n) + 1)
    far, tiny = torch.full((n,), 1e38), torch.full((n,), 1e-40)
    expected = torch.fmod(far, tiny) + 1  # NaN where torch uses vectors
    torch.testing.assert_close(run(far, tiny), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x // 0.1,
        lambda x: torch.div(x, 0.1, rounding_mode="floor"),
        lambda x: x % 0.1,
        lambda x: torch.remainder(x, -0.3),
        lambda x: (x * 1).remainder_(0.3),
        lambda x: (x * 1).floor_divide_(0.1),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@torch.no_grad()
def test_remainders_are_exact(function, dtype):
    run = fused(function, torch.rand(64, dtype=dtype))
    for x in (torch.arange(64) * 0.1, torch.rand(64) * 1e9, torch.tensor([torch.inf] * 64)):
        given = x.to(dtype)
        torch.testing.assert_close(run(given), function(given), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
@pytest.mark.parametrize("n", [1, 3, 64])
@torch.no_grad()
def test_truncating_division_by_zero_is_an_error(dtype, n):
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.div(a, b, rounding_mode="trunc")

    a, b = torch.arange(n).to(dtype), torch.ones(n, dtype=dtype)
    run = fused(function, a, b)
    assert torch.equal(run(a, b + 1), function(a, b + 1))
    with pytest.raises(offload.ExecutionError, match="Zero"):
        run(a, torch.zeros(n, dtype=dtype))
    assert torch.equal(run(a, b), a)


@torch.no_grad()
def test_places_of_largest_numbers_are_torchs():
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return functional.max_pool2d_with_indices(x, 3, 1, 1)

    run = fused(function, torch.randn(1, 1, 8, 8))
    for value in (torch.nan, -torch.inf, 0.0):
        x = torch.full((1, 1, 8, 8), value)
        torch.testing.assert_close(run(x), function(x), rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def test_probabilities_out_of_range_are_an_error():
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy(x, y, reduction="none")

    run = fused(function, torch.rand(8), torch.rand(8))
    with pytest.raises(offload.ExecutionError, match="between 0 and 1"):
        run(torch.full((8,), -0.5), torch.rand(8))


@torch.no_grad()
def test_nan_coordinates_give_what_torch_gives():
    def function(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return functional.grid_sample(x, grid, align_corners=False)

    x, grid = torch.rand(1, 1, 5, 5), torch.rand(1, 3, 3, 2)
    run = fused(function, x, grid)
    grid = torch.full_like(grid, torch.nan)
    torch.testing.assert_close(run(x, grid), function(x, grid), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fuse", [False, True])
@torch.no_grad()
def test_an_execution_writes_no_warning_to_stderr(capfd, fuse):
    x, y = torch.randn(6, 7), torch.randn(6, 7)
    run = offload.capture(functional.mse_loss, x, y).load(fuse=fuse)
    for _ in range(3):
        torch.testing.assert_close(run(x, y), functional.mse_loss(x, y))
    assert "resized" not in capfd.readouterr().err


MOMENTS: dict[str, Function] = {
    "layer norm": lambda x: functional.layer_norm(x, (x.shape[-1],)),
    "group norm": lambda x: functional.group_norm(x.reshape(4, 8, -1), 2),
    "var": lambda x: x.var(-1) * 1,
    "var of columns": lambda x: x.var(0, unbiased=False, keepdim=True) * 1,
    "std of all": lambda x: x.std() * 1,
    "std and mean": lambda x: torch.stack(torch.std_mean(x, (0, 1))),
    "var and mean": lambda x: torch.stack(torch.var_mean(x, -1, keepdim=True)),
}


@pytest.mark.parametrize("function", MOMENTS.values(), ids=MOMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_rows_far_from_zero_have_their_moments(function, dtype):
    """Proved on rows around 0, a row of one number or of a large mean is also right."""
    x = torch.randn(16, 96, dtype=dtype)
    run = fused(function, x)
    assert run.fusion is not None
    assert run.fusion.n_kernels == 1, run.explain()
    mean = 1e6 if dtype in (torch.float32, torch.float64) else 100.0
    step = torch.finfo(dtype).eps * mean
    for far in (
        torch.full_like(x, mean / 3),
        torch.randint(0, 4, x.shape).to(dtype) * step + mean,
        x * 0.05 + mean / 1000,
    ):
        exact = function(far.double())
        got, eager = run(far), function(far)
        error, eagers = ((one.double() - exact).abs().max() for one in (got, eager))
        rounding = 8 * torch.finfo(dtype).eps * exact.abs().max()
        if dtype is torch.float64:  # where torch's own are no more exact
            rounding = 1e-7 + 1e-8 * exact.abs().max()
        assert error <= 2 * eagers + rounding


@pytest.mark.parametrize("scale", [1e18, 1e-18])
@torch.no_grad()
def test_variances_have_their_range(scale):
    for function in (lambda x: x.std(-1) * 1, lambda x: torch.var(x, 0) * 1):
        x = torch.randn(32, 64)
        run = fused(function, x)
        torch.testing.assert_close(run(x * scale), function(x * scale), rtol=1e-5, atol=0)


@pytest.mark.parametrize("correction", [31, 32, 40, 0.5])
@torch.no_grad()
def test_variances_of_too_few_numbers_are_as_torch_has_them(correction):
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.var(-1, correction=correction) * 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about too few values
        run = fused(function, torch.randn(4, 32))
        for x in (torch.randn(4, 32), torch.ones(4, 32)):
            torch.testing.assert_close(run(x), function(x), equal_nan=True)
