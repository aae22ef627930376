"""Probes of operators that write argument tables, and of executors that run again."""

from __future__ import annotations

import ctypes
import itertools
import struct
from dataclasses import dataclass

import torch

from probe_device import Device, device, words
from probe_kernels import captured_product
from probing import conclude, tell

_INT32, _INT64, _ND = 3, 9, 2
_MASK = (1 << 64) - 1
_N_WORDS, _N_BASES = 64, 4


@dataclass(frozen=True)
class _Operator:
    """A planned operator, and the workspace that it needs."""

    name: str
    executor: int
    workspace: int
    workspace_bytes: int

    def enqueue(self, acl: Device, stream: int) -> None:
        acl.call(self.name, self.workspace, self.workspace_bytes, self.executor, stream)


def _pointer(acl: Device, function: str, *arguments: object) -> int:
    """Return the result of a function of the operator libraries."""
    if acl.has(function):
        getattr(acl.library, function).restype = ctypes.c_void_p
    return acl.code(function, *arguments)


def _tensor(acl: Device, address: int, count: int, kind: int = _INT64) -> int:
    shape, stride = (ctypes.c_int64 * 1)(count), (ctypes.c_int64 * 1)(1)
    return _pointer(acl, "aclCreateTensor", shape, 1, kind, stride, 0, _ND, shape, 1, address)


def _plan(acl: Device, name: str, *operands: int) -> _Operator:
    n_bytes, executor = ctypes.c_uint64(), ctypes.c_uint64()
    results = ctypes.byref(n_bytes), ctypes.byref(executor)
    acl.call(f"{name}GetWorkspaceSize", *operands, *results)
    workspace = acl.malloc(n_bytes.value) if n_bytes.value else 0
    return _Operator(name, executor.value, workspace, n_bytes.value)


def _planned_add(acl: Device, places: tuple[int, int, int], count: int) -> _Operator:
    """The third memory = the first + the second, of words."""
    one = _pointer(acl, "aclCreateScalar", ctypes.byref(ctypes.c_int64(1)), _INT64)
    left, right, result = (_tensor(acl, place, count) for place in places)
    return _plan(acl, "aclnnAdd", left, right, one, result)


def operators_write_the_table() -> None:
    """A10: a model's kernel reads the table that aclnnAdd wrote before it, on its stream."""
    acl = device()
    product = captured_product(acl)
    kernel, n_bytes = product.captured, len(product.captured.block)
    count = n_bytes // 8
    table, stream = acl.malloc(n_bytes), acl.stream()
    acl.upload(table, product.arguments_at(table))  # so that reading it is no fault
    offsets = tuple(3 * place for place in range(count))
    selected, offset = acl.malloc(8 * count), acl.memory(words(*offsets))
    launch = ("aclrtLaunchKernel", kernel.function, kernel.n_blocks, table, n_bytes)
    with acl.capture(stream) as models:
        acl.call(*launch, stream)
    turns = [
        (
            torch.arange(10.0 * turn, 10.0 * turn + product.result.numel()).npu(),
            torch.full_like(product.result, -1),
            _planned_add(acl, (selected, offset, table), count),
        )
        for turn in (1, 2, 3)
    ]
    torch.npu.synchronize()
    with acl.held_back(stream):
        for left, result, add in turns:
            wanted = struct.unpack_from(f"<{count}Q", product.arguments_at(table, left, result))
            bases = words(*((word - by) & _MASK for word, by in zip(wanted, offsets, strict=True)))
            acl.stage(selected, bases, len(bases), stream)
            add.enqueue(acl, stream)
            acl.execute(models[0], stream)
    acl.synchronize(stream)
    right = [torch.equal(result, left * product.right) for left, result, _ in turns]
    tell("executions that read the table that aclnnAdd wrote", sum(right))
    conclude(all(right), "" if all(right) else "a kernel read another table")


def executors_run_again() -> None:
    """A11: repeatable executors run again on the same addresses; a planned one can be destroyed."""
    acl = device()
    bases, offset, selected, table = (acl.malloc(8 * _N_WORDS) for _ in range(4))
    indices = [place % _N_BASES for place in range(_N_WORDS)]
    index = acl.memory(struct.pack(f"<{_N_WORDS}i", *indices))
    acl.upload(offset, words(*range(_N_WORDS)))
    of_index = _tensor(acl, index, _N_WORDS, _INT32)
    operands = _tensor(acl, bases, _N_BASES), 0, of_index, _tensor(acl, selected, _N_WORDS)
    select = _plan(acl, "aclnnIndexSelect", *operands)
    add = _planned_add(acl, (selected, offset, table), _N_WORDS)
    never_run = _planned_add(acl, (selected, offset, table), _N_WORDS)
    for one in (select, add):
        acl.call("aclSetAclOpExecutorRepeatable", one.executor)
    stream, right = acl.stream(), []
    for turn in (1, 2, 3):
        moved = [turn << 40 | base << 20 for base in range(_N_BASES)]
        acl.stage(bases, words(*moved), 8 * _N_BASES, stream)
        select.enqueue(acl, stream)
        add.enqueue(acl, stream)
        acl.synchronize(stream)
        wanted = [moved[place] + by for place, by in zip(indices, itertools.count(), strict=False)]
        right.append(acl.download(table, 8 * _N_WORDS) == words(*wanted))
    codes = [acl.code("aclDestroyAclOpExecutor", one.executor) for one in (select, add, never_run)]
    tell("executions of the same executors that were right", sum(right))
    tell("codes of destroying them, and one that was only planned", codes)
    works = all(right) and not any(codes)
    conclude(works, "" if works else "plan at each gather")
