"""Triton kernels as data: what tells two apart, and which numbers they take. Needs no Triton."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import offload
from offload.errors import ProgramError
from offload.interpreter.retarget import why_not_on
from offload.program import TritonKernel

KERNEL = TritonKernel(
    "scale",
    "source",
    (("by", "i32"),),
    (),
    divisible=(),
    options=(("num_warps", 4),),
    grid=(1, 1, 1),
)


def with_constant(value: Any) -> TritonKernel:
    signature = (("by", "i32"), ("factor", "constexpr"))
    return dataclasses.replace(KERNEL, signature=signature, constants=(("factor", value),))


def test_constants_that_python_takes_for_equal_make_different_kernels() -> None:
    kernels = [with_constant(one) for one in (1, 1.0, True, 0.0, -0.0, (1, 2), (1.0, 2))]
    assert len(set(kernels)) == len(kernels)
    assert all(one == dataclasses.replace(one) for one in kernels)
    assert with_constant(float("nan")) == with_constant(float("nan"))
    assert dataclasses.replace(KERNEL, options=(("num_warps", 8),)) != KERNEL
    assert KERNEL != "scale"


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("i32", 3.5), ("i32", float("nan")), ("u1", 1.0), ("fp16", 1e30), ("i32", "3"),
        ("fp32", 1j), ("i32", None), pytest.param("fp64", 10**400, id="beyond float64"),
    ],
)  # fmt: skip
def test_what_cannot_be_passed_as_a_number_is_refused(kind: str, number: Any) -> None:
    kernel = dataclasses.replace(KERNEL, signature=(("by", kind),))
    with pytest.raises(ProgramError, match=rf"triton::scale takes {kind} as by"):
        kernel.check((number,))


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("i32", -1),
        ("u64", 2**63 + 5),
        ("u1", True),
        ("fp16", 2),
        ("fp32", 1e300),
        ("bf16", float("inf")),
    ],
)
def test_numbers_that_are_passed(kind: str, number: Any) -> None:
    dataclasses.replace(KERNEL, signature=(("by", kind),)).check((number,))


def test_no_other_device_runs_a_kernel() -> None:
    """torch has no operator of its name, which nothing asks for."""
    with offload.capture(torch.Tensor.add_) as captured:
        captured(torch.zeros(4), 2)
    (launch,) = captured.program.launches
    launch = dataclasses.replace(launch, callee=KERNEL, results=())
    assert why_not_on(captured.program, launch, "cuda").startswith("it is compiled code")
