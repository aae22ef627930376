"""Probes of argument tables: when a model reads them, where they may lie, who may write them."""

from __future__ import annotations

import ctypes

import torch

from acl_calls import AclError
from model_tasks import parameters_of, tasks_of
from probe_device import (
    COUNT,
    DEVICE_TO_DEVICE,
    TENSOR_BYTES,
    Device,
    device,
    floats,
    require_equal,
)
from probe_kernels import Product, captured_product
from probing import conclude, tell

_N_BLOCKS, _ALIGNMENT_BYTES = 3, 64


def _tensor(first: float) -> torch.Tensor:
    return (torch.arange(COUNT, dtype=torch.float32) + first).npu()


def _empty() -> torch.Tensor:
    result = torch.full((COUNT,), -1.0).npu()
    torch.npu.synchronize()
    return result


def table_behind_the_making(form: str) -> None:
    """A1: executions read a table that copies on their stream wrote after the model was made."""
    acl = device()
    product = captured_product(acl)
    kernel, n_bytes = product.captured, len(product.captured.block)
    table, stream = acl.malloc(n_bytes), acl.stream()
    acl.upload(table, product.arguments_at(table))
    launch = ("aclrtLaunchKernel", kernel.function, kernel.n_blocks, table, n_bytes)
    if form == "build":
        with acl.build() as (building, models):
            acl.call(*launch, building)
    else:
        with acl.capture(stream) as models:
            acl.call(*launch, stream)
    product.result.fill_(-1)
    turns = [(_tensor(10 * turn), _empty()) for turn in (1, 2, 3)]
    torch.npu.synchronize()
    with acl.held_back(stream):
        for left, result in turns:
            arguments = product.arguments_at(table, left, result)
            acl.stage(table, arguments, n_bytes, stream)
            acl.execute(models[0], stream)
    acl.synchronize(stream)
    right = [torch.equal(result, left * product.right) for left, result in turns]
    untouched = bool((product.result == -1).all())
    tell("executions that read their own table", sum(right))
    conclude(all(right) and untouched, "" if all(right) else "another table was read")


def alignment_of_blocks() -> None:
    """A2: blocks that lie at odd multiples of 64 bytes."""
    acl = device()
    product = captured_product(acl)
    kernel, n_bytes = product.captured, len(product.captured.block)
    room = -(-n_bytes // (2 * _ALIGNMENT_BYTES)) * 2 * _ALIGNMENT_BYTES
    memory, stream = acl.malloc(_N_BLOCKS * room + _ALIGNMENT_BYTES), acl.stream()
    offsets = [index * room + _ALIGNMENT_BYTES for index in range(_N_BLOCKS)]
    right = []
    for offset in offsets:
        left, result, place = _tensor(offset), _empty(), memory + offset
        torch.npu.synchronize()
        acl.upload(place, product.arguments_at(place, left, result))
        launch = ("aclrtLaunchKernel", kernel.function, kernel.n_blocks, place, n_bytes)
        acl.call(*launch, stream)
        acl.synchronize(stream)
        right.append(torch.equal(result, left * product.right))
    tell("offsets in bytes", offsets)
    conclude(all(right), "" if all(right) else "a block was read elsewhere")


def only_stream_as_head() -> None:
    """A3: an explicit build whose only stream is bound as its head."""
    acl = device()
    source, target, stream = acl.memory(floats(1)), acl.memory(bytes(TENSOR_BYTES)), acl.stream()
    copy = (target, TENSOR_BYTES, source, TENSOR_BYTES, DEVICE_TO_DEVICE)
    with acl.build() as (building, models):
        acl.call("aclrtMemcpyAsync", *copy, building)
    before = acl.download(target, TENSOR_BYTES)
    acl.execute(models[0], stream)
    acl.synchronize(stream)
    works = acl.download(target, TENSOR_BYTES) == floats(1)
    tell("ran while it was built", before != bytes(TENSOR_BYTES))
    conclude(
        works and before == bytes(TENSOR_BYTES), "" if works else "the model did not run its task"
    )


def blocks_of_the_runtime() -> None:
    """A6: copies may write the block that a captured task reads, without an update."""
    acl = device()
    product = captured_product(acl)
    kernel, stream, right = product.captured, acl.stream(), []
    _check_first(acl, product, stream)
    for turn in (1, 2):
        left = _tensor(10 * turn)
        torch.npu.synchronize()
        place = kernel.address + 8 * product.places[0]
        acl.stage(place, left.data_ptr().to_bytes(8, "little"), 8, stream)
        acl.execute(kernel.model, stream)
        acl.synchronize(stream)
        right.append(torch.equal(product.result, left * product.right))
    tell("executions that took the new address", sum(right))
    conclude(all(right), "" if all(right) else "the address of the capture was taken")


def blocks_of_ours() -> None:
    """A12: a captured kernel gets our block once, and reads it at each execution."""
    acl = device()
    product = captured_product(acl)
    kernel, n_bytes, stream = product.captured, len(product.captured.block), acl.stream()
    _check_first(acl, product, stream)
    (task,) = [one for of_stream in tasks_of(acl, kernel.model) for one in of_stream]
    table, parameters = acl.malloc(n_bytes), parameters_of(acl, task)
    acl.upload(table, product.arguments_at(table))
    parameters.content.kernel.arguments = table
    try:
        acl.call("aclmdlRITaskSetParams", task, ctypes.byref(parameters))
        acl.call("aclmdlRIUpdate", kernel.model)
    except AclError as error:
        conclude(False, str(error))
        return
    tell("keeps the address", parameters_of(acl, task).content.kernel.arguments == table)
    product.result.fill_(-1)
    turns = [(_tensor(10 * turn), _empty()) for turn in (1, 2, 3)]
    torch.npu.synchronize()
    for left, result in turns:
        acl.stage(table, product.arguments_at(table, left, result), n_bytes, stream)
        acl.execute(kernel.model, stream)
    acl.synchronize(stream)
    right = [torch.equal(result, left * product.right) for left, result in turns]
    untouched = bool((product.result == -1).all())
    tell("executions that read the block of ours", sum(right))
    conclude(all(right) and untouched, "" if all(right) else "another block was read")


def _check_first(acl: Device, product: Product, stream: int) -> None:
    left, right, _ = product.captured.tensors
    expected = (left * right).cpu().numpy().tobytes()
    acl.execute(product.captured.model, stream)
    acl.synchronize(stream)
    require_equal(
        acl.download(product.result.data_ptr(), TENSOR_BYTES), expected, "the captured product"
    )
