"""Memory of the simulated device: plain, virtual, shared, freed."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

import pytest

# The children only read memory: no lock of another thread matters to them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")


def fault_signal(read):
    """The signal that ends a child process which runs `read`; 0 if it lives."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        read()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_plain_memory_is_counted_and_filled_with_poison(cuda, simulator):
    address = cuda.allocate(1000)
    assert cuda.download(address, 1000) == b"\xa5" * 1000
    cuda.upload(address, b"content")
    assert cuda.download(address, 7) == b"content"
    assert (simulator.live_bytes, simulator.physical_bytes) == (1000, 1000)
    cuda.call("cuMemFree", address)
    assert (simulator.live_bytes, simulator.physical_bytes) == (0, 0)
    assert cuda.peek(address, 7) == b"\xa5" * 7
    assert cuda.code("cuMemFree", address) == cuda.INVALID_VALUE
    assert cuda.code("cuMemcpyHtoD", address, b"late", 4) == cuda.INVALID_VALUE


def test_the_memory_limit(cuda, simulator):
    simulator.set_memory_limit(4 * cuda.MIB)
    chunk = cuda.create_chunk()
    first = cuda.allocate(cuda.MIB)
    assert [int(n) for n in cuda.call("cuMemGetInfo")] == [cuda.MIB, 4 * cuda.MIB]
    assert cuda.code("cuMemAlloc", cuda.MIB + 1) == cuda.OUT_OF_MEMORY
    assert (
        cuda.code("cuMemCreate", cuda.GRANULARITY_BYTES, cuda.properties(), 0) == cuda.OUT_OF_MEMORY
    )
    cuda.call("cuMemRelease", chunk)
    cuda.allocate(3 * cuda.MIB)
    assert cuda.code("cuMemAlloc", 1) == cuda.OUT_OF_MEMORY
    assert cuda.code("cuMemAlloc", 0) == cuda.INVALID_VALUE
    cuda.call("cuMemFree", first)


def test_freed_memory_may_fault(cuda, simulator):
    simulator.set_free_policy(1)
    address = cuda.allocate(64)
    cuda.call("cuMemFree", address)
    assert fault_signal(lambda: cuda.peek(address, 1)) == signal.SIGSEGV


def test_freed_addresses_may_be_reused(cuda, simulator):
    simulator.set_free_policy(2)
    first = cuda.allocate(100)
    cuda.upload(first, b"old")
    id_of = cuda.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    first_id = cuda.call("cuPointerGetAttribute", id_of, first)
    cuda.call("cuMemFree", first)
    second = cuda.allocate(200)
    assert second == first
    assert cuda.download(second, 3) == b"\xa5" * 3
    assert cuda.call("cuPointerGetAttribute", id_of, second) != first_id


def test_plain_memory_has_guards(cuda):
    address = cuda.allocate(4096)
    assert fault_signal(lambda: cuda.peek(address, 4096)) == 0
    assert fault_signal(lambda: cuda.peek(address - 1, 1)) == signal.SIGSEGV
    assert fault_signal(lambda: cuda.peek(address + 4096, 1)) == signal.SIGSEGV


def test_pointer_attributes(cuda):
    attribute = cuda.driver.CUpointer_attribute
    address = cuda.allocate(1000)
    chunk = cuda.create_chunk()
    mapped = cuda.reserve_mapped(chunk)
    host = int(cuda.call("cuMemHostAlloc", 64, 0))
    for begin, n_bytes, kind in ((address, 1000, 2), (mapped, 2 * cuda.MIB, 2), (host, 64, 1)):
        inside = begin + n_bytes - 1

        def read(name, inside=inside):
            return cuda.call("cuPointerGetAttribute", getattr(attribute, name), inside)

        assert int(read("CU_POINTER_ATTRIBUTE_RANGE_START_ADDR")) == begin
        assert read("CU_POINTER_ATTRIBUTE_RANGE_SIZE") == n_bytes
        assert int(read("CU_POINTER_ATTRIBUTE_MEMORY_TYPE")) == kind
        assert int(read("CU_POINTER_ATTRIBUTE_DEVICE_POINTER")) == inside
        assert read("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL") == 0
        beyond = attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, begin + n_bytes
        assert cuda.code("cuPointerGetAttribute", *beyond) == cuda.INVALID_VALUE
    ids = {
        cuda.call("cuPointerGetAttribute", attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, begin)
        for begin in (address, mapped, host)
    }
    assert len(ids) == 3


def test_one_chunk_at_many_addresses(cuda, simulator):
    chunk = cuda.create_chunk()
    addresses = [cuda.reserve_mapped(chunk) for _ in range(3)]
    assert len(set(addresses)) == 3
    cuda.upload(addresses[0] + 100, b"shared")
    assert [cuda.download(address + 100, 6) for address in addresses] == [b"shared"] * 3
    assert simulator.physical_bytes == cuda.GRANULARITY_BYTES
    assert (simulator.live("mapping"), simulator.live("reservation")) == (3, 3)


def test_a_chunk_lives_until_its_last_mapping(cuda, simulator):
    chunk = cuda.create_chunk()
    address = cuda.reserve_mapped(chunk)
    cuda.call("cuMemRelease", chunk)
    assert cuda.code("cuMemRelease", chunk) == cuda.INVALID_VALUE
    cuda.upload(address, b"alive")
    assert cuda.download(address, 5) == b"alive"
    assert simulator.physical_bytes == cuda.GRANULARITY_BYTES
    cuda.call("cuMemUnmap", address, cuda.GRANULARITY_BYTES)
    assert simulator.physical_bytes == 0
    cuda.call("cuMemAddressFree", address, cuda.GRANULARITY_BYTES)
    assert simulator.live("reservation") == 0


def test_what_is_reserved_faults_until_mapped_and_allowed(cuda):
    size_bytes = 3 * cuda.GRANULARITY_BYTES
    base = int(cuda.call("cuMemAddressReserve", size_bytes, 0, 0, 0))
    middle = base + cuda.GRANULARITY_BYTES
    assert fault_signal(lambda: cuda.peek(middle, 1)) == signal.SIGSEGV
    chunk = cuda.create_chunk()
    cuda.call("cuMemMap", middle, cuda.GRANULARITY_BYTES, 0, chunk, 0)
    assert fault_signal(lambda: cuda.peek(middle, 1)) == signal.SIGSEGV
    assert cuda.code("cuMemcpyHtoD", middle, b"x", 1) == cuda.INVALID_VALUE
    cuda.allow(middle)
    assert fault_signal(lambda: cuda.peek(middle, cuda.GRANULARITY_BYTES)) == 0
    assert fault_signal(lambda: cuda.peek(middle - 1, 1)) == signal.SIGSEGV
    assert fault_signal(lambda: cuda.peek(middle + cuda.GRANULARITY_BYTES, 1)) == signal.SIGSEGV
    cuda.call("cuMemUnmap", middle, cuda.GRANULARITY_BYTES)
    assert fault_signal(lambda: cuda.peek(middle, 1)) == signal.SIGSEGV


def test_memory_may_be_readable_alone(cuda):
    address = cuda.reserve_mapped(cuda.create_chunk())
    cuda.allow(address, flags=1)
    assert fault_signal(lambda: cuda.peek(address, 1)) == 0
    assert fault_signal(lambda: ctypes.memset(address, 0, 1)) == signal.SIGSEGV


def test_reservations_are_aligned_and_follow_a_hint(cuda):
    aligned = int(cuda.call("cuMemAddressReserve", cuda.GRANULARITY_BYTES, 64 * cuda.MIB, 0, 0))
    assert aligned % (64 * cuda.MIB) == 0
    wanted = 0x2A_0000_0000_00
    assert int(cuda.call("cuMemAddressReserve", cuda.GRANULARITY_BYTES, 0, wanted, 0)) == wanted
    granularity = cuda.driver.CUmemAllocationGranularity_flags
    flag = granularity.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    found = cuda.call("cuMemGetAllocationGranularity", cuda.properties(), flag)
    assert found == cuda.GRANULARITY_BYTES


@pytest.mark.parametrize(
    "break_it",
    [
        lambda cuda, at, chunk: cuda.code("cuMemAddressReserve", 1000, 0, 0, 0),
        lambda cuda, at, chunk: cuda.code("cuMemAddressReserve", 2 * cuda.MIB, 3, 0, 0),
        lambda cuda, at, chunk: cuda.code("cuMemCreate", 1000, cuda.properties(), 0),
        lambda cuda, at, chunk: cuda.code("cuMemMap", at, 2 * cuda.MIB, 0, chunk, 0),
        lambda cuda, at, chunk: cuda.code(
            "cuMemMap", at + 2 * cuda.MIB, 2 * cuda.MIB, 4096, chunk, 0
        ),
        lambda cuda, at, chunk: cuda.code("cuMemMap", at + 2 * cuda.MIB, 4 * cuda.MIB, 0, chunk, 0),
        lambda cuda, at, chunk: cuda.code("cuMemMap", at + 4 * cuda.MIB, 2 * cuda.MIB, 0, chunk, 0),
        lambda cuda, at, chunk: cuda.code("cuMemMap", at + 2 * cuda.MIB, 2 * cuda.MIB, 0, 12345, 0),
        lambda cuda, at, chunk: cuda.code("cuMemUnmap", at, cuda.MIB),
        lambda cuda, at, chunk: cuda.code("cuMemUnmap", at, 4 * cuda.MIB),
        lambda cuda, at, chunk: cuda.code("cuMemAddressFree", at, 4 * cuda.MIB),
        lambda cuda, at, chunk: cuda.code("cuMemAddressFree", at, 2 * cuda.MIB),
    ],
)
def test_invalid_use_of_virtual_memory(cuda, break_it):
    """Two granules are reserved, and the first is mapped."""
    chunk = cuda.create_chunk()
    base = int(cuda.call("cuMemAddressReserve", 4 * cuda.MIB, 0, 0, 0))
    cuda.map_at(base, chunk)
    assert break_it(cuda, base, chunk) == cuda.INVALID_VALUE
    cuda.upload(base, b"as before")
    assert cuda.download(base, 9) == b"as before"


def test_copies_may_span_adjacent_mappings(cuda):
    base = int(cuda.call("cuMemAddressReserve", 4 * cuda.MIB, 0, 0, 0))
    cuda.map_at(base, cuda.create_chunk())
    cuda.map_at(base + 2 * cuda.MIB, cuda.create_chunk())
    border = base + 2 * cuda.MIB - 4
    cuda.upload(border, b"12345678")
    assert cuda.download(border, 8) == b"12345678"
    cuda.call("cuMemUnmap", base + 2 * cuda.MIB, 2 * cuda.MIB)
    assert cuda.code("cuMemcpyHtoD", border, b"12345678", 8) == cuda.INVALID_VALUE


def test_pinned_memory_is_counted(cuda, simulator):
    address = int(cuda.call("cuMemHostAlloc", 5000, 0))
    assert (simulator.host_bytes, simulator.physical_bytes) == (5000, 0)
    cuda.call("cuMemFreeHost", address)
    assert simulator.host_bytes == 0
    assert cuda.code("cuMemFreeHost", address) == cuda.INVALID_VALUE


def test_kernels_can_ask_what_is_accessible(cuda, simulator):
    address = cuda.allocate(100)
    assert simulator.is_accessible(address, 100)
    assert not simulator.is_accessible(address, 101)
    assert not simulator.is_accessible(address - 1, 1)
    cuda.call("cuMemFree", address)
    assert not simulator.is_accessible(address, 1)
