"""Inputs for executions that no caller requested: valid for the model, without meaning.

An operator may fail on the device because of values: an index out of range, probabilities that are
negative or all zero. On a GPU that is a device-side assert, after which the process can no longer
use the device. So wherever the content of the recorded call is known, it is used: what the forward
computes from it is as valid as it was then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from offload.errors import FileError
from offload.interpreter.eager_run import EagerRun, content_bytes
from offload.interpreter.torch_names import find_dtype
from offload.program import ITEM_BYTES, Bindings, BoundProgram, Program, StoredTensor

SAMPLE_BYTES = 2**20
"""Per input or weight: usually more than indices have, which must be valid as a whole."""

INDICES_BYTES = 2**26
"""For all weights in files that are read because they may be indices."""

_NEAR_ZERO = 2.0**-10
"""Non-negative numbers below it are 0 as an index, a probability or a count."""


def made_up_inputs(bound: BoundProgram, variant: int) -> list[bytes]:
    """Bytes for each input that are valid for the model.

    - Variants 0 and 1 are the input's content at the recording (`Bindings.input_samples`), its
      beginning repeated if the input is longer: no other values are known to be valid. Numbers that
      were all 0.0 are drawn from [0, 2**-10), differently in each variant, as results that are all
      zero reveal nothing; as an index, a probability or a count they are equivalent to 0.0. Dtypes
      whose smallest normal number is larger use that instead of 2**-10.
    - Variant 2 is not for execution, but for memory that may only be read by mistake: the same
      items in reverse order, or others if all are equal.

    Where nothing is known, floating-point numbers are drawn from [0, 1), truth values likewise, and
    integers are all 0, a valid index into anything; in variant 2 they are 1.

    Host constants are as recorded.
    """
    program, bindings = bound.program, bound.bindings
    generator = torch.Generator().manual_seed(variant)
    samples = bindings.input_samples or (b"",) * len(program.inputs)
    replaced = replaced_inputs(bound)
    contents = []
    for leaf, (view, sample) in enumerate(zip(program.inputs, samples, strict=True)):
        value, size_bytes = program.values[view.value], view.end_bytes
        if value.host_content is not None:
            contents.append(value.host_content)
        elif not sample:
            contents.append(valid_bytes(value.dtype, size_bytes, generator, int(variant == 2)))
        elif leaf in replaced:
            below = max(_NEAR_ZERO, torch.finfo(find_dtype(value.dtype)).smallest_normal)
            contents.append(valid_bytes(value.dtype, size_bytes, generator, below=below))
        else:
            one = sample if variant < 2 else _other(sample, value.dtype)
            contents.append((one * -(-size_bytes // len(one)))[:size_bytes])
    return contents


def replaced_inputs(bound: BoundProgram) -> frozenset[int]:
    """The inputs whose sample is all 0.0, which are replaced by other numbers."""
    program, bindings = bound.program, bound.bindings
    return frozenset(
        leaf
        for leaf, (view, sample) in enumerate(
            zip(program.inputs, bindings.input_samples, strict=bool(bindings.input_samples))
        )
        if sample and not any(sample) and has_fractions(program.values[view.value].dtype)
        if program.values[view.value].host_content is None
    )


def has_fractions(dtype_name: str) -> bool:
    """Whether a dtype is floating-point or complex."""
    dtype = find_dtype(dtype_name)
    return dtype.is_floating_point or dtype.is_complex


def _other(sample: bytes, dtype_name: str) -> bytes:
    """The items in reverse order; if that is the same, all 1, or 0."""
    item_bytes = ITEM_BYTES[dtype_name]
    n_items = len(sample) // item_bytes
    items = torch.frombuffer(bytearray(sample), dtype=torch.uint8).view(n_items, item_bytes)
    other = content_bytes(items.flip(0))
    if other != sample:
        return other
    one = content_bytes(torch.ones(1, device="cpu").to(find_dtype(dtype_name)))
    return (bytes(item_bytes) if sample.startswith(one) else one) * n_items


def valid_bytes(
    dtype_name: str,
    size_bytes: int,
    generator: torch.Generator,
    integer: int = 0,
    below: float = 1.0,
) -> bytes:
    """Content of which only the dtype is known: see `made_up_inputs`.

    Args:
        dtype_name: of its items.
        size_bytes: of all of them.
        generator: of the CPU, which numbers are drawn from.
        integer: the value of integers.
        below: the bound of floating-point numbers, which are non-negative. If it is less than any
            normal number of the dtype, most of them would be rounded to 0: then as many as keep the
            mean are less than that normal number, and the others are 0.
    """
    dtype, n_items = find_dtype(dtype_name), size_bytes // ITEM_BYTES[dtype_name]
    if not n_items:
        return b""
    if dtype.is_complex:
        content = torch.view_as_complex(_numbers(dtype, (n_items, 2), generator, below)).to(dtype)
    elif dtype is torch.bool:
        content = torch.rand(n_items, generator=generator, device="cpu") < 0.5
    elif dtype.is_floating_point:
        content = _numbers(dtype, (n_items,), generator, below).to(dtype)
    else:
        return integer.to_bytes(ITEM_BYTES[dtype_name], "little") * n_items
    return content_bytes(content)


def _numbers(
    dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator, below: float
) -> torch.Tensor:
    """float32 numbers from 0 that are less than `below` once rounded to a dtype."""
    precision = torch.finfo(dtype)
    limit = max(below, precision.smallest_normal)
    numbers = torch.rand(shape, generator=generator, dtype=torch.float32, device="cpu") * limit
    spacing = precision.eps / 2 if limit > precision.smallest_normal else precision.eps
    numbers.clamp_(max=limit * (1 - spacing))  # larger ones may be rounded up
    if limit > below:
        numbers *= torch.rand(shape, generator=generator, device="cpu") < below / limit
    return numbers


def no_result(dtype_name: str, size_bytes: int) -> bytes:
    """Initial content of memory for results: valid values without repeated runs.

    Integers are 0 or 1, in no order; bytes of an incomplete item are 0.
    """
    generator = torch.Generator().manual_seed(3)
    if has_fractions(dtype_name):
        content = valid_bytes(dtype_name, size_bytes, generator)
    else:
        item_bytes = ITEM_BYTES[dtype_name]
        items = torch.zeros(size_bytes // item_bytes, item_bytes, dtype=torch.uint8, device="cpu")
        lowest = torch.rand(len(items), generator=generator, device="cpu") < 0.5
        items[:, 0] = lowest
        content = content_bytes(items)
    return content.ljust(size_bytes, b"\0")


def index_weights(bindings: Bindings) -> frozenset[int]:
    """The weights in files that may be indices: small ones of torch's index dtypes.

    At most `SAMPLE_BYTES` each and `INDICES_BYTES` in all, the smaller ones first: each is read,
    and in a proof all are on the device at once.
    """
    found, end_bytes = set(), 0
    for index, stored in sorted(bindings.stored.items(), key=lambda one: one[1].size_bytes):
        if stored.dtype in ("int32", "int64") and 0 < stored.size_bytes <= SAMPLE_BYTES:
            end_bytes += stored.size_bytes
            if end_bytes > INDICES_BYTES:
                break
            found.add(index)
    return frozenset(found)


def stored_indices(stored: StoredTensor) -> bytes:
    """Read the content of a weight in a file.

    Raises:
        FileError: the file cannot be read, or has become shorter.
    """
    try:
        with Path(stored.path).open("rb") as file:
            file.seek(stored.offset_bytes)
            content = file.read(stored.size_bytes)
    except OSError as error:
        raise FileError(f"{stored.path}: {stored.name} cannot be read: {error}") from error
    if len(content) != stored.size_bytes:
        raise FileError(
            f"{stored.path}: {stored.name}: expected {stored.size_bytes} bytes from byte "
            f"{stored.offset_bytes} on, found {len(content)}: the file has changed since the model "
            "was captured; capture again"
        )
    return content


def overlapping_inputs(program: Program) -> list[list[tuple[int, int]]]:
    """Groups of overlapping inputs, each with its distance in bytes from the group's first."""
    groups = {leaf: [(leaf, 0)] for leaf in range(len(program.inputs))}
    for overlap in program.overlaps:
        one, other = groups[overlap.first], groups[overlap.second]
        if one is not other:
            shift = dict(one)[overlap.first] + overlap.distance_bytes - dict(other)[overlap.second]
            one += [(leaf, offset + shift) for leaf, offset in other]
            groups.update({leaf: one for leaf, _ in other})
    return list({id(group): group for group in groups.values()}.values())


def input_tensors(bound: BoundProgram, contents: Sequence[bytes]) -> list[torch.Tensor]:
    """Host tensors with these bytes; those that must overlap share memory."""
    program = bound.program
    bases: dict[int, tuple[torch.UntypedStorage, int]] = {}
    for group in overlapping_inputs(program):
        lowest = min(offset for _, offset in group)
        end = max(offset - lowest + len(contents[leaf]) for leaf, offset in group)
        memory = torch.zeros(end, dtype=torch.uint8, device="cpu")
        for leaf, offset in group:
            begin, content = offset - lowest, bytearray(contents[leaf])
            if content:
                memory[begin : begin + len(content)] = torch.frombuffer(content, dtype=torch.uint8)
            bases[program.inputs[leaf].value] = (memory.untyped_storage(), begin)
    run = EagerRun(bound, bases, fill=None)
    return [run.tensor(view) for view in program.inputs]
