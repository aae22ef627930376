"""Weights on the CPU, transferred from files or from the model's tensors while launches run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping

import torch

from offload.backends.host_memory import PAGE_BYTES, free_bytes, is_address_space_limited
from offload.backends.loaded import Prepared
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

# The link is measured on this many bytes of each of this many of the program's largest weights,
# each read twice, as the first read allocates memory.
_SAMPLE_BYTES = 8 * 2**20
_SAMPLE_WEIGHTS = 16
_SMALL_BYTES = 64 * 2**10
# A smaller sample says nothing about other programs' weights.
_LASTING_BYTES = 2**20
_links: dict[tuple[frozenset[tuple[int, bool] | None], bool], Link] = {}

# The overhead of a row is measured on this many rows of this many bytes, spread over the largest
# weight.
_N_ROWS = 64
_ROW_BYTES = 1024


class CpuWeights:
    """Transfers weights into memory of this process; see `WeightStreamer`."""

    gathers_rows = True

    def __init__(self, alignment_bytes: int, limit_bytes: int | None = None) -> None:
        """Take the alignment of each weight, and the user's limit of memory."""
        self._alignment_bytes, self._limit_bytes = alignment_bytes, limit_bytes

    def link(self, bound: BoundProgram, *, mapped: bool = False) -> Link:
        """Measure as `measure_link`; mapped memory has small pages."""
        return measure_link(bound, mapped=mapped)

    def memory_layout(self, program: Program) -> MemoryLayout:
        """Map pieces by pages, unless addresses are limited, as mapping takes more of them."""
        granule_bytes = None if is_address_space_limited() else PAGE_BYTES
        return MemoryLayout(self._alignment_bytes, granule_bytes)

    def free_bytes(self, program: Program) -> int:
        """Return the memory that this process may still allocate, at most the user's limit."""
        free = free_bytes()
        return free if self._limit_bytes is None else min(free, self._limit_bytes)

    def prepare_streamed(self, prepared: Prepared, streaming: Streaming) -> Prepared:
        """Return the same: launches find weights at any address."""
        return prepared


def make_stream(
    bound: BoundProgram, streaming: Streaming
) -> tuple[_native.WeightStream, Mapping[int, torch.Tensor]]:
    """Return the weights' memory and the stream that fills it; nothing is read yet.

    Returns:
        The stream, and the recorded tensor of each managed weight, in this memory; that of a weight
        with gathered rows has no memory, and must not be accessed.

    Raises:
        OutOfMemory: there is not enough memory.
        FileError: a file is missing, or shorter than it was.
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
    """Return the table of each launch that gathers rows.

    Returns:
        The weight's number in the stream, the table's offset in it in bytes, its number of rows,
        and the bytes of a row.
    """
    program = bound.program
    numbers = {value: number for number, value in enumerate(managed_weights(bound))}
    tables = {}
    for one in streaming.gathers:
        view = program.launches[one.launch].arguments[0]
        assert isinstance(view, TensorView)  # of an embedding, as stated to the planner
        tables[one.launch] = (
            numbers[one.value],
            view.offset_bytes,
            view.shape[0],
            one.row_bytes,
        )
    return tables


def measure_link(bound: BoundProgram, *, mapped: bool = False) -> Link:
    """Measure reads of the program's weights, on some of them.

    Measured once per process for each disk, and for the model's own tensors, unless they are small;
    two concurrent callers may both measure. It uses at most 8 MiB.

    Args:
        bound: the program, whose weights have a store.
        mapped: into memory that can be mapped contiguously. Its pages are small, which may halve
            the rate of a disk.

    Raises:
        FileError: a file is missing, or shorter than it was.
        OutOfMemory: there is no memory for the smallest sample.
    """
    program = bound.program
    sources = managed_weights(bound)
    sizes = {value: program.values[value].size_bytes for value in sources}
    largest = sorted((one for one in sizes if sizes[one]), key=lambda one: (-sizes[one], one))
    chosen = largest[:_SAMPLE_WEIGHTS]
    if not chosen:  # there is nothing to read, so the link is not used
        return Link(bytes_per_second=1e9, overhead_ns=0.0)
    kinds = frozenset(_kind_of_store(sources[value]) for value in chosen)
    if (kinds, mapped) in _links:
        return _links[kinds, mapped]
    link, sample_bytes = _measured_link(program, sources, chosen, mapped=mapped)
    if sample_bytes >= _LASTING_BYTES:
        _links[kinds, mapped] = link
    return link


def _kind_of_store(content: list[torch.Tensor] | StoredTensor) -> tuple[int, bool] | None:
    """Return what the rate depends on: the disk, and whether the content begins at a block.

    None for content in memory.

    Raises:
        FileError: the file is missing.
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
    """Return the median of the weights' rates, and the overhead of a small copy.

    Samples are smaller where memory does not suffice. A weight hardly larger than the small copy
    gives no rate.

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
    # the duration is bytes / bandwidth + overhead, for each weight and for a small copy
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
    """Return a row's overhead beyond its bytes, from the page cache; 0 in memory.

    Raises:
        FileError: the file is missing, or cannot be read.
    """
    if not isinstance(content, StoredTensor):
        return 0.0
    n_bytes = min(_ROW_BYTES, size_bytes)
    offsets = [content.offset_bytes + size_bytes // _N_ROWS * row for row in range(_N_ROWS)]
    try:
        with open(content.path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(2):  # the first time from the disk
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
    """Return the duration of reading a weight's first bytes into existing memory.

    Raises:
        BindingError: the weight's memory was freed or shrunk.
    """
    content = sources[value]
    if not isinstance(content, StoredTensor):
        _native.check_memory(program.values[value].name, content[0])
    pieces = [(0, size_bytes, 0, False)]
    if mapped and size_bytes > PAGE_BYTES:  # memory is only mapped for several pieces
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
