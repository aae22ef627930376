"""Memory of the simulated device: plain, virtual, shared, freed."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal

import pytest

# The children only read memory: locks of other threads do not affect them.
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


def test_plain_memory_is_counted_and_filled_with_poison(client, simulator):
    address = client.allocate(1000)
    assert client.download(address, 1000) == b"\xa5" * 1000
    client.upload(address, b"content")
    assert client.download(address, 7) == b"content"
    assert (simulator.live_bytes, simulator.physical_bytes) == (1000, 1000)
    client.call("cuMemFree", address)
    assert (simulator.live_bytes, simulator.physical_bytes) == (0, 0)
    assert client.peek(address, 7) == b"\xa5" * 7
    assert client.code("cuMemFree", address) == client.INVALID_VALUE
    assert client.code("cuMemcpyHtoD", address, b"late", 4) == client.INVALID_VALUE


def test_the_memory_limit(client, simulator):
    simulator.set_memory_limit(4 * client.MIB)
    chunk = client.create_chunk()
    first = client.allocate(client.MIB)
    assert [int(n) for n in client.call("cuMemGetInfo")] == [client.MIB, 4 * client.MIB]
    assert client.code("cuMemAlloc", client.MIB + 1) == client.OUT_OF_MEMORY
    assert (
        client.code("cuMemCreate", client.GRANULARITY_BYTES, client.properties(), 0)
        == client.OUT_OF_MEMORY
    )
    client.call("cuMemRelease", chunk)
    client.allocate(3 * client.MIB)
    assert client.code("cuMemAlloc", 1) == client.OUT_OF_MEMORY
    assert client.code("cuMemAlloc", 0) == client.INVALID_VALUE
    client.call("cuMemFree", first)


def test_freed_memory_may_fault(client, simulator):
    simulator.set_free_policy(1)
    address = client.allocate(64)
    client.call("cuMemFree", address)
    assert fault_signal(lambda: client.peek(address, 1)) == signal.SIGSEGV


def test_freed_addresses_may_be_reused(client, simulator):
    simulator.set_free_policy(2)
    first = client.allocate(100)
    client.upload(first, b"old")
    id_of = client.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    first_id = client.call("cuPointerGetAttribute", id_of, first)
    client.call("cuMemFree", first)
    second = client.allocate(200)
    assert second == first
    assert client.download(second, 3) == b"\xa5" * 3
    assert client.call("cuPointerGetAttribute", id_of, second) != first_id


def test_plain_memory_has_guards(client):
    address = client.allocate(4096)
    assert fault_signal(lambda: client.peek(address, 4096)) == 0
    assert fault_signal(lambda: client.peek(address - 1, 1)) == signal.SIGSEGV
    assert fault_signal(lambda: client.peek(address + 4096, 1)) == signal.SIGSEGV


def test_pointer_attributes(client):
    attribute = client.driver.CUpointer_attribute
    address = client.allocate(1000)
    chunk = client.create_chunk()
    mapped = client.reserve_mapped(chunk)
    host = int(client.call("cuMemHostAlloc", 64, 0))
    for begin, n_bytes, kind in ((address, 1000, 2), (mapped, 2 * client.MIB, 2), (host, 64, 1)):
        inside = begin + n_bytes - 1

        def read(name, inside=inside):
            return client.call("cuPointerGetAttribute", getattr(attribute, name), inside)

        assert int(read("CU_POINTER_ATTRIBUTE_RANGE_START_ADDR")) == begin
        assert read("CU_POINTER_ATTRIBUTE_RANGE_SIZE") == n_bytes
        assert int(read("CU_POINTER_ATTRIBUTE_MEMORY_TYPE")) == kind
        assert int(read("CU_POINTER_ATTRIBUTE_DEVICE_POINTER")) == inside
        assert read("CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL") == 0
        beyond = attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, begin + n_bytes
        assert client.code("cuPointerGetAttribute", *beyond) == client.INVALID_VALUE
    ids = {
        client.call("cuPointerGetAttribute", attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, begin)
        for begin in (address, mapped, host)
    }
    assert len(ids) == 3


def test_one_chunk_at_many_addresses(client, simulator):
    chunk = client.create_chunk()
    addresses = [client.reserve_mapped(chunk) for _ in range(3)]
    assert len(set(addresses)) == 3
    client.upload(addresses[0] + 100, b"shared")
    assert [client.download(address + 100, 6) for address in addresses] == [b"shared"] * 3
    assert simulator.physical_bytes == client.GRANULARITY_BYTES
    assert (simulator.live("mapping"), simulator.live("reservation")) == (3, 3)


def test_a_chunk_lives_until_its_last_mapping(client, simulator):
    chunk = client.create_chunk()
    address = client.reserve_mapped(chunk)
    client.call("cuMemRelease", chunk)
    assert client.code("cuMemRelease", chunk) == client.INVALID_VALUE
    client.upload(address, b"alive")
    assert client.download(address, 5) == b"alive"
    assert simulator.physical_bytes == client.GRANULARITY_BYTES
    client.call("cuMemUnmap", address, client.GRANULARITY_BYTES)
    assert simulator.physical_bytes == 0
    client.call("cuMemAddressFree", address, client.GRANULARITY_BYTES)
    assert simulator.live("reservation") == 0


def test_a_chunk_shows_at_several_addresses(client, simulator):
    chunk = client.create_chunk()
    one, other = client.reserve_mapped(chunk), client.reserve_mapped(chunk)
    client.upload(one, b"of one")
    assert client.download(other, 6) == b"of one"
    assert simulator.physical_bytes == client.GRANULARITY_BYTES
    assert (simulator.live("mapping"), simulator.live("memory handle")) == (2, 1)
    client.call("cuMemUnmap", one, client.GRANULARITY_BYTES)
    assert client.download(other, 6) == b"of one"


def test_memory_is_made_and_mapped_by_the_granularity(client, simulator):
    simulator.set_granularity(16384)
    minimum = client.driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    assert client.call("cuMemGetAllocationGranularity", client.properties(), minimum) == 16384
    chunk = client.create_chunk(16384)
    base = int(client.call("cuMemAddressReserve", 3 * 16384, 0, 0, 0))
    assert client.code("cuMemMap", base + 4096, 16384, 0, chunk, 0) == client.INVALID_VALUE
    client.map_at(base + 16384, chunk, 16384)
    assert client.code("cuMemCreate", 4096, client.properties(), 0) == client.INVALID_VALUE
    for n_bytes in (2048, 3 * 4096):
        with pytest.raises(ValueError, match="power of two"):
            simulator.set_granularity(n_bytes)


def test_access_is_given_to_devices_that_there_are(client):
    address = client.reserve_mapped(client.create_chunk())
    access = client.driver.CUmemAccessDesc()
    access.location.type = client.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    access.flags = client.driver.CUmemAccess_flags(3)
    access.location.id = 1
    arguments = (address, client.GRANULARITY_BYTES, [access], 1)
    assert client.code("cuMemSetAccess", *arguments) == 101  # CUDA_ERROR_INVALID_DEVICE
    access.location.id = 0
    access.location.type = client.driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID
    arguments = (address, client.GRANULARITY_BYTES, [access], 1)
    assert client.code("cuMemSetAccess", *arguments) == client.INVALID_VALUE
    client.upload(address, b"as before")


def test_what_is_reserved_faults_until_mapped_and_allowed(client):
    size_bytes = 3 * client.GRANULARITY_BYTES
    base = int(client.call("cuMemAddressReserve", size_bytes, 0, 0, 0))
    middle = base + client.GRANULARITY_BYTES
    assert fault_signal(lambda: client.peek(middle, 1)) == signal.SIGSEGV
    chunk = client.create_chunk()
    client.call("cuMemMap", middle, client.GRANULARITY_BYTES, 0, chunk, 0)
    assert fault_signal(lambda: client.peek(middle, 1)) == signal.SIGSEGV
    assert client.code("cuMemcpyHtoD", middle, b"x", 1) == client.INVALID_VALUE
    client.allow(middle)
    assert fault_signal(lambda: client.peek(middle, client.GRANULARITY_BYTES)) == 0
    assert fault_signal(lambda: client.peek(middle - 1, 1)) == signal.SIGSEGV
    assert fault_signal(lambda: client.peek(middle + client.GRANULARITY_BYTES, 1)) == signal.SIGSEGV
    client.call("cuMemUnmap", middle, client.GRANULARITY_BYTES)
    assert fault_signal(lambda: client.peek(middle, 1)) == signal.SIGSEGV


def test_memory_may_be_readable_alone(client):
    address = client.reserve_mapped(client.create_chunk())
    client.allow(address, flags=1)
    assert fault_signal(lambda: client.peek(address, 1)) == 0
    assert fault_signal(lambda: ctypes.memset(address, 0, 1)) == signal.SIGSEGV


def test_reservations_are_aligned_and_follow_a_hint(client):
    aligned = int(
        client.call("cuMemAddressReserve", client.GRANULARITY_BYTES, 64 * client.MIB, 0, 0)
    )
    assert aligned % (64 * client.MIB) == 0
    wanted = 0x2A_0000_0000_00
    assert int(client.call("cuMemAddressReserve", client.GRANULARITY_BYTES, 0, wanted, 0)) == wanted
    granularity = client.driver.CUmemAllocationGranularity_flags
    flag = granularity.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    found = client.call("cuMemGetAllocationGranularity", client.properties(), flag)
    assert found == client.GRANULARITY_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(
    "break_it",
    [
        lambda client, at, chunk: client.code("cuMemAddressReserve", 1000, 0, 0, 0),
        lambda client, at, chunk: client.code("cuMemAddressReserve", 2 * client.MIB, 3, 0, 0),
        lambda client, at, chunk: client.code("cuMemCreate", 1000, client.properties(), 0),
        lambda client, at, chunk: client.code("cuMemMap", at, 2 * client.MIB, 0, chunk, 0),
        lambda client, at, chunk: client.code(
            "cuMemMap", at + 2 * client.MIB, 2 * client.MIB, 4096, chunk, 0
        ),
        lambda client, at, chunk: client.code(
            "cuMemMap", at + 2 * client.MIB, 4 * client.MIB, 0, chunk, 0
        ),
        lambda client, at, chunk: client.code(
            "cuMemMap", at + 4 * client.MIB, 2 * client.MIB, 0, chunk, 0
        ),
        lambda client, at, chunk: client.code(
            "cuMemMap", at + 2 * client.MIB, 2 * client.MIB, 0, 12345, 0
        ),
        lambda client, at, chunk: client.code("cuMemUnmap", at, client.MIB),
        lambda client, at, chunk: client.code("cuMemUnmap", at, 4 * client.MIB),
        lambda client, at, chunk: client.code("cuMemAddressFree", at, 4 * client.MIB),
        lambda client, at, chunk: client.code("cuMemAddressFree", at, 2 * client.MIB),
    ],
)
def test_invalid_use_of_virtual_memory(client, break_it):
    """Two granules are reserved, and the first is mapped."""
    chunk = client.create_chunk()
    base = int(client.call("cuMemAddressReserve", 4 * client.MIB, 0, 0, 0))
    client.map_at(base, chunk)
    assert break_it(client, base, chunk) == client.INVALID_VALUE
    client.upload(base, b"as before")
    assert client.download(base, 9) == b"as before"


def test_copies_may_span_adjacent_mappings(client):
    base = int(client.call("cuMemAddressReserve", 4 * client.MIB, 0, 0, 0))
    client.map_at(base, client.create_chunk())
    client.map_at(base + 2 * client.MIB, client.create_chunk())
    border = base + 2 * client.MIB - 4
    client.upload(border, b"12345678")
    assert client.download(border, 8) == b"12345678"
    client.call("cuMemUnmap", base + 2 * client.MIB, 2 * client.MIB)
    assert client.code("cuMemcpyHtoD", border, b"12345678", 8) == client.INVALID_VALUE


def test_pinned_memory_is_counted(client, simulator):
    address = int(client.call("cuMemHostAlloc", 5000, 0))
    assert (simulator.host_bytes, simulator.physical_bytes) == (5000, 0)
    client.call("cuMemFreeHost", address)
    assert simulator.host_bytes == 0
    assert client.code("cuMemFreeHost", address) == client.INVALID_VALUE


def test_kernels_can_ask_what_is_accessible(client, simulator):
    address = client.allocate(100)
    assert simulator.is_accessible(address, 100)
    assert not simulator.is_accessible(address, 101)
    assert not simulator.is_accessible(address - 1, 1)
    client.call("cuMemFree", address)
    assert not simulator.is_accessible(address, 1)
