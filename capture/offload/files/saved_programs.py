"""Saves a Program with its weights in one file, and opens it."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offload.console.amounts import show_count
from offload.console.user_code import level_of_user
from offload.errors import BindingError, FileError, ProgramError
from offload.files.archive import open_archive, write_archive
from offload.files.check import check_file_program
from offload.files.rank_paths import own_path, path_of_rank
from offload.files.result_types import check_types, types_not_found, with_types
from offload.interpreter.device_formats import own_format
from offload.interpreter.eager_run import bytes_of, host_storage
from offload.interpreter.native_layouts import native_layout
from offload.interpreter.own_generators import default_generator
from offload.interpreter.torch_names import find_dtype, torch_object
from offload.native import _native
from offload.program import (
    ITEM_BYTES,
    Bindings,
    BoundProgram,
    Program,
    TensorView,
    TritonKernel,
    Value,
    decode_program,
    encode_program,
    with_objects,
)
from offload.program.decode import has_family
from offload.program.encode import FAMILY, with_family
from offload.program.family import Family
from offload.program.family_data import decode_family, encode_family
from offload.program.reader import parse


def save_program(
    bound: BoundProgram, path: str | os.PathLike[str], family: Family | None = None
) -> None:
    """Write a Program and the present content of its weights to one file.

    `family`: the Program's Family, if sizes may vary. Each of several ranks has a separate file
    (`rank_paths`).

    The file replaces another at `path` only once it is complete. Classes of containers are written
    by name only. If classes of the result cannot be found again by name (see `result_types`), a
    UserWarning names them.

    Raises:
        FileError: something in the program cannot be written (an object among the arguments, a
            generator other than the default one, an operator that is not torch's), it is one opaque
            launch, its weights are in other files, a weight is in a device format, its tensors were
            given another layout, its memory freed or shrunk since the capture, a host constant has
            another value, or the path cannot be written to.
    """
    program = bound.program
    path = path_of_rank(Path(path), program)
    for index, stored in bound.bindings.stored.items():
        raise FileError(
            f"{path}: {program.values[index].name} is in {stored.path} and not in memory: instead "
            "of saving the program, call offload.capture(model, ..., weights=) where it is used"
        )
    if program.opaque is not None:
        raise FileError(
            f"{path}: the program is one opaque launch, which calls the model itself "
            f"({program.opaque.reason}): a file holds launches of torch's operators and no code of "
            "a model. "
            "Save the model, and capture it again where it is loaded"
        )
    try:
        storages = {
            index: _common_storage(bound, index, tensors)
            for index, tensors in bound.bindings.weights.items()
        }
        storages = {
            index: storage
            for index, storage in storages.items()
            if not _is_host_constant(program.values[index], storage)
        }
        data = encode_program(program)
        if family is not None:
            data = with_family(data, encode_family(family))
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
        _read_program(text)  # a file that could not be opened is not written
        _warn_of_types(types_not_found(program))
        write_archive(
            path,
            text,
            {
                index: bytes_of(storage)[: program.values[index].size_bytes]
                for index, storage in storages.items()
            },
        )
    except ProgramError as error:
        raise FileError(f"{path}: this program cannot be saved: {error}") from None
    except FileError as error:
        raise FileError(f"{path}: {error}") from error


def _warn_of_types(names: list[str]) -> None:
    if names:
        given = ", ".join(name.rpartition(".")[2] for name in names)
        warnings.warn(
            f"the result has containers of types that a file holds by name only: "
            f"{', '.join(names)}. offload.open(path) gives plain tuples and dictionaries in their "
            f"place, and offload.open(path, types=[{given}]) these types",
            stacklevel=level_of_user(),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """The content of a file: a Program, and its Family if sizes may vary."""

    bound: BoundProgram
    family: Family | None


def open_saved(
    path: str | os.PathLike[str], types: Sequence[type] = (), *, triton: bool = False
) -> Saved:
    """Read a Program from a file that `save_program` wrote. Executes nothing.

    Safe for any file, including damaged and hostile ones: no code is loaded from it, no module is
    imported because of it except transformers' modules of models and caches, no size that it states
    is trusted, and what it launches is on a list of operators that reach only tensors. Executing a
    program from an unknown source still means running torch's kernels on it. Sources of Triton
    kernels are refused, unless `triton` says that the file is trusted: compiling them can run code.

    Args:
        path: of the file.
        types: classes of containers in the result that are not found by name (`result_types`).
        triton: whether the file may hold sources of Triton kernels.

    Returns:
        The Program, and its Family. Its weights are new tensors on torch's current device of its
        type, whichever device it was saved on (on the CPU if there is none, and for host
        constants). Its random launches draw from torch's default generator. Its containers have no
        classes except those of the result that were found.

    Raises:
        FileError: there is no such file, it is damaged or no program, it was written by a newer
            offload, it has sources of Triton kernels without `triton`, it needs an operator that
            is refused or that this torch does not have, or one
            of `types` matches no container of the result, or does not fit it.
        BindingError: one of `types` is not a class.
    """
    path = own_path(Path(path))
    types = check_types(types)
    try:
        with open_archive(path) as archive:
            program, family = _read_program(archive.program_text())
            if not triton:
                _refuse_triton(program)
            results = with_types(program, types)
            values = [program.values[index] for index in program.weight_views]
            sizes_bytes = {one.index: one.size_bytes for one in values if not one.on_host}
            device = _available(program.device)
            storages = archive.read_weights(sizes_bytes, device)
    except ProgramError as error:
        raise FileError(
            f"{path}: {error}: the file is damaged, or offload did not write it; save the program "
            "again"
        ) from None
    except FileError as error:
        raise FileError(f"{path}: {error}") from error
    # Weights made in inference mode could never be written outside it.
    with torch.inference_mode(False):
        for value in values:
            if value.host_content is not None:
                storages[value.index] = host_storage(value.host_content)
        weights = {
            index: tuple(_tensor_on(storages[index], view) for view in views)
            for index, views in program.weight_views.items()
        }
    program = dataclasses.replace(program, device_index=device.index)
    bindings = Bindings(
        weights=weights,
        generators=(default_generator(device),),
        arguments=with_objects(program.arguments_structure, torch_object),
        results=results,
    )
    if family is not None:
        family = dataclasses.replace(family, program=program)
    return Saved(BoundProgram(program, bindings), family)


def _available(device: str) -> torch.device:
    """The device that a Program is for; the CPU, for inspection, if there is none."""
    host = torch.device("cpu")
    if device == "cpu" or not device.isidentifier():
        return host
    try:
        module: Any = torch.get_device_module(device)
    except RuntimeError:  # torch knows no such device
        return host
    return torch.device(device, module.current_device()) if module.is_available() else host


def _refuse_triton(program: Program) -> None:
    """Refuse sources of kernels in a file that may be anybody's."""
    kernels = {one.callee for one in program.launches if isinstance(one.callee, TritonKernel)}
    if kernels:
        names = ", ".join(sorted({one.name for one in kernels}))
        count = show_count(len(kernels), "Triton kernel", "Triton kernels")
        raise FileError(
            f"the file has the source of {count} ({names}), which loading compiles, and a source "
            "can run any code then: give triton=True (--triton on the command line) if you trust "
            "the file as you trust code"
        )


def _read_program(text: bytes) -> tuple[Program, Family | None]:
    root = parse(text, "program.json")
    program = decode_program(root)
    check_file_program(program)
    if not has_family(root):
        return program, None
    return program, decode_family(root.mapping()[FAMILY], program)


def _common_storage(
    bound: BoundProgram, index: int, tensors: tuple[torch.Tensor, ...]
) -> torch.UntypedStorage:
    """The storage that all holders of a weight Value share.

    Raises:
        FileError: they share no storage, or no longer; one of them has another shape, dtype,
            strides or offset than recorded, or too little memory; or it is in a device format,
            whose bytes would be taken for plain.
    """
    program = bound.program
    value = program.values[index]
    device_format = own_format(tensors[0])
    if device_format:
        raise FileError(
            f"{value.name} lies in the device's format {device_format}, which a file does not "
            "hold: cast it with torch_npu.npu_format_cast(tensor, 2) before the capture"
        )
    views = program.weight_views[index]
    try:
        _native.check_weight(
            _native.WeightSpec(
                name=value.name,
                slot=0,
                size_bytes=value.size_bytes,
                written=False,
                holders=list(tensors),
                layouts=[native_layout(view) for view in views],
                offsets=[view.offset_bytes // ITEM_BYTES[view.dtype] for view in views],
            )
        )
    except BindingError as error:
        raise FileError(str(error)) from None
    return tensors[0].untyped_storage()


def _is_host_constant(value: Value, storage: torch.UntypedStorage) -> bool:
    """Whether a weight is a host constant, which the Program itself holds.

    Raises:
        FileError: its value differs from the recorded one.
    """
    if value.host_content is None:
        return False
    if bytes(bytes_of(storage).tolist()) != value.host_content:
        raise FileError(
            f"{value.name} has another value since the capture, and the launches hold the "
            "recorded one: set it back, or capture the model again"
        )
    return True


def _tensor_on(storage: torch.UntypedStorage, view: TensorView) -> torch.Tensor:
    dtype = find_dtype(view.dtype)
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    tensor.set_(storage, view.offset_bytes // dtype.itemsize, view.shape, view.strides)
    if view.conjugate:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if view.negative else tensor
