"""The proof of a compiled kernel: correct kernels pass, and every defect is detected."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from kernel_sources import address_of, library, needs_compiler, region_of

from offload.compile.proof import KernelProof
from offload.compile.toolchain import EXPORTED
from offload.compile.widened import widened

pytestmark = needs_compiler

N = 64

SOURCES = {
    "right": "for (int i = 0; i < 64; ++i) z[i] = x[i] * y[i] + x[i];",
    "by_other_roundings": "for (int i = 0; i < 64; ++i) z[i] = x[i] * (y[i] + 1.0f);",
    "wrong": "for (int i = 0; i < 64; ++i) z[i] = x[i] * y[i] - x[i];",
    "wrong_in_one": "for (int i = 0; i < 64; ++i) z[i] = x[i] * y[i] + (i == 37 ? 0.0f : x[i]);",
    "too_coarse": "for (int i = 0; i < 64; ++i) z[i] = x[i] * y[i] + x[i] * 1.0001f;",
    "too_short": "for (int i = 0; i < 63; ++i) z[i] = x[i] * y[i] + x[i];",
    "nothing": "",
    "too_long": "for (int i = 0; i < 65; ++i) z[i] = i < 64 ? x[i] * y[i] + x[i] : 0.0f;",
    "before": "for (int i = 0; i < 64; ++i) z[i] = x[i] * y[i] + x[i]; z[-1] = 0.0f;",
    "far": "for (int i = 0; i < 64; ++i) z[i] = x[i] * y[i] + x[i]; z[64 + 1000] = 0.0f;",
    "raising": 'throw std::runtime_error("no");',
    "scratch": "for (int i = 0; i < 64; ++i) z[i] = x[i] * y[i] + x[i]; ((float*)w[3])[8] = 0.0f;",
}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Functions that compute x * y + x, or are meant to."""
    lines = [
        f"{EXPORTED} void {name}(void* const* w) {{ const float* x = (const float*)w[0]; "
        f"const float* y = (const float*)w[1]; float* z = (float*)w[2]; {body} }}"
        for name, body in SOURCES.items()
    ]
    return library("\n".join(["#include <stdexcept>", *lines]), tmp_path_factory.mktemp("kernels"))


def proof_of(kernels: ctypes.CDLL, name: str, scratch_bytes: tuple[int, ...] = ()) -> KernelProof:
    region = region_of(lambda x, y: x * y + x, torch.ones(N), torch.ones(N))
    return KernelProof(name, address_of(kernels, name), region.program, scratch_bytes)


def bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [one.view(torch.int32) for one in tensors]


def prove(proof: KernelProof, x: torch.Tensor, y: torch.Tensor) -> bool:
    x, y, z = x.clone(), y.clone(), torch.full((N,), 7.0)
    given = x.clone(), y.clone()
    is_proved = proof.prove([one.data_ptr() for one in (x, y, z)])
    assert torch.equal(z, torch.full((N,), 7.0)), "a proof writes where the execution will"
    assert all(torch.equal(*pair) for pair in zip(bits(x, y), bits(*given), strict=True))
    return is_proved


@pytest.mark.slow
@pytest.mark.parametrize("name", ["right", "by_other_roundings"])
def test_what_rounds_otherwise_is_proved(kernels, name):
    proof = proof_of(kernels, name)
    for scale in (1e-30, 1.0, 1e30):
        assert prove(proof, torch.randn(N) * scale, torch.randn(N)), proof.failure
    assert proof.failure == ""


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        ("wrong", "times as far from float64"),
        ("wrong_in_one", "times as far from float64"),
        ("too_coarse", "times as far from float64"),
        ("too_short", "infinities or NaN"),
        ("nothing", "infinities or NaN"),
        ("too_long", "outside its results"),
        ("before", "outside its results"),
        ("far", "outside its results"),
        ("raising", "raises where the launches do not: no"),
    ],
)
def test_what_is_wrong_is_noticed(kernels, name, failure):
    proof = proof_of(kernels, name)
    assert not prove(proof, torch.randn(N), torch.randn(N))
    assert failure in proof.failure


def test_the_failure_tells_by_how_much_the_tolerance_is_exceeded(kernels):
    proof = proof_of(kernels, "wrong")
    assert not prove(proof, torch.randn(N), torch.randn(N))
    times = re.search(r"is (\S+) times as far", proof.failure)
    assert times is not None
    assert 1e3 < float(times[1]) < 1e9  # a float has 24 bits


def test_scratch_memory_has_its_end(kernels):
    assert prove(proof_of(kernels, "scratch", (36,)), torch.randn(N), torch.randn(N))
    proof = proof_of(kernels, "scratch", (32,))
    assert not prove(proof, torch.randn(N), torch.randn(N))
    assert "outside its results" in proof.failure


def test_infinities_and_nan_are_results_too(kernels):
    x = torch.randn(N)
    x[3], x[5], x[7] = float("inf"), float("-inf"), float("nan")
    assert prove(proof_of(kernels, "right"), x, torch.randn(N))
    # x * (y + 1) of an infinity and -1 is NaN, as is x * y + x; for 0 they differ.
    y = torch.randn(N)
    y[3] = -0.5
    assert prove(proof_of(kernels, "by_other_roundings"), x, y.abs() + 0.1)
    proof = proof_of(kernels, "by_other_roundings")
    assert not prove(proof, x, y)
    assert "infinities or NaN" in proof.failure


def test_the_wide_program_computes_in_float64():
    region = region_of(lambda x: torch.nn.functional.gelu(x.to(torch.bfloat16)), torch.ones(N))
    wide = widened(region.program)
    assert wide is not None
    assert {value.dtype for value in wide.values} == {"float64"}
    assert [value.size_bytes for value in wide.values] == [N * 8] * len(wide.values)
    assert "bfloat16" not in str(wide)


def test_what_is_viewed_as_other_numbers_has_no_wide_program():
    region = region_of(lambda x: x.view(torch.int32) + 1, torch.ones(N))
    assert widened(region.program) is None


CLAMPED = {
    "as_the_launches": "for (int i = 0; i < 64; ++i) z[i] = s[i] > 0 ? s[i] : 0;",
    "in_a_last_place": "for (int i = 0; i < 64; ++i) z[i] = s[i] > 0 ? s[i] + 1e-6f : 0;",
    "by_a_thousandth": "for (int i = 0; i < 64; ++i) z[i] = s[i] > 0 ? s[i] + 1e-3f : 0;",
    "unclamped": "for (int i = 0; i < 64; ++i) z[i] = s[i];",
}


@pytest.mark.parametrize(
    ("name", "sums", "is_proved"),
    [
        ("as_the_launches", 0, True),
        ("in_a_last_place", 0, True),
        ("in_a_last_place", -1, False),
        ("by_a_thousandth", 0, False),
        ("unclamped", 0, False),
    ],
)
def test_clamped_sums_are_as_exact_as_the_sums(name, sums, is_proved, tmp_path):
    """In a row of sums around -1, one is just above 0: its last places are those of the row."""
    region = region_of(lambda x, w: torch.mm(x, w).relu(), torch.ones(1, 2), torch.ones(2, N))
    w = torch.stack([torch.full((N,), -1.0), torch.randn(N) * 0.1])
    w[:, 5] = torch.tensor([1e-5, 0.0])
    sums_of = "float s[64]; for (int i = 0; i < 64; ++i) s[i] = x[0] * w[i] + x[1] * w[64 + i]; "
    source = (
        f"{EXPORTED} void kernel(void* const* words) {{ const float* x = (const float*)words[0]; "
        f"const float* w = (const float*)words[1]; float* z = (float*)words[2]; "
        f"{sums_of}{CLAMPED[name]} }}"
    )
    address = address_of(library(source, tmp_path), "kernel")
    proof = KernelProof(name, address, region.program, (), sums=sums)
    x, z = torch.ones(1, 2), torch.empty(1, N)
    assert proof.prove([one.data_ptr() for one in (x, w, z)]) == is_proved, proof.failure
