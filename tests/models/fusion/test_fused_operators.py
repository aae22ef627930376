"""PyTorch's operator database, fused: the samples of many operators as one program, against eager.

Operators are grouped, since each program costs a compilation. All are executed on the recorded
values, on which kernels are proved, and on others.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operator_samples import OpInfo, op_db
from torch.utils._pytree import tree_flatten, tree_unflatten

import offload
from offload.compile.regions import find_regions
from offload.compile.toolchain import CompilerMissing, find_compiler

pytestmark = [pytest.mark.slow, pytest.mark.long]

try:
    find_compiler()
except CompilerMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

N_SAMPLES = 2
N_OPERATORS = 40  # per program

Sample = tuple[str, Callable[..., Any], list[torch.Tensor]]


def samples_of(
    operator: OpInfo, dtype: torch.dtype = torch.float32, count: int = N_SAMPLES
) -> Iterator[Sample]:
    """The first nonempty samples of an operator, on contiguous copies."""
    name = f"{operator.name}.{operator.variant_test_name}".strip(".").replace(".", "_")
    inputs = operator.sample_inputs("cpu", dtype, requires_grad=False)
    for sample in itertools.islice(inputs, count):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[at].detach().clone() for at in places]

        def call(*given: torch.Tensor, leaves=leaves, places=places, spec=spec) -> Any:
            filled = list(leaves)
            for at, tensor in zip(places, given, strict=True):
                filled[at] = tensor
            first, args, kwargs = tree_unflatten(filled, spec)
            return operator.op(first, *args, **kwargs)

        if tensors and all(one.layout is torch.strided and one.numel() for one in tensors):
            yield name, call, tensors


def is_fusible(call: Callable[..., Any], tensors: list[torch.Tensor]) -> bool:
    """Return whether a kernel is made of a launch, and eager gives the same twice."""
    try:
        program = offload.capture(call, *tensors).program
    except Exception:  # refusals and their reasons are tested elsewhere
        return False
    return not program.is_random and bool(find_regions(program, {}).found)


def fusible_samples() -> list[Sample]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return [
            sample
            for operator in op_db
            if torch.float32 in operator.dtypes
            for sample in tried(operator)
            if is_fusible(*sample[1:])
        ]


def tried(operator: OpInfo) -> list[Sample]:
    try:
        return list(samples_of(operator))
    except Exception:  # this build of torch lacks a few operators
        return []


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return fusible_samples()


def other(tensor: torch.Tensor) -> torch.Tensor:
    """Values near the recorded ones, in the domain of the same operators."""
    return tensor * 0.875 if tensor.dtype.is_floating_point else tensor.clone()


def plain(outcome: Any) -> list[torch.Tensor]:
    """The tensors of an outcome, lists and named tuples flattened."""
    return [one for one in tree_flatten(outcome)[0] if isinstance(one, torch.Tensor)]


@torch.no_grad()
def check(some: list[Sample]) -> offload.Executable:
    counts = [len(tensors) for _, _, tensors in some]
    ends = list(itertools.accumulate(counts))

    def model(*given: torch.Tensor) -> list[list[torch.Tensor]]:
        return [
            plain(call(*given[end - count : end]))
            for (_, call, _), end, count in zip(some, ends, counts, strict=True)
        ]

    inputs = [one.clone() for _, _, tensors in some for one in tensors]
    run = offload.capture(model, *inputs).load(fuse=True)
    for given in (inputs, [other(one) for one in inputs]):
        for_eager, for_run = ([one.clone() for one in given] for _ in range(2))
        expected, got = model(*for_eager), run(*for_run)
        for eager, fused in zip(for_eager, for_run, strict=True):  # some are written
            torch.testing.assert_close(fused, eager, rtol=2e-4, atol=2e-5, equal_nan=True)
        for (name, _, _), one, wanted in zip(some, got, expected, strict=True):
            for found, tensor in zip(one, wanted, strict=True):
                assert found.stride() == tensor.stride(), name
                torch.testing.assert_close(
                    found,
                    tensor,
                    rtol=2e-4,
                    atol=2e-5,
                    equal_nan=True,
                    msg=lambda text, name=name: f"{name}: {text}",
                )
    return run


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_operator_database(samples):
    """Its fused parts are near eager, and no kernel fails its proof."""
    names = list(dict.fromkeys(name for name, _, _ in samples))
    assert len(names) > 150
    kernels = replaced = 0
    failures = []
    for begin in range(0, len(names), N_OPERATORS):
        some = set(names[begin : begin + N_OPERATORS])
        run = check([sample for sample in samples if sample[0] in some])
        assert run.fusion is not None
        kernels += run.fusion.n_kernels
        replaced += run.fusion.n_replaced
        failures += [(one.name, one.failure) for one in run.fusion.proofs if one.failure]
    assert replaced > 400
    assert not failures


OF_TEMPLATES = (
    "mm", "addmm", "addmm.decomposed", "matmul", "__rmatmul__", "nn.functional.linear",
)  # fmt: skip


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_products_in_bfloat16():
    """Each result is within a unit in the last place of its largest float64 number."""
    some = [
        sample
        for operator in op_db
        if f"{operator.name}.{operator.variant_test_name}".strip(".") in OF_TEMPLATES
        for sample in samples_of(operator, torch.bfloat16, count=100)
        if is_fusible(*sample[1:])
    ]
    counts = [len(tensors) for _, _, tensors in some]
    ends = list(itertools.accumulate(counts))

    def model(*given: torch.Tensor) -> list[list[torch.Tensor]]:
        return [
            plain(call(*given[end - count : end]))
            for (_, call, _), end, count in zip(some, ends, counts, strict=True)
        ]

    inputs = [one for _, _, tensors in some for one in tensors]
    run = offload.capture(model, *inputs).load(fuse=True)
    got, exact = run(*inputs), model(*(one.double() for one in inputs))
    for (name, _, _), found, expected in zip(some, got, exact, strict=True):
        for one, wanted in zip(found, expected, strict=True):
            bound = torch.finfo(torch.bfloat16).eps * wanted.abs().max()
            assert one.dtype == torch.bfloat16, name
            assert ((one.double() - wanted).abs() <= bound).all(), name
    assert run.fusion is not None
    made = Counter(one.name for one in run.fusion.proofs)
    assert sum(count for name, count in made.items() if "mm" in name) >= 10
    assert not [(one.name, one.failure) for one in run.fusion.proofs if one.failure]
