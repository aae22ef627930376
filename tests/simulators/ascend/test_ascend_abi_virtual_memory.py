"""Addresses, physical memory and mappings on the simulated Ascend runtime."""

from __future__ import annotations

import ctypes

import ascend_client as acl
import pytest

PAGE_BYTES = 2 << 20
HBM_HUGE, DDR_HUGE = 4, 2
ON_HOST, ON_DEVICE = 0, 1


class Properties(ctypes.Structure):
    """aclrtPhysicalMemProp."""

    _fields_ = (
        ("handle_type", ctypes.c_int),
        ("allocation_type", ctypes.c_int),
        ("attribute", ctypes.c_int),
        ("device", ctypes.c_uint32),
        ("location", ctypes.c_int),
        ("reserved", ctypes.c_uint64),
    )


assert ctypes.sizeof(Properties) == 32


def properties(attribute=HBM_HUGE, device=0, location=ON_DEVICE, handle_type=0):
    return Properties(handle_type, 0, attribute, device, location, 0)


def reserve(ascend, n_pages):
    return ascend.make("aclrtReserveMemAddress", n_pages * PAGE_BYTES, 0, 0, 1)


def physical(ascend, n_bytes=PAGE_BYTES):
    return ascend.make("aclrtMallocPhysical", n_bytes, ctypes.byref(properties()), 0)


def free_bytes(ascend):
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    ascend.call("aclrtGetMemInfo", 1, ctypes.byref(free), ctypes.byref(total))
    return free.value


def counts(ascend):
    return [ascend.live(kind) for kind in ("reservation", "physical memory", "mapping")]


def test_memory_is_where_it_is_mapped(ascend, npu):
    begin, stream = reserve(ascend, 4), npu.stream()
    assert begin % PAGE_BYTES == 0
    assert not ascend.is_accessible(begin, 8)
    handles = [physical(ascend), physical(ascend)]
    for page, handle in zip((1, 2), handles, strict=True):
        ascend.call("aclrtMapMem", begin + page * PAGE_BYTES, PAGE_BYTES, 0, handle, 0)
    assert [ascend.is_accessible(begin + page * PAGE_BYTES, 8) for page in range(4)] == [
        *(False, True, True, False),
    ]
    across = begin + 2 * PAGE_BYTES - 8  # the last word of one page, and the first of the next
    npu.upload(across, acl.u64(5, 7))
    npu.add(stream, across + 8, across, 1)
    npu.synchronize(stream)
    assert acl.peek(across, 2) == (8, 7)


def test_physical_memory_goes_with_its_last_mapping(ascend):
    before, begin = free_bytes(ascend), reserve(ascend, 1)
    assert free_bytes(ascend) == before  # addresses take no memory
    handle = physical(ascend, 3)  # of whole pages
    assert free_bytes(ascend) == before - PAGE_BYTES
    ascend.call("aclrtMapMem", begin, PAGE_BYTES, 0, handle, 0)
    ascend.call("aclrtFreePhysical", handle)
    assert free_bytes(ascend) == before - PAGE_BYTES
    assert ascend.is_accessible(begin, 8)
    assert ascend.code("aclrtReleaseMemAddress", begin) == acl.PARAM_INVALID
    ascend.call("aclrtUnmapMem", begin)
    assert free_bytes(ascend) == before
    assert not ascend.is_accessible(begin, 8)
    ascend.call("aclrtReleaseMemAddress", begin)
    assert counts(ascend) == [0, 0, 0]


def test_no_context_is_needed(ascend):
    """The allocator of torch_npu reserves before its thread has set a device."""

    def make_and_give_back():
        begin, handle = reserve(ascend, 1), physical(ascend)
        ascend.call("aclrtMapMem", begin, PAGE_BYTES, 0, handle, 0)
        ascend.call("aclrtUnmapMem", begin)
        ascend.call("aclrtFreePhysical", handle)
        ascend.call("aclrtReleaseMemAddress", begin)
        return counts(ascend)

    assert ascend.in_thread(make_and_give_back, device=None) == [0, 0, 0]


def test_one_memory_at_two_addresses(ascend, npu):
    begin, handle = reserve(ascend, 2), physical(ascend)
    for page in (0, 1):
        ascend.call("aclrtMapMem", begin + page * PAGE_BYTES, PAGE_BYTES, 0, handle, 0)
    assert acl.peek(begin) == (int.from_bytes(b"\xa5" * 8, "little"),)
    npu.upload(begin, acl.u64(9))
    assert acl.peek(begin + PAGE_BYTES) == (9,)


def test_work_on_addresses_that_were_unmapped_is_a_fault(ascend, npu):
    begin, handle, stream = reserve(ascend, 1), physical(ascend), npu.stream()
    ascend.call("aclrtMapMem", begin, PAGE_BYTES, 0, handle, 0)
    ascend.call("aclrtMemsetAsync", begin, 8, 0, 8, stream)
    ascend.call("aclrtUnmapMem", begin)
    assert ascend.code("aclrtSynchronizeStream", stream) == acl.SYS_DMA


def test_the_device_has_so_much_memory(ascend):
    ascend.set_memory_limit(2 * PAGE_BYTES)
    handles = [physical(ascend), physical(ascend)]
    ask = ("aclrtMallocPhysical", ctypes.byref(ctypes.c_uint64()))
    for n_bytes in (1, 2**64 - 8):
        given = (n_bytes, ctypes.byref(properties()), 0)
        assert ascend.code(*ask, *given) == acl.MEMORY_ALLOCATION
    ascend.call("aclrtFreePhysical", handles.pop())
    physical(ascend)


SPACE = (ctypes.c_uint64 * 1)()
GIVEN = properties()


@pytest.mark.parametrize(
    ("code", "call"),
    [
        (acl.PARAM_INVALID, ("aclrtReserveMemAddress", 0, PAGE_BYTES, 0, 0, 0)),
        (acl.PARAM_INVALID, ("aclrtReserveMemAddress", SPACE, 0, 0, 0, 0)),
        (acl.PARAM_INVALID, ("aclrtReserveMemAddress", SPACE, 2**64 - 8, 0, 0, 0)),
        (acl.PARAM_INVALID, ("aclrtReserveMemAddress", SPACE, PAGE_BYTES, 4096, 0, 0)),
        (acl.PARAM_INVALID, ("aclrtReserveMemAddress", SPACE, PAGE_BYTES, 0, 0, 2)),
        (acl.FEATURE_NOT_SUPPORT, ("aclrtReserveMemAddress", SPACE, PAGE_BYTES, 0, 1 << 44, 0)),
        (acl.PARAM_INVALID, ("aclrtReleaseMemAddress", 4096)),
        (acl.PARAM_INVALID, ("aclrtMallocPhysical", 0, PAGE_BYTES, GIVEN, 0)),
        (acl.PARAM_INVALID, ("aclrtMallocPhysical", SPACE, PAGE_BYTES, 0, 0)),
        (acl.PARAM_INVALID, ("aclrtMallocPhysical", SPACE, 0, GIVEN, 0)),
        (acl.PARAM_INVALID, ("aclrtMallocPhysical", SPACE, PAGE_BYTES, GIVEN, 1)),
        *(
            (code, ("aclrtMallocPhysical", SPACE, PAGE_BYTES, given, 0))
            for code, given in (
                (acl.PARAM_INVALID, properties(attribute=DDR_HUGE)),
                (acl.PARAM_INVALID, properties(handle_type=2)),
                (acl.INVALID_DEVICE, properties(device=3)),
                (acl.FEATURE_NOT_SUPPORT, properties(location=ON_HOST)),
            )
        ),
        (acl.PARAM_INVALID, ("aclrtFreePhysical", 12345)),
        (acl.PARAM_INVALID, ("aclrtMapMem", "free", PAGE_BYTES, 0, 12345, 0)),
        (acl.PARAM_INVALID, ("aclrtMapMem", "free", 2 * PAGE_BYTES, 0, "physical", 0)),
        (acl.PARAM_INVALID, ("aclrtMapMem", "free", PAGE_BYTES, 4096, "physical", 0)),
        (acl.PARAM_INVALID, ("aclrtMapMem", "free", PAGE_BYTES, 0, "physical", 1)),
        (acl.PARAM_INVALID, ("aclrtMapMem", "mapped", PAGE_BYTES, 0, "physical", 0)),
        (acl.PARAM_INVALID, ("aclrtMapMem", 1 << 44, PAGE_BYTES, 0, "physical", 0)),
        (acl.PARAM_INVALID, ("aclrtUnmapMem", "free")),
        (acl.PARAM_INVALID, ("aclrtUnmapMem", "inside")),
        (acl.PARAM_INVALID, ("aclrtUnmapMem", "plain")),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_calls_that_are_refused(ascend, npu, code, call):
    begin, handle = reserve(ascend, 2), physical(ascend)
    known = {
        "mapped": begin,
        "inside": begin + 4096,
        "free": begin + PAGE_BYTES,
        "plain": npu.malloc(),
        "physical": handle,
    }
    ascend.call("aclrtMapMem", begin, PAGE_BYTES, 0, handle, 0)
    before, function = counts(ascend), call[0]
    given = [known[part] if isinstance(part, str) else part for part in call[1:]]
    given = [ctypes.byref(part) if isinstance(part, Properties) else part for part in given]
    assert ascend.code(function, *given) == code
    assert function in ascend.recent_text()
    assert counts(ascend) == before == [1, 1, 1]
