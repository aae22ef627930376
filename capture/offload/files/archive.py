"""The file: one zip of `program.json` and `weights.safetensors`, neither compressed.

In `weights.safetensors` every weight Value is one array of bytes, named by the Value's index.
Tensors that share a storage, leave gaps or have a dtype that safetensors lacks therefore need no
special treatment: `program.json` says how tensors view the bytes.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import safetensors
import safetensors.torch
import torch

from offload.console.progress import Stage, stage
from offload.errors import FileError, ProgramError
from offload.interpreter.device_failures import torch_failures
from offload.interpreter.eager_run import bytes_of
from offload.program.reader import parse

_PROGRAM = "program.json"
_WEIGHTS = "weights.safetensors"

# Far above any Program: a million launches take 0.7 GB as JSON, a million weights 0.1 GB.
_MAXIMUM_PROGRAM_BYTES = 2**30
_MAXIMUM_HEADER_BYTES = 2**27

_CHUNK_BYTES = 2**20

# The least speed that may be expected of writing a file.
_WRITTEN_BYTES_PER_S = 500e6
_HEADER_SIZE_BYTES = 8
_ENCRYPTED = 0x1


def write_archive(path: Path, program_text: bytes, weights: Mapping[int, torch.Tensor]) -> None:
    """Write a file beside `path`, and rename it to `path` once it is complete.

    Args:
        path: of the file.
        program_text: the content of `program.json`.
        weights: the bytes of each weight Value, of dtype uint8.

    Raises:
        FileError: it cannot be written there.
        ExecutionError: the device of a weight failed.
    """
    with torch_failures("copying weights to the host"):
        arrays = {str(index): content.cpu() for index, content in weights.items()}
    try:
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            weights_path, whole_path = Path(folder) / _WEIGHTS, Path(folder) / path.name
            n_bytes = sum(content.nbytes for content in arrays.values())
            with stage("gathering weights", 1, expected_s=n_bytes / _WRITTEN_BYTES_PER_S):
                safetensors.torch.save_file(arrays, weights_path)
            with zipfile.ZipFile(whole_path, "w", zipfile.ZIP_STORED) as archive:
                # A new ZipInfo has no time of day: equal programs give equal files.
                archive.writestr(zipfile.ZipInfo(_PROGRAM), program_text)
                with (
                    weights_path.open("rb") as source,
                    archive.open(zipfile.ZipInfo(_WEIGHTS), "w", force_zip64=True) as target,
                    stage("writing weights", weights_path.stat().st_size) as current,
                ):
                    while chunk := source.read(_CHUNK_BYTES):
                        target.write(chunk)
                        current.reach(current.done + len(chunk))
            os.replace(whole_path, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise FileError(f"cannot be written: {error}") from error


class Archive:
    """An open file whose members are as expected and no larger than the file."""

    def __init__(self, archive: zipfile.ZipFile, file_bytes: int) -> None:
        self._archive = archive
        members = archive.infolist()
        if [member.filename for member in members] != [_PROGRAM, _WEIGHTS]:
            raise ProgramError(f"it does not consist of {_PROGRAM} and {_WEIGHTS}")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & _ENCRYPTED:
                raise ProgramError(f"{member.filename} is compressed or encrypted")
            if member.file_size != member.compress_size or member.file_size > file_bytes:
                raise ProgramError(f"{member.filename} claims to be larger than the file")
        self._weights_bytes = members[1].file_size
        if members[0].file_size > _MAXIMUM_PROGRAM_BYTES:
            raise ProgramError(
                f"{_PROGRAM} takes {members[0].file_size} bytes, more than any program"
            )

    def program_text(self) -> bytes:
        """The bytes of `program.json`."""
        with _zip_errors():
            return self._archive.read(_PROGRAM)

    @torch_failures("copying weights to the device")
    def read_weights(
        self, sizes_bytes: Mapping[int, int], device: torch.device
    ) -> dict[int, torch.UntypedStorage]:
        """Read each weight Value's bytes once, into a separate storage.

        The safetensors library reads whole files or whole buffers, and a member of a zip is
        neither, so its header is read here. It must say exactly what the program says; nothing is
        allocated before that is checked.

        Args:
            sizes_bytes: the size of each weight Value.
            device: of the storages.

        Raises:
            FileError: the device does not allocate the memory of a weight.
            ExecutionError: the device failed.
            ProgramError: the header, or the checksum of the content, is not as expected.
        """
        with _zip_errors():
            member = self._archive.open(_WEIGHTS)
        with member, stage("reading weights", sum(sizes_bytes.values())) as current:
            begins = self._read_header(member, sizes_bytes)
            staging = bytearray(_CHUNK_BYTES)
            storages: dict[int, torch.UntypedStorage] = {}
            for index in sorted(begins, key=lambda index: (begins[index], sizes_bytes[index])):
                storages[index] = _read_storage(
                    member, sizes_bytes[index], staging, device, current
                )
        return storages

    def _read_header(self, member: IO[bytes], sizes_bytes: Mapping[int, int]) -> dict[int, int]:
        """Where each weight Value's bytes begin, counted from the end of the header."""
        header_bytes = int.from_bytes(_read(member, _HEADER_SIZE_BYTES), "little")
        content_bytes = self._weights_bytes - _HEADER_SIZE_BYTES - header_bytes
        if header_bytes > _MAXIMUM_HEADER_BYTES or content_bytes != sum(sizes_bytes.values()):
            raise ProgramError(f"{_WEIGHTS} does not hold the program's weights")
        header = parse(_read(member, header_bytes), _WEIGHTS).mapping()
        if header.keys() != {str(index) for index in sizes_bytes}:
            raise ProgramError(f"{_WEIGHTS} does not hold the program's weights, each once")
        begins: dict[int, int] = {}
        for name, node in header.items():
            dtype, shape, offsets = node.fields("dtype", "shape", "data_offsets")
            size_bytes = sizes_bytes[int(name)]
            dtype.one_of(("U8",), "bytes (U8)")
            if shape.integers() != (size_bytes,):
                shape.fail(f"{size_bytes} bytes")
            begin, *end = offsets.integers() or (0,)
            if end != [begin + size_bytes]:
                offsets.fail(f"a range of {size_bytes} bytes")
            begins[int(name)] = begin
        _check_gapless(begins, sizes_bytes)
        return begins


def _read(member: IO[bytes], n_bytes: int) -> bytes:
    """Read exactly `n_bytes`; reading the member's last byte compares its checksum."""
    with _zip_errors():
        content = member.read(n_bytes)
    if len(content) != n_bytes:
        raise ProgramError(f"{_WEIGHTS} ends too early")
    return content


def _check_gapless(begins: Mapping[int, int], sizes_bytes: Mapping[int, int]) -> None:
    expected = 0
    for begin, size_bytes in sorted((begins[index], sizes_bytes[index]) for index in begins):
        if begin != expected:
            raise ProgramError(f"{_WEIGHTS} has a gap or an overlap at byte {expected}")
        expected += size_bytes


def _read_storage(
    member: IO[bytes], size_bytes: int, staging: bytearray, device: torch.device, current: Stage
) -> torch.UntypedStorage:
    try:
        storage = torch.UntypedStorage(size_bytes, device=device)
    except (RuntimeError, MemoryError) as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise FileError(
            f"a weight of {size_bytes} bytes cannot be allocated on {device}: {why}"
        ) from None
    target = bytes_of(storage)
    source = torch.frombuffer(staging, dtype=torch.uint8)
    at = 0
    while at < size_bytes:
        n_bytes = min(len(staging), size_bytes - at)
        staging[:n_bytes] = _read(member, n_bytes)
        target[at : at + n_bytes] = source[:n_bytes]
        at += n_bytes
        current.reach(current.done + n_bytes)
    return storage


@contextlib.contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a file for reading.

    Raises:
        FileError: there is no such file, or it cannot be read.
        ProgramError: it is not an archive of a program.
    """
    with _zip_errors():
        is_there, is_file = path.exists(), path.is_file()
    if not is_file:  # a pipe would wait for a writer
        raise FileError("it is not a regular file" if is_there else "there is no such file")
    with contextlib.ExitStack() as context:
        with _zip_errors():
            archive = context.enter_context(zipfile.ZipFile(path))
        yield Archive(archive, path.stat().st_size)


@contextlib.contextmanager
def _zip_errors() -> Iterator[None]:
    """Translate what zipfile raises on a damaged file; it documents no complete list."""
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot be read: {error}") from error
    except Exception as error:
        raise ProgramError(f"it is not an intact zip file ({error})") from error
