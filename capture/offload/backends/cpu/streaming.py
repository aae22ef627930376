"""Weights on the CPU that are brought from files, or from the model's tensors, as launches run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping

import torch

from offload.backends.base import Prepared
from offload.backends.host_memory import PAGE_BYTES, free_bytes, is_address_space_limited
from offload.backends.weight_sources import (
    Sources,
    managed_tensors,
    managed_weights,
    native_source,
    native_transfers,
    native_weights,
)
from offload.errors import FileError, OutOfMemory
from offload.native import _native
from offload.plan.streaming import Streaming
from offload.plan.topology import Link, MemoryLayout
from offload.program import BoundProgram, Program, StoredTensor, TensorView

# The link is measured on so many bytes of so many of the program's largest weights, each read
# twice, since the first time memory has to be found for them.
_SAMPLE_BYTES = 8 * 2**20
_SAMPLE_WEIGHTS = 16
_SMALL_BYTES = 64 * 2**10
# A smaller sample tells nothing of other programs' weights.
_LASTING_BYTES = 2**20
_links: dict[tuple[frozenset[tuple[int, bool] | None], bool], Link] = {}

# What a row takes is measured on so many of so many bytes, all over the largest weight.
_N_ROWS = 64
_ROW_BYTES = 1024


class CpuWeights:
    """Brings weights into memory of this process; see `WeightStreamer`."""

    gathers_rows = True

    def __init__(self, alignment_bytes: int) -> None:
        """Of a machine on which each weight is aligned so."""
        self._alignment_bytes = alignment_bytes

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """As `measure_link`; mapped memory is of small pages."""
        return measure_link(bound, mapped=mapped)

    def memory_layout(self, program: Program) -> MemoryLayout:
        """Pieces are mapped by pages, unless addresses are scarce, of which they take more."""
        granule_bytes = None if is_address_space_limited() else PAGE_BYTES
        return MemoryLayout(self._alignment_bytes, granule_bytes)

    def free_bytes(self, program: Program) -> int:
        """Memory that this process may still take."""
        return free_bytes()

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """The same: launches find weights wherever they are."""
        return prepared


def make_stream(
    bound: BoundProgram, streaming: Streaming
) -> tuple[_native.WeightStream, Mapping[int, torch.Tensor]]:
    """The memory of the weights, and what brings them there; nothing is read yet.

    Returns:
        The stream, and for each weight that it manages the tensor that was recorded, there; of a
        weight whose rows are gathered it is at no address, and nobody may touch it.

    Raises:
        OutOfMemory: there is not enough memory.
        FileError: a file is gone, or shorter than it was.
        BindingError: a weight's memory was freed or shrunk.
    """
    program = bound.program
    sources = managed_weights(bound)
    stream = _native.WeightStream(
        memory_bytes=streaming.memory_bytes,
        granule_bytes=streaming.granule_bytes,
        weights=native_weights(program, streaming, sources),
        transfers=native_transfers(program, streaming, sources),
        n_launches=len(program.launches),
    )
    memory = [stream.tensor(number).untyped_storage() for number in range(len(sources))]
    return stream, managed_tensors(program, sources, memory)


def gathered_tables(
    bound: BoundProgram, streaming: Streaming
) -> Mapping[int, tuple[int, int, int, int]]:
    """By launch that gathers rows, their table.

    Returns:
        The weight's number in the stream, where in it the table begins in bytes, how many rows it
        has, and the bytes of each.
    """
    program = bound.program
    numbers = {value: number for number, value in enumerate(managed_weights(bound))}
    tables = {}
    for one in streaming.gathers:
        view = program.launches[one.launch].arguments[0]
        assert isinstance(view, TensorView)  # of an embedding, as the planner was told
        tables[one.launch] = (
            numbers[one.value],
            view.offset_bytes,
            view.shape[0],
            one.row_bytes,
        )
    return tables


def measure_link(bound: BoundProgram, *, mapped: bool = False) -> Link:
    """What it takes to read the program's weights, by reading some of them.

    Measured once in a process for each disk, and for the model's own tensors, unless they are
    small; two threads that ask at once may both measure. No more than 8 MiB are taken for it.

    Args:
        bound: with weights that have a store.
        mapped: into memory that can be mapped side by side. Its pages are small, which a disk may
            fill at half the rate.

    Raises:
        FileError: a file is gone, or shorter than it was.
        OutOfMemory: there is no memory for the smallest sample.
    """
    program = bound.program
    sources = managed_weights(bound)
    sizes = {value: program.values[value].size_bytes for value in sources}
    largest = sorted((one for one in sizes if sizes[one]), key=lambda one: (-sizes[one], one))
    chosen = largest[:_SAMPLE_WEIGHTS]
    if not chosen:  # there is nothing to read, and nobody asks what it would take
        return Link(bytes_per_second=1e9, overhead_ns=0.0)
    kinds = frozenset(_kind_of_store(sources[value]) for value in chosen)
    if (kinds, mapped) in _links:
        return _links[kinds, mapped]
    link, sample_bytes = _measured_link(program, sources, chosen, mapped=mapped)
    if sample_bytes >= _LASTING_BYTES:
        _links[kinds, mapped] = link
    return link


def _kind_of_store(content: list[torch.Tensor] | StoredTensor) -> tuple[int, bool] | None:
    """What makes reading take otherwise: the disk, and whether a block begins there.

    None: it is in memory.

    Raises:
        FileError: the file is gone.
    """
    if not isinstance(content, StoredTensor):
        return None
    try:
        return os.stat(content.path).st_dev, content.offset_bytes % PAGE_BYTES == 0
    except OSError as error:
        raise FileError(f"{content.path}: {error.strerror}") from error


def _measured_link(
    program: Program, sources: Sources, chosen: list[int], *, mapped: bool
) -> tuple[Link, int]:
    """By the median of the weights' rates, and what a small copy takes beside that.

    Where there is no memory for a sample, by smaller ones. A weight that is hardly larger than the
    small copy tells no rate.

    Returns:
        The link, and the bytes of the largest sample.
    """
    most_bytes = _SAMPLE_BYTES
    while True:
        try:
            samples = [
                (n, _read_ns(program, sources, value, n, mapped=mapped))
                for value in chosen
                for n in [min(program.values[value].size_bytes, most_bytes)]
            ]
            break
        except OutOfMemory:
            if most_bytes <= _SMALL_BYTES:
                raise
            most_bytes = max(_SMALL_BYTES, most_bytes // 4)
    first = chosen[0]
    sample_bytes = samples[0][0]
    n_small = min(_SMALL_BYTES, sample_bytes // 2)
    small_ns = min(_read_ns(program, sources, first, n_small, mapped=mapped) for _ in range(3))
    # bytes / bandwidth + overhead of each, and the same for a small copy
    ns_per_byte = statistics.median(
        max(1e-6, (total_ns - small_ns) / (n_bytes - n_small))
        for n_bytes, total_ns in samples
        if n_bytes >= 2 * n_small
    )
    size_bytes = program.values[first].size_bytes
    link = Link(
        bytes_per_second=1e9 / ns_per_byte,
        overhead_ns=max(0.0, small_ns - n_small * ns_per_byte),
        row_overhead_ns=_row_overhead_ns(sources[first], size_bytes, ns_per_byte),
    )
    return link, sample_bytes


def _row_overhead_ns(
    content: list[torch.Tensor] | StoredTensor, size_bytes: int, ns_per_byte: float
) -> float:
    """What a row takes beyond its bytes, once the page cache has it; nothing in memory.

    Raises:
        FileError: the file is gone, or cannot be read.
    """
    if not isinstance(content, StoredTensor):
        return 0.0
    n_bytes = min(_ROW_BYTES, size_bytes)
    offsets = [content.offset_bytes + size_bytes // _N_ROWS * row for row in range(_N_ROWS)]
    try:
        with open(content.path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(2):  # the first time they are read from the disk
                begin_ns = time.perf_counter_ns()
                for offset in offsets:
                    os.pread(file.fileno(), n_bytes, offset)
                total_ns = time.perf_counter_ns() - begin_ns
    except OSError as error:
        raise FileError(f"{content.path}: {error.strerror}") from error
    return max(0.0, total_ns / _N_ROWS - n_bytes * ns_per_byte)


def _read_ns(
    program: Program,
    sources: Sources,
    value: int,
    size_bytes: int,
    *,
    mapped: bool,
) -> int:
    """What it takes to read the first bytes of a weight into memory that is there.

    Raises:
        BindingError: the weight's memory was freed or shrunk.
    """
    content = sources[value]
    if not isinstance(content, StoredTensor):
        _native.check_memory(program.values[value].name, content[0])
    pieces = [(0, size_bytes, 0, False)]
    if mapped and size_bytes > PAGE_BYTES:  # memory is only mapped for what is in several pieces
        rest_bytes = size_bytes - PAGE_BYTES
        pieces = [(0, PAGE_BYTES, 0, False), (PAGE_BYTES, rest_bytes, PAGE_BYTES, False)]
    source = native_source(content if isinstance(content, StoredTensor) else content[0])
    stream = _native.WeightStream(
        memory_bytes=size_bytes,
        granule_bytes=PAGE_BYTES,
        weights=[
            _native.StreamedWeight(
                name=program.values[value].name,
                size_bytes=size_bytes,
                pieces=pieces,
                source=source if isinstance(source, _native.FileRange) else source[:size_bytes],
            )
        ],
        transfers=[],
        n_launches=1,
    )
    try:
        stream.load()
        begin_ns = time.perf_counter_ns()
        stream.load()
        return time.perf_counter_ns() - begin_ns
    finally:
        stream.close()
