"""The native CUDA side, on the simulated driver: the driver's table, addresses, the arena."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import simulator as simulators

from offload.errors import BackendUnavailable, ExecutionError
from offload.native import _native

MEGABYTE = 1 << 20
GRANULARITY = 2 * MEGABYTE


def in_a_new_process(code: str) -> str:
    """The output of a Python process that begins without a driver."""
    folder = str(Path(simulators.__file__).parent)
    prelude = f"import sys; sys.path.insert(0, {folder!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


CALL = """
from offload.native import _native
from offload.errors import BackendUnavailable
try:
    print(_native.cuda_device_count())
except BackendUnavailable as error:
    print(error)
"""


@pytest.mark.slow
def test_without_a_driver_the_library_is_named():
    there = "import ctypes\ntry: print(ctypes.CDLL('libcuda.so.1'))\nexcept OSError: pass"
    if in_a_new_process(there):
        pytest.skip("this machine has a driver")
    message = in_a_new_process(CALL)
    assert "libcuda.so.1" in message
    assert "install an NVIDIA driver" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("hide('cuFuncGetParamInfo')", ["cuFuncGetParamInfo", "12.4", "of 13.0"]),
        ("set_driver_version(12020)", ["12.4 or later", "this one is of 12.2"]),
        ("fail('cuInit', 999)", ["does not start", "CUDA_ERROR_UNKNOWN"]),
    ],
)
def test_what_a_driver_lacks_is_named(simulator, setting, expected):
    message = in_a_new_process(f"import simulator\nsimulator.load().{setting}\n{CALL}")
    for words in expected:
        assert words in message


@pytest.mark.slow
def test_a_driver_is_asked_again_after_a_failure(simulator):
    code = f"import simulator\ns = simulator.load()\ns.fail('cuInit', 999)\n{CALL}{CALL}"
    assert in_a_new_process(code).splitlines()[-1] == "1"


def test_the_device_is_described(cuda):
    assert _native.cuda_driver_version() == 13000
    assert _native.cuda_device_count() == 1
    [(name, memory_bytes)] = _native.cuda_devices()
    assert name
    assert memory_bytes > 0


def test_a_device_that_does_not_exist_is_refused(cuda):
    with pytest.raises(BackendUnavailable, match=r"cuda:3 does not exist: there are 1 devices"):
        _native.DiscoveryPool(3, 1)


# ---- addresses for discovery --------------------------------------------------------------------


def test_allocations_lie_apart_and_share_one_chunk(cuda):
    before = cuda.simulator.physical_bytes
    pool = _native.DiscoveryPool(0, 7)
    sizes = [0, 1, 512, 3 * MEGABYTE, 10 * MEGABYTE]
    places = [(pool.allocate(size), size) for size in sizes]
    assert cuda.simulator.physical_bytes - before == GRANULARITY
    for (address, size), (following, _) in itertools.pairwise(places):
        assert following - (address + size) >= MEGABYTE
    for address, size in places:
        assert address % 512 == 0
        assert cuda.simulator.is_accessible(address, max(size, 1))
        assert not cuda.simulator.is_accessible(address - GRANULARITY, 1)
    del pool
    assert cuda.simulator.physical_bytes == before
    assert cuda.simulator.live("mapping") == 0
    assert cuda.simulator.live("reservation") == 0


def test_all_addresses_show_the_same_bytes(cuda):
    pool = _native.DiscoveryPool(0, 7)
    one, other = pool.allocate(64), pool.allocate(2 * GRANULARITY)
    ctypes.memmove(one, b"seen from both", 14)
    first_chunk = other - other % GRANULARITY
    assert ctypes.string_at(first_chunk + one % GRANULARITY, 14) == b"seen from both"


def test_large_allocations_show_a_large_chunk(cuda):
    """A map for each 64 MiB instead of each 2 MiB, and no more memory for more of them."""
    before, n_maps = cuda.simulator.physical_bytes, cuda.simulator.calls("cuMemMap")
    pool = _native.DiscoveryPool(0, 7, 64 * MEGABYTE)
    assert cuda.simulator.physical_bytes - before == 66 * MEGABYTE
    large = [pool.allocate(size) for size in (300 * MEGABYTE, 16 * MEGABYTE)]
    n_large = cuda.simulator.calls("cuMemMap") - n_maps
    assert n_large == 5 + 1
    small = pool.allocate(15 * MEGABYTE)
    assert cuda.simulator.calls("cuMemMap") - n_maps - n_large in (8, 9)  # as it is skewed
    assert cuda.simulator.physical_bytes - before == 66 * MEGABYTE
    for address, size in zip([*large, small], (300, 16, 15), strict=True):
        assert cuda.simulator.is_accessible(address, size * MEGABYTE)
    assert sorted(size for _, size in pool.shown()) == [2 * MEGABYTE, 64 * MEGABYTE]
    for address, size in pool.shown():
        assert cuda.simulator.is_accessible(address, size)


def test_a_rewound_pool_shows_its_large_chunk_where_it_was(cuda):
    pool = _native.DiscoveryPool(0, 7, 64 * MEGABYTE)
    sizes = (100 * MEGABYTE, 512, 20 * MEGABYTE)
    first = [pool.allocate(size) for size in sizes]
    n_maps = cuda.simulator.calls("cuMemMap")
    pool.rewind()
    assert [pool.allocate(size) for size in sizes] == first
    assert cuda.simulator.calls("cuMemMap") == n_maps
    pool.rewind()
    address = pool.allocate(512)  # other sizes than before, over the mapped memory
    other = pool.allocate(200 * MEGABYTE)
    assert cuda.simulator.is_accessible(address, 512)
    assert cuda.simulator.is_accessible(other, 200 * MEGABYTE)


def test_seeds_move_addresses_and_distances(cuda):
    pools = [_native.DiscoveryPool(0, seed) for seed in (1, 2, 3)]
    layouts = [[pool.allocate(4096) for _ in range(20)] for pool in pools]
    for index in range(20):
        assert len({layout[index] for layout in layouts}) == 3
    for first in range(20):
        for second in range(first + 1, 20):
            assert len({layout[second] - layout[first] for layout in layouts}) == 3


def test_a_rewound_pool_gives_the_same_addresses(cuda):
    pool = _native.DiscoveryPool(0, 1)
    sizes = [100, 5 * MEGABYTE, 8]
    first = [pool.allocate(size) for size in sizes]
    pool.free(first[1])
    pool.rewind()
    assert pool.events() == []
    assert [pool.allocate(size) for size in sizes] == first


def test_events_are_kept_in_order(cuda):
    pool = _native.DiscoveryPool(0, 1)
    one = pool.allocate(100)
    other = pool.allocate(200)
    pool.free(one)
    pool.free(12345)  # not of this pool
    assert pool.events() == [
        ("allocate", one, 100),
        ("allocate", other, 200),
        ("free", one, 100),
    ]


def test_a_freed_address_is_not_given_again(cuda):
    pool = _native.DiscoveryPool(0, 1)
    addresses = []
    for _ in range(50):
        addresses.append(pool.allocate(1000))
        pool.free(addresses[-1])
    assert len(set(addresses)) == 50


def test_an_allocation_does_not_disturb_a_capture(cuda):
    pool = _native.DiscoveryPool(0, 1)
    stream = cuda.stream()
    with cuda.capture(stream) as graph:
        address = pool.allocate(100)
        cuda.fill(address, 0, 100, 1, stream)
    assert len(graph.nodes) == 1


@pytest.fixture
def pool_functions():
    library = ctypes.CDLL(_native.__file__)
    allocate, free = library.offload_cuda_pool_malloc, library.offload_cuda_pool_free
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free.restype = None
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    yield allocate, free
    _native.DiscoveryPool.set_current(None)


def test_the_functions_for_torch_use_the_current_pool(cuda, pool_functions):
    allocate, free = pool_functions
    pool = _native.DiscoveryPool(0, 1)
    assert allocate(100, 0, None) is None
    _native.DiscoveryPool.set_current(pool)
    address = allocate(100, 0, None)
    free(address, 100, 0, None)
    assert pool.events() == [("allocate", address, 100), ("free", address, 100)]
    assert pool.n_events == 2
    assert pool.events(1) == [("free", address, 100)]
    assert pool.events(2) == pool.events(7) == []
    _native.DiscoveryPool.set_current(None)
    free(address, 100, 0, None)
    assert len(pool.events()) == 2


def test_the_functions_for_torch_keep_their_error(cuda, pool_functions):
    allocate, _ = pool_functions
    pool = _native.DiscoveryPool(0, 1)
    _native.DiscoveryPool.set_current(pool)
    assert pool.error is None
    cuda.simulator.fail("cuMemMap", 2)
    assert allocate(100, 0, None) is None
    assert "mapping device memory" in pool.error
    assert "CUDA_ERROR_OUT_OF_MEMORY" in pool.error


# ---- the arena -----------------------------------------------------------------------------------


def test_physical_memory_is_that_of_the_largest_mapping(cuda):
    before = cuda.simulator.physical_bytes
    arena = _native.CudaArena(0)
    mappings = [arena.map(size * MEGABYTE) for size in (3, 9, 1, 9, 8)]
    assert arena.size_bytes == 10 * MEGABYTE
    assert cuda.simulator.physical_bytes - before == arena.size_bytes
    assert len({mapping.address for mapping in mappings}) == 5
    assert [mapping.size_bytes // MEGABYTE for mapping in mappings] == [3, 9, 1, 9, 8]
    del arena, mappings
    assert cuda.simulator.physical_bytes == before
    assert cuda.simulator.live("reservation") == 0


def test_mappings_show_the_same_bytes(cuda):
    arena = _native.CudaArena(0)
    small, large = arena.map(3 * MEGABYTE), arena.map(9 * MEGABYTE)
    ctypes.memmove(large.address + 3 * MEGABYTE - 4, b"last", 4)
    assert ctypes.string_at(small.address + 3 * MEGABYTE - 4, 4) == b"last"


def test_memory_that_no_mapping_shows_any_more_is_given_back(cuda):
    before = cuda.simulator.physical_bytes
    arena = _native.CudaArena(0)
    middle, small, large = (arena.map(size * MEGABYTE) for size in (6, 3, 9))
    ctypes.memset(small.address, 7, 16)
    del large
    assert arena.size_bytes == 6 * MEGABYTE
    assert cuda.simulator.physical_bytes - before == arena.size_bytes
    large = arena.map(8 * MEGABYTE)  # grows again, on the same first chunk
    assert arena.size_bytes == 8 * MEGABYTE
    assert ctypes.string_at(large.address, 16) == bytes([7] * 16)
    del middle
    assert arena.size_bytes == 8 * MEGABYTE  # the largest needs all of it
    del large
    assert arena.size_bytes == 6 * MEGABYTE  # chunks are freed whole
    assert ctypes.string_at(small.address, 16) == bytes([7] * 16)
    del small
    assert arena.size_bytes == 0
    assert cuda.simulator.physical_bytes == before


def test_an_empty_mapping_takes_no_memory(cuda):
    arena = _native.CudaArena(0)
    assert arena.map(0).address == 0
    assert arena.size_bytes == 0


def test_a_mapping_that_fails_leaves_nothing(cuda):
    arena = _native.CudaArena(0)
    kept = arena.map(2 * MEGABYTE)
    before = cuda.simulator.physical_bytes, cuda.simulator.live("reservation")
    cuda.simulator.set_memory_limit(8 * MEGABYTE)
    with pytest.raises(ExecutionError, match=r"allocating device memory, 10485760 bytes.*OUT_OF"):
        arena.map(12 * MEGABYTE)
    for function in ("cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"):
        cuda.simulator.fail_memory(function, 2)
        with pytest.raises(ExecutionError, match="CUDA_ERROR_OUT_OF_MEMORY"):
            arena.map(4 * MEGABYTE)
    assert (cuda.simulator.physical_bytes, cuda.simulator.live("reservation")) == before
    assert arena.size_bytes == kept.size_bytes


# ---- where ranges lie ----------------------------------------------------------------------------

FIRST_PLACE, END_OF_PLACES = 0x2D50 << 32, 0x2F50 << 32


def is_in_place(address):
    return FIRST_PLACE <= address < END_OF_PLACES


def test_ranges_lie_where_pairs_of_small_numbers_are_no_addresses(cuda):
    pools = [_native.DiscoveryPool(0, seed) for seed in range(3)]
    given = [pool.allocate(4096) for pool in pools] + [_native.CudaArena(0).map(4 << 20).address]
    assert all(map(is_in_place, given))


@pytest.mark.parametrize("code", [1, 2, 801])
def test_a_hint_that_a_driver_refuses_is_done_without(cuda, code):
    cuda.simulator.fail("cuMemAddressReserve", code)
    pool = _native.DiscoveryPool(0, 1)
    address = pool.allocate(4096)
    assert not is_in_place(address)
    assert cuda.simulator.is_accessible(address, 4096)


def test_a_place_that_is_taken_is_given_up_for_the_next(cuda):
    """As after 2 TiB of ranges, some of which still exist."""
    pools = [_native.DiscoveryPool(0, 1)]
    first = pools[0].allocate(4096)
    for _ in range(36):  # of 64 GiB each
        pools[1:] = [_native.DiscoveryPool(0, 1)]
        address = pools[1].allocate(4096)
        assert is_in_place(address)
        assert address != first
    pools.clear()
    assert cuda.simulator.live("reservation") == 0
