"""PyTorch's operator database on a GPU: a sample of each captured, replayed at new addresses.

`make test-cuda-operators` runs it, in several processes. The database imports `expecttest`: on a
machine with a GPU its absence is an error, as nothing would be tested.

A refusal is a skip only if its kind is documented and the operator is not one that every model
uses; any other CaptureError is a failure.
"""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from refusal_kinds import skip_reason
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

import offload

if not torch.cuda.is_available():  # the database takes seconds to import
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

N_SAMPLES = {torch.float32: 2, torch.bfloat16: 1}


def copies(tree: Any, scale: float) -> Any:
    """The arguments on new memory in the same layout; floating-point values are scaled."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage().clone()
        other = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        other.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        written_once = all(tensor.stride()) or not tensor.numel()
        return other.mul_(scale) if tensor.is_floating_point() and written_once else other

    return tree_map_only(torch.Tensor, copy, tree)


def is_random(operator: Any) -> bool:
    """Return whether eager itself gives different values each time."""
    return operator.name in ("empty", "empty_like", "empty_permuted", "empty_strided") or (
        "new_empty" in operator.name
    )


CASES = [
    pytest.param(operator, dtype, id=f"{operator.formatted_name}-{dtype}".replace("torch.", ""))
    for dtype in N_SAMPLES  # runs some of every operator, should the time end early
    for operator in op_db
    if not is_random(operator)
]


@pytest.mark.parametrize(("operator", "dtype"), CASES)
def test_operator(operator, dtype):
    if not operator.supports_dtype(dtype, "cuda"):
        pytest.skip(f"torch has no {operator.name} of {dtype} on a GPU")
    made = operator.sample_inputs("cuda", dtype, requires_grad=False)
    samples = list(itertools.islice(made, N_SAMPLES[dtype]))
    refusals = []
    n_replayed = 0
    for sample in samples:
        arguments = ((sample.input, *sample.args), sample.kwargs)
        if any(one.layout is not torch.strided for one in tensors(arguments)):
            continue
        try:
            replay(operator, arguments)
            n_replayed += 1
        except offload.CaptureError as error:
            reason = skip_reason(operator.name, error)
            if reason is None:
                raise
            refusals.append(reason)
    if refusals:
        pytest.skip(f"refused: {refusals[0]}")
    if not n_replayed:
        pytest.skip("no sample of plain strided tensors")


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def replay(operator: Any, arguments: Any) -> None:
    args, kwargs = copies(arguments, 1.0)
    with offload.capture(operator.op) as captured:
        captured(*args, **kwargs)
    with captured.load() as run:
        for scale in (1.0, 0.75):
            args, kwargs = copies(arguments, scale)
            expected_args, expected_kwargs = copies(arguments, scale)
            torch.cuda.manual_seed(0)  # operators that draw: the same numbers in both
            got = run(*args, **kwargs)
            torch.cuda.manual_seed(0)
            expected = operator.op(*expected_args, **expected_kwargs)
            got_leaves, got_form = tree_flatten(got)
            leaves, form = tree_flatten(expected)
            assert str(got_form) == str(form)
            for one, other in zip(
                [*got_leaves, *tensors(args)], [*leaves, *tensors(expected_args)], strict=True
            ):
                if isinstance(other, torch.Tensor):
                    torch.testing.assert_close(one, other, equal_nan=True, rtol=2e-2, atol=1e-3)
                else:
                    assert one == other
