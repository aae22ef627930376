"""Memory and copies of the simulated Ascend runtime."""

from __future__ import annotations

import ctypes
from pathlib import Path

import ascend_client as acl
import pytest

POISON = int.from_bytes(b"\xa5" * 8, "little")
MIB = 1 << 20
ADDRESS_UNALIGNED, FILE_OPEN = 107008, 107009


def copy_code(npu, destination, source, n_bytes, kind, most_bytes=None):
    most_bytes = n_bytes if most_bytes is None else most_bytes
    return npu.ascend.code("aclrtMemcpy", destination, most_bytes, source, n_bytes, kind)


def copy_async_code(npu, stream, destination, source, n_bytes, kind):
    return npu.ascend.code("aclrtMemcpyAsync", destination, n_bytes, source, n_bytes, kind, stream)


def pageable(content: bytes) -> tuple[object, int]:
    """Unregistered host memory; the object keeps it alive."""
    buffer = ctypes.create_string_buffer(content, len(content))
    return buffer, ctypes.addressof(buffer)


def test_sizes_are_rounded_and_memory_is_poisoned(ascend, npu):
    ascend.set_memory_limit(16 * MIB)
    before, n_live = ascend.live_bytes, ctypes.c_size_t()
    address = npu.malloc(33)
    assert ascend.live_bytes - before == 64 + 32
    assert address % 512 == 0
    assert acl.peek(address) == (POISON,)
    aligned = ascend.make("aclrtMallocAlign32", 33, 0)
    assert ascend.live_bytes - before == 64 + 32 + 64
    assert npu.malloc(2 * MIB) % (2 * MIB) == 0
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ascend.call("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total))
    assert total.value == 16 * MIB
    n_live.value = ascend.live_bytes
    assert free.value <= total.value - n_live.value
    npu.upload(address, acl.u64(7))
    ascend.call("aclrtFree", address)
    assert acl.peek(address) == (POISON,)
    ascend.call("aclrtFree", aligned)
    assert ascend.code("aclrtFree", aligned) == acl.PARAM_INVALID


def test_memory_has_an_end(ascend, npu):
    ascend.set_memory_limit(2 * MIB)
    result = ctypes.c_uint64()
    result.value = 1
    assert ascend.code("aclrtMalloc", ctypes.byref(result), 3 * MIB, 0) == acl.MEMORY_ALLOCATION
    assert result.value == 0
    assert ascend.code("aclrtMalloc", ctypes.byref(result), 0, 0) == acl.PARAM_INVALID
    assert ascend.code("aclrtMalloc", ctypes.byref(result), 1 << 63, 0) == acl.MEMORY_ALLOCATION
    npu.malloc(MIB)


def test_pointers_say_where_they_lie(ascend, npu):
    def location(address):
        attributes = (ctypes.c_uint32 * 7)()
        ascend.call("aclrtPointerGetAttributes", address, attributes)
        return attributes[1]

    kept, plain = pageable(bytes(64))
    assert [location(npu.malloc()), location(npu.pinned(bytes(8))), location(plain)] == [1, 0, 2]
    ascend.call("aclrtHostRegisterV2", plain, 64, 0x10000000)
    assert location(plain + 63) == 0
    assert location(plain + 64) == 2
    assert ascend.code("aclrtHostRegisterV2", plain, 64, 0x10000000) == 507910
    ascend.call("aclrtHostUnregister", plain)
    assert ascend.code("aclrtHostUnregister", plain) == 507911
    assert kept.raw == bytes(64)


@pytest.mark.parametrize("kind", [acl.HOST_TO_DEVICE, acl.DEVICE_TO_HOST])
def test_memory_that_a_driver_registered_and_cannot_pin_is_a_fault_of_the_device(kind, ascend, npu):
    """The runtime treats it as pinned, so a capture accepts the copy; DMA meets other pages."""
    ascend.set_locks_registered(False)
    kept, plain = pageable(bytes(64))
    ascend.call("aclrtHostRegisterV2", plain, 64, 0x10000000)
    stream, there = npu.stream(), npu.malloc()
    to, source = (there, plain) if kind == acl.HOST_TO_DEVICE else (plain, there)
    with npu.capture(stream) as models:
        ascend.call("aclrtMemcpyAsync", to, 64, source, 64, kind, stream)
    npu.execute(models[0], stream)
    assert ascend.code("aclrtSynchronizeStream", stream) != 0
    assert kept.raw == bytes(64)


def test_a_copy_that_waits_is_ordered_with_no_stream(npu):
    stream, source, destination = npu.stream(), npu.words(1), npu.words(0)
    npu.add(stream, source, destination, 5)
    content = ctypes.create_string_buffer(8)
    assert copy_code(npu, content, destination, 8, acl.DEVICE_TO_HOST) == 0
    assert content.raw == acl.u64(0)
    npu.synchronize(stream)
    assert copy_code(npu, content, destination, 8, acl.DEFAULT) == 0
    assert content.raw == acl.u64(6)


def test_kinds_of_copies_are_checked(npu):
    device, other, host = npu.malloc(), npu.malloc(), npu.pinned(bytes(64))
    wrong = [
        (device, host, acl.DEVICE_TO_HOST),
        (host, device, acl.HOST_TO_DEVICE),
        (device, other, acl.HOST_TO_HOST),
        (host, device, acl.DEVICE_TO_DEVICE),
        (device, other, acl.HOST_TO_BUFFER_TO_DEVICE),
        (device, host, 9),
        (device + 1024, host, acl.HOST_TO_DEVICE),  # no memory there
        (0, host, acl.HOST_TO_DEVICE),
    ]
    codes = [copy_code(npu, to, at, 8, kind) for to, at, kind in wrong]
    assert codes == [acl.PARAM_INVALID] * len(wrong)
    assert copy_code(npu, device, host, 8, acl.HOST_TO_DEVICE, most_bytes=7) == acl.PARAM_INVALID
    assert copy_code(npu, device, device, 8, acl.DEVICE_TO_DEVICE) == 0  # a no-op
    assert copy_code(npu, host, host + 8, 8, acl.HOST_TO_HOST) == 0


def test_a_pinned_source_is_read_when_the_copy_runs(npu):
    stream, host, destination = npu.stream(), npu.pinned(acl.u64(1)), npu.words(0)
    assert copy_async_code(npu, stream, destination, host, 8, acl.HOST_TO_DEVICE) == 0
    ctypes.c_uint64.from_address(host).value = 2
    assert acl.peek(destination) == (0,)
    npu.synchronize(stream)
    assert acl.peek(destination) == (2,)


def test_a_staged_source_is_read_at_the_call(npu):
    stream, destination = npu.stream(), npu.words(0)
    kept, host = pageable(acl.u64(1))
    assert copy_async_code(npu, stream, destination, host, 8, acl.HOST_TO_BUFFER_TO_DEVICE) == 0
    ctypes.c_uint64.from_address(host).value = 2
    npu.synchronize(stream)
    assert acl.peek(destination) == (1,)
    assert kept.raw == acl.u64(2)


def test_pageable_memory_makes_an_asynchronous_copy_wait(npu):
    stream, destination = npu.stream(), npu.words(0)
    npu.note(stream, 1)
    _kept, host = pageable(acl.u64(3))
    assert copy_async_code(npu, stream, destination, host, 8, acl.HOST_TO_DEVICE) == 0
    assert npu.order == ["note 1 of 1"]
    assert acl.peek(destination) == (3,)


def test_copies_from_host_to_host_are_not_asynchronous(npu):
    stream, host = npu.stream(), npu.pinned(bytes(16))
    for kind in (acl.HOST_TO_HOST, acl.DEFAULT):
        code = copy_async_code(npu, stream, host, host + 8, 8, kind)
        assert code == acl.FEATURE_NOT_SUPPORT
    assert copy_async_code(npu, stream, host, host, 8, acl.HOST_TO_HOST) == 0


def test_a_copy_to_memory_that_went_is_a_fault(ascend, npu):
    stream, host, destination = npu.stream(), npu.pinned(bytes(8)), npu.malloc()
    assert copy_async_code(npu, stream, destination, host, 8, acl.HOST_TO_DEVICE) == 0
    ascend.call("aclrtFree", destination)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.SYS_DMA


def test_freeing_waits_only_where_it_says_so(ascend, npu):
    stream, source = npu.stream(), npu.words(1)
    destination = npu.words(0)
    npu.add(stream, source, destination, 1)
    ascend.call("aclrtFreeWithDevSync", source)
    assert acl.peek(destination) == (2,)
    source = npu.words(1)
    npu.add(stream, source, destination, 1)
    ascend.call("aclrtFree", source)
    npu.synchronize(stream)
    assert acl.peek(destination) == ((POISON + 1) % 2**64,)


def test_fills(ascend, npu):
    stream, address = npu.stream(), npu.words(0, 0)
    ascend.call("aclrtMemset", address, 16, 1, 8)
    assert acl.peek(address, 2) == (0x0101010101010101, 0)
    ascend.call("aclrtMemsetAsync", address, 16, 2, 16, stream)
    assert acl.peek(address, 2) == (0x0101010101010101, 0)
    npu.synchronize(stream)
    assert acl.peek(address, 2) == (0x0202020202020202,) * 2
    assert ascend.code("aclrtMemset", address, 8, 1, 16) == acl.PARAM_INVALID
    assert ascend.code("aclrtMemsetAsync", address + 4096, 8, 1, 8, stream) == acl.PARAM_INVALID


def test_rectangles(ascend, npu):
    stream, source, destination = npu.stream(), npu.words(1, 2, 3, 4), npu.words(0, 0)
    rectangle = (destination, 8, source, 16, 8, 2, acl.DEVICE_TO_DEVICE)
    ascend.call("aclrtMemcpy2dAsync", *rectangle, stream)
    assert acl.peek(destination, 2) == (0, 0)
    npu.synchronize(stream)
    assert acl.peek(destination, 2) == (1, 3)
    ascend.call("aclrtMemcpy2d", destination, 8, source + 8, 16, 8, 2, acl.DEVICE_TO_DEVICE)
    assert acl.peek(destination, 2) == (2, 4)
    narrow = (destination, 4, source, 16, 8, 2, acl.DEVICE_TO_DEVICE)
    assert ascend.code("aclrtMemcpy2d", *narrow) == acl.PARAM_INVALID


def test_lines_are_staged_at_the_call(ascend, npu):
    stream, destination = npu.stream(), npu.words(0, 0)
    kept, host = pageable(acl.u64(1, 2, 3, 4))
    rectangle = (destination, 8, host, 16, 8, 2, acl.HOST_TO_BUFFER_TO_DEVICE)
    ascend.call("aclrtMemcpy2dAsync", *rectangle, stream)
    ctypes.memset(host, 0, 32)
    npu.synchronize(stream)
    assert acl.peek(destination, 2) == (1, 3)
    assert kept.raw == bytes(32)


def test_a_copy_with_a_descriptor_reads_it_when_it_runs(ascend, npu):
    size = ctypes.c_size_t()
    kind, stream = acl.INNER_DEVICE_TO_DEVICE, npu.stream()
    ascend.call("aclrtGetMemcpyDescSize", kind, ctypes.byref(size))
    code = ascend.code("aclrtGetMemcpyDescSize", acl.HOST_TO_DEVICE, ctypes.byref(size))
    assert code == acl.FEATURE_NOT_SUPPORT
    descriptor, destination = npu.malloc(size.value), npu.words(0)
    first, second = npu.words(1), npu.words(2)
    describe = ("aclrtSetMemcpyDesc", descriptor, kind)
    ascend.call(*describe, first, destination, 8, 0)
    ascend.call("aclrtMemcpyAsyncWithDesc", descriptor, kind, stream)
    ascend.call(*describe, second, destination, 8, 0)
    npu.synchronize(stream)
    assert acl.peek(destination) == (2,)
    host = npu.pinned(bytes(64))
    assert ascend.code("aclrtSetMemcpyDesc", host, kind, first, second, 8, 0) == acl.PARAM_INVALID
    ascend.call("aclrtMemset", descriptor, size.value, 0, size.value)
    ascend.call("aclrtMemcpyAsyncWithDesc", descriptor, kind, stream)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.SYS_DMA


def test_a_copy_with_offsets_reads_its_pointers_when_it_runs(ascend, npu):
    stream, destination = npu.stream(), npu.words(0, 0)
    source, other = npu.words(1, 2), npu.words(3, 4)
    to, at = npu.words(destination), npu.words(source)
    copy = ("aclrtMemcpyAsyncWithOffset", to, 16, 0, at, 8, 8, acl.INNER_DEVICE_TO_DEVICE, stream)
    ascend.call(*copy)
    npu.upload(at, acl.u64(other))
    npu.synchronize(stream)
    assert acl.peek(destination, 2) == (4, 0)
    elsewhere = npu.words(0, 0)
    ascend.call(copy[0], to, 16, 8, *copy[4:])
    npu.upload(to, acl.u64(elsewhere))
    npu.synchronize(stream)
    assert (acl.peek(destination, 2), acl.peek(elsewhere, 2)) == ((4, 0), (0, 4))
    ascend.call(*copy)
    npu.upload(at, acl.u64(0))
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.SYS_DMA


def test_values_are_written_and_waited_for(ascend, npu):
    first, second, cell = npu.stream(), npu.stream(), npu.words(0)
    ascend.call("aclrtValueWait", cell, 5, 0, first)
    npu.note(first, 1)
    npu.note(second, 2)
    ascend.call("aclrtValueWrite", cell, 7, 0, second)
    npu.synchronize(first)
    assert npu.order == ["note 2 of 1", "note 1 of 1"]
    assert acl.peek(cell) == (7,)
    assert ascend.code("aclrtValueWrite", cell + 4, 7, 0, first) == ADDRESS_UNALIGNED
    assert ascend.code("aclrtValueWait", cell, 7, 4, first) == acl.PARAM_INVALID


@pytest.mark.parametrize(
    ("flag", "value", "passes"),
    [
        *((0, 6, True), (0, 7, False), (1, 6, True), (1, 5, False), (2, 2, True), (2, 1, False)),
        *((3, 1, True), (3, 2**64 - 7, False)),
    ],
)
def test_conditions_of_waits_for_values(ascend, npu, flag, value, passes):
    stream, cell = npu.stream(), npu.words(6)
    ascend.call("aclrtValueWait", cell, value, flag, stream)
    code = ascend.code("aclrtSynchronizeStreamWithTimeout", stream, 0)
    assert code == (0 if passes else acl.STREAM_SYNC_TIMEOUT)
    ascend.call("aclrtDestroyStreamForce", stream)


@pytest.mark.parametrize(
    ("function", "more", "n_bytes"),
    [
        ("aclrtMalloc", (0,), 96),
        ("aclrtMallocCached", (0,), 96),
        ("aclrtMallocWithCfg", (0, 0), 96),
        ("aclrtMallocAlign32", (0,), 64),
    ],
)
def test_what_each_function_adds(ascend, function, more, n_bytes):
    ascend.make(function, 33, *more)
    assert ascend.live_bytes == n_bytes


def test_arguments_of_launches_are_no_memory_of_the_callers(ascend, npu):
    npu.note(npu.stream(), 1)
    assert (ascend.live_bytes, ascend.argument_bytes) == (0, 8)


def access_of(address: int) -> str:
    """The process's access rights to the page at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, access, *_ = line.split()
        begin, end = (int(bound, 16) for bound in area.split("-"))
        if begin <= address < end:
            return access[:3]
    return ""


def test_freed_memory_is_kept_unmapped_or_used_again(ascend, npu):
    addresses = []
    for policy, access in ((0, "rw-"), (1, "---"), (2, "rw-")):
        ascend.set_free_policy(policy)
        address = npu.malloc()
        ascend.call("aclrtFree", address)
        assert access_of(address) == access
        assert not ascend.is_accessible(address, 1)
        addresses.append((address, npu.malloc()))
    assert [freed == made for freed, made in addresses] == [False, False, True]
    assert acl.peek(addresses[-1][0]) == (POISON,)


def test_pinned_memory_is_poisoned(ascend):
    assert acl.peek(ascend.make("aclrtMallocHost", 64)) == (POISON,)


def test_registered_memory_has_its_own_address_on_the_device(ascend, npu):
    attributes, result = (ctypes.c_uint32 * 7)(), ctypes.c_uint64()
    _kept, host = pageable(bytes(64))
    ascend.call("aclrtHostRegister", host, 64, 0, ctypes.byref(result))
    assert result.value == host
    ascend.call("aclrtPointerGetAttributes", npu.malloc(), attributes)
    assert attributes[2] == 4096


def test_copies_from_the_device_read_late(npu):
    stream, source, other = npu.stream(), npu.words(1), npu.words(0)
    host = npu.pinned(acl.u64(0))
    assert copy_async_code(npu, stream, other, source, 8, acl.DEVICE_TO_DEVICE) == 0
    assert copy_async_code(npu, stream, host, source, 8, acl.DEVICE_TO_HOST) == 0
    npu.upload(source, acl.u64(2))
    assert (acl.peek(host), acl.peek(other)) == ((0,), (0,))
    npu.synchronize(stream)
    assert (acl.peek(host), acl.peek(other)) == ((2,), (2,))


def test_a_copy_to_pageable_memory_waits(npu):
    stream, source = npu.stream(), npu.words(3)
    npu.note(stream, 1)
    _kept, host = pageable(bytes(8))
    assert copy_async_code(npu, stream, host, source, 8, acl.DEVICE_TO_HOST) == 0
    assert npu.order == ["note 1 of 1"]
    assert acl.peek(host) == (3,)


def test_bytes_that_were_staged_are_not_read_again(ascend, npu):
    stream, host, destination = npu.stream(), npu.pinned(bytes(8)), npu.words(0)
    for kind in (acl.HOST_TO_BUFFER_TO_DEVICE, acl.HOST_TO_DEVICE):
        assert copy_async_code(npu, stream, destination, host, 8, kind) == 0
    npu.synchronize(stream)
    assert ascend.bytes_from_host == 8


def test_pointers_and_values_that_went_are_a_fault(ascend, npu):
    stream, source = npu.stream(), npu.words(1)
    pointer, cell, waited = npu.words(source), npu.words(0), npu.words(0)
    copy = ("aclrtMemcpyAsyncWithOffset", pointer, 8, 0, pointer, 8, 0, 6, stream)
    ascend.call("aclrtValueWait", waited, 0, 1, stream)
    ascend.call(*copy)
    ascend.call("aclrtFree", waited)
    ascend.call("aclrtFree", pointer)
    timed = ("aclrtSynchronizeStreamWithTimeout", stream, 0)
    assert ascend.code(*timed) == acl.STREAM_SYNC_TIMEOUT  # freed memory has no value
    ascend.call("aclrtDestroyStreamForce", stream)
    stream, pointer = npu.stream(), npu.words(source)
    ascend.call(copy[0], pointer, 8, 0, pointer, 8, 0, 6, stream)
    ascend.call("aclrtFree", pointer)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.SYS_DMA
    ascend.call("aclrtResetDeviceForce", 0)
    ascend.call("aclrtSetDevice", 0)
    stream = npu.stream()
    ascend.call("aclrtValueWrite", cell, 1, 0, stream)
    ascend.call("aclrtFree", cell)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.SYS_DMA
