"""The places of tensors in a folder of safetensors files: names and offsets, no content.

The safetensors library returns tensors and not their offsets, so the headers are read here: eight
bytes with the header's length, little-endian, then JSON with dtype, shape and data_offsets by name
(format description in the README of the safetensors repository).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

from offload.errors import FileError, ProgramError
from offload.program import ITEM_BYTES, StoredTensor
from offload.program.reader import Node, parse

_INDEX = "model.safetensors.index.json"
_HEADER_SIZE_BYTES = 8
_MAXIMUM_HEADER_BYTES = 100_000_000  # as in the safetensors library
_MAXIMUM_INDEX_BYTES = 2**30
_METADATA = "__metadata__"
_BLOCK_BYTES = 2**20

_DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "U16": "uint16", "I32": "int32",
    "U32": "uint32", "I64": "int64", "U64": "uint64", "F16": "float16", "BF16": "bfloat16",
    "F32": "float32", "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


def find_stored_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Read the places of tensors in a safetensors file, or in all files of a folder.

    In a folder with an index (`model.safetensors.index.json`) the files that it names, otherwise
    every `*.safetensors`.

    Returns:
        The place of each tensor by name. No content is read. A dtype that torch lacks (F4, F6)
        keeps the file's name, as the tensor may never be requested.

    Raises:
        FileError: this is not a path; there is no such file or folder; a file of the index is
            missing, or lacks a tensor that the index attributes to it; a file is damaged or
            shorter than its header says; or two files have a tensor of the same name.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise FileError(
            "expected the path of a safetensors file or of a folder of them, got a "
            f"{type(path).__qualname__}: write tensors with safetensors.torch.save_file"
        )
    path = Path(path).absolute()
    if not path.exists():
        raise FileError(f"{path}: there is no such file or folder")
    index = _read_index(path / _INDEX) if (path / _INDEX).is_file() else None
    if path.is_file():
        files = [path]
    elif index is not None:
        files = [path / name for name in sorted(set(index.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileError(f"{path}: there are no *.safetensors files in this folder")
    found: dict[str, StoredTensor] = {}
    for file in files:
        for stored in _tensors_of(file):
            if index is not None and index.get(stored.name) != file.name:
                continue
            if stored.name in found:
                raise FileError(
                    f"{file}: it has a tensor {stored.name!r}, and so has "
                    f"{found[stored.name].path}: which of the two to use is not known"
                )
            found[stored.name] = stored
    _refuse_absent(index or {}, found, path)
    return found


def check_stored_tensors(stored: Iterable[StoredTensor]) -> None:
    """Check that files still have these tensors at the same place; their content may be new.

    Raises:
        FileError: a file is missing, damaged, or was rewritten with another layout.
    """
    files: dict[str, dict[str, StoredTensor]] = {}
    for one in stored:
        if one.path not in files:
            files[one.path] = {other.name: other for other in _tensors_of(Path(one.path))}
        found = files[one.path].get(one.name)
        if found != one:
            now = "is missing now" if found is None else f"is {_described(found)} now"
            raise FileError(
                f"{one.path}: {one.name} was {_described(one)} when the model was captured, and "
                f"{now}: capture again, or put the file back"
            )


def _described(one: StoredTensor) -> str:
    return f"{one.dtype}{list(one.shape)} at byte {one.offset_bytes}"


def _refuse_absent(index: Mapping[str, str], found: Mapping[str, StoredTensor], path: Path) -> None:
    for name, file in index.items():
        if name not in found:
            raise FileError(f"{path / file}: {_INDEX} says that {name!r} is in it, and it is not")


def _read_index(path: Path) -> dict[str, str]:
    """The file name of each tensor."""
    try:
        if path.stat().st_size > _MAXIMUM_INDEX_BYTES:
            raise FileError(f"{path}: larger than any index")
        fields = parse(path.read_bytes(), path.name).mapping()
        if "weight_map" not in fields:
            raise ProgramError(f"{path.name} has no weight_map")
        files = {name: node.text() for name, node in fields["weight_map"].mapping().items()}
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    except ProgramError as error:
        raise FileError(f"{path}: {error}") from None
    for name in files.values():
        if Path(name).name != name:
            raise FileError(f"{path}: it names {name!r}, which is not a file of this folder")
    return files


def _tensors_of(path: Path) -> Iterator[StoredTensor]:
    try:
        with path.open("rb") as file:
            yield from _read_header(file, path)
    except OSError as error:
        raise FileError(f"{path}: cannot be read: {error}") from error
    except ProgramError as error:
        raise FileError(f"{path}: {error}: this is not an intact safetensors file") from None


def _read_header(file: IO[bytes], path: Path) -> list[StoredTensor]:
    file_bytes = os.fstat(file.fileno()).st_size
    header_bytes = int.from_bytes(file.read(_HEADER_SIZE_BYTES), "little")
    begin_bytes = _HEADER_SIZE_BYTES + header_bytes
    if header_bytes > _MAXIMUM_HEADER_BYTES or begin_bytes > file_bytes:
        raise ProgramError(f"a header of {header_bytes} bytes in a file of {file_bytes}")
    header = parse(file.read(header_bytes), "the header").mapping()
    header.pop(_METADATA, None)
    stored = [_stored(name, node, path, begin_bytes) for name, node in header.items()]
    end_bytes = max((one.offset_bytes + one.size_bytes for one in stored), default=0)
    if end_bytes > file_bytes:
        raise ProgramError(
            f"its tensors end at byte {end_bytes}, and the file at byte {file_bytes}"
        )
    return stored


def _stored(name: str, node: Node, path: Path, begin_bytes: int) -> StoredTensor:
    dtype_node, shape_node, offsets = node.fields("dtype", "shape", "data_offsets")
    written_dtype = dtype_node.text()
    if written_dtype in ITEM_BYTES:  # our name of a dtype, not the format's
        dtype_node.fail(f"a dtype as {', '.join(_DTYPES)}")
    dtype = _DTYPES.get(written_dtype, written_dtype)
    shape = shape_node.integers()
    begin, *ends = offsets.integers() or (0,)
    end = ends[0] if len(ends) == 1 else -1
    size_bytes = end - begin
    if dtype in ITEM_BYTES:
        size_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if min(begin, size_bytes) < 0 or end != begin + size_bytes:
        offsets.fail(f"a range of {max(size_bytes, 0)} bytes")
    return StoredTensor(name, str(path), begin_bytes + begin, size_bytes, shape, dtype)


def has_same_content(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes.

    Both are read, block by block, unless dtype, shape or size already differ.

    Raises:
        FileError: a file cannot be read, or is shorter than before.
    """
    if (one.dtype, one.shape, one.size_bytes) != (other.dtype, other.shape, other.size_bytes):
        return False
    blocks = zip(_blocks_of(one), _blocks_of(other), strict=True)
    return all(first == second for first, second in blocks)


def _blocks_of(stored: StoredTensor) -> Iterator[bytes]:
    try:
        with open(stored.path, "rb", buffering=0) as file:
            for begin in range(0, stored.size_bytes, _BLOCK_BYTES):
                n_bytes = min(_BLOCK_BYTES, stored.size_bytes - begin)
                block = os.pread(file.fileno(), n_bytes, stored.offset_bytes + begin)
                if len(block) < n_bytes:
                    raise FileError(f"{stored.path}: {stored.name} ends before its {n_bytes} bytes")
                yield block
    except OSError as error:
        raise FileError(f"{stored.path}: cannot be read: {error}") from error
