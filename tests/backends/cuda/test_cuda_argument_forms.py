"""Forms in which kernels get addresses: each is followed, refused, or found by the proof."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable

import pytest
import torch

from offload.errors import CaptureError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import IN, OUT, Device, N, on_device, result
from small_graphs import floats, make_program, words

from offload.backends.cuda.graph import call

PROGRAM = ([(IN, N), (OUT, N)], [("0", "1")])
MIB = 1 << 20
LOW = 0xFFFFFFFF


def doubling(device: Device, sizes, unpacked: Callable[[bytes], tuple[int, int]], factor=None):
    """A kernel that reads the addresses of source and target from its arguments in its own way."""

    def double(arguments: bytes) -> None:
        source, target = unpacked(arguments)
        by = 2.0 if factor is None else factor(arguments)
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * by

    return device.simulator.kernel("form_kernel", sizes, double)


def load(device: Device, kernel: int, arguments, **options):
    """Load a program of one launch; `arguments` gives those of a capture."""
    return device.load(
        make_program(*PROGRAM), [lambda at: at.launch(kernel, *arguments(at))], **options
    )


def check_doubles(run) -> None:
    """Check at addresses that are new each time."""
    for _ in range(3):
        x = on_device(torch.randn(N))
        assert torch.equal(result(run, x), x * 2)


def at_beginning(arguments: bytes) -> tuple[int, int]:
    source, target = struct.unpack_from("<2Q", arguments)
    return source, target


# ---- what is followed ----------------------------------------------------------------------------


def test_addresses_in_the_middle_of_words(device):
    """As in a packed structure, or where tensors' addresses follow four-byte numbers."""
    kernel = doubling(device, [28], lambda block: struct.unpack_from("<QQ", block, 4))
    run = load(device, kernel, lambda at: [struct.pack("<IQQII", 5, at.at[0], at.at[1], 6, 7)])
    check_doubles(run)


@pytest.mark.parametrize("offset", [-8, -4096, -8 * MIB, 3 * MIB, 1 << 33])
def test_an_address_where_an_index_of_zero_would_lie(device, offset):
    kernel = doubling(
        device, [8, 8, 8], lambda block: (at_beginning(block)[0] - offset, at_beginning(block)[1])
    )
    run = load(
        device, kernel, lambda at: [words(at.at[0] + offset), words(at.at[1]), struct.pack("<q", 1)]
    )
    check_doubles(run)


def test_begin_and_end_and_the_last_element(device):
    """As for iterators, and views with negative strides."""

    def double(arguments: bytes) -> None:
        begin, end, last = struct.unpack("<3Q", arguments)
        assert end - begin == 4 * N
        for index in range(N):
            floats(last - 4 * (N - 1), N)[index] = floats(begin, N)[index] * 2

    kernel = device.simulator.kernel("reverse_kernel", [8, 8, 8], double)
    check_doubles(
        load(
            device,
            kernel,
            lambda at: [words(one) for one in (at.at[0], at.at[0] + 4 * N, at.at[1] + 4 * (N - 1))],
        )
    )


def test_an_address_with_a_tag_in_its_lowest_bits(device):
    kernel = doubling(
        device, [8, 8], lambda block: tuple(one & ~0xF for one in at_beginning(block))
    )
    check_doubles(load(device, kernel, lambda at: [words(at.at[0] | 3), words(at.at[1] | 8)]))


def test_a_descriptor_with_a_plain_address_in_it(device):
    """128 bytes by value, as a tensor map."""
    kernel = doubling(
        device,
        [128, 8],
        lambda block: (struct.unpack_from("<Q", block)[0], struct.unpack_from("<Q", block, 128)[0]),
    )
    check_doubles(
        load(
            device,
            kernel,
            lambda at: [words(at.at[0], 0x0002_0010_0000_01A2, 4 * N, *[1] * 13), words(at.at[1])],
        )
    )


def test_tables_of_addresses_that_an_earlier_kernel_makes_on_the_device(device):
    """As for grouped and batched products: each execution makes the table anew."""

    def make_table(arguments: bytes) -> None:
        table, *addresses = struct.unpack("<3Q", arguments)
        memoryview(floats(table, 4)).cast("B")[:] = words(*addresses)

    def double(arguments: bytes) -> None:
        (table,) = struct.unpack("<Q", arguments)
        source, target = struct.unpack("<2Q", bytes(memoryview(floats(table, 4)).cast("B")))
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * 2

    first = device.simulator.kernel("make_table_kernel", [8, 8, 8], make_table)
    second = device.simulator.kernel("grouped_kernel", [8], double)

    def step(at):
        table = at.scratch(16)
        at.launch(first, words(table), words(at.at[0]), words(at.at[1]))
        at.launch(second, words(table))

    check_doubles(device.load(make_program(*PROGRAM), [step]))


def test_a_counter_that_a_memset_in_the_graph_clears(device):
    """As the semaphores of reductions, in scratch memory that others have used in between."""

    def double(arguments: bytes) -> None:
        source, target, counter = struct.unpack("<3Q", arguments)
        by = 2.0 if floats(counter, 1)[0] == 0.0 else float("nan")
        floats(counter, 1)[0] += 1.0
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * by

    kernel = device.simulator.kernel("counting_kernel", [8, 8, 8], double)

    def step(at):
        counter = at.scratch(4)
        call("cuMemsetD32Async", counter, 0, 1, at.stream)
        at.launch(kernel, words(at.at[0]), words(at.at[1]), words(counter))

    check_doubles(device.load(make_program(*PROGRAM), [step]))


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("lowest", [None, 0, 1])
def test_the_lower_half_of_an_address(device, place, lowest):
    """Alone: of a kernel that knows the upper half otherwise; or the rest of a stale one whose
    lowest byte may be overwritten by a flag, as in a structure with padding behind it.
    """

    def lower(address: int) -> int:
        return address & LOW if lowest is None else address & LOW & ~0xFF | lowest

    kernel = doubling(
        device,
        [8, 8, 8],
        at_beginning,
        factor=lambda block: (
            2.0
            if struct.unpack_from("<2I", block, 16)[place] == lower(at_beginning(block)[0])
            else float("nan")
        ),
    )

    def arguments(at):
        halves = [5, 5]
        halves[place] = lower(at.at[0])
        return [words(at.at[0]), words(at.at[1]), struct.pack("<2I", *halves)]

    check_doubles(load(device, kernel, arguments))


# ---- uninitialised bytes -------------------------------------------------------------------------


def test_a_function_object_without_members_is_a_byte_that_nobody_writes(device):
    """As in most elementwise kernels: it may hold a byte of a tensor's address."""
    kernel = doubling(device, [4, 1, 16], lambda block: struct.unpack_from("<QQ", block, 8))
    run = load(
        device,
        kernel,
        lambda at: [
            struct.pack("<I", N), bytes([at.at[0] >> 20 & 0xFF]), words(at.at[0], at.at[1])
        ],
    )  # fmt: skip
    check_doubles(run)


def test_the_proof_finds_a_kernel_that_reads_such_a_byte(device):
    kernel = doubling(
        device,
        [4, 1, 16],
        lambda block: struct.unpack_from("<QQ", block, 8),
        factor=lambda block: float(block[4]),
    )
    with pytest.raises(CaptureError, match=r"param.* .* too small to be .* depend on it"):
        load(
            device,
            kernel,
            lambda at: [
                struct.pack("<I", N), bytes([at.at[0] >> 20 & 0xFF]), words(at.at[0], at.at[1])
            ],
        )  # fmt: skip


@pytest.mark.parametrize("is_read", [False, True])
def test_the_upper_half_of_an_address_behind_a_number(device, is_read):
    kernel = doubling(
        device,
        [8, 8, 8],
        at_beginning,
        factor=lambda block: float(struct.unpack_from("<I", block, 16 + 4 * is_read)[0]),
    )

    def arguments(at):
        return [words(at.at[0]), words(at.at[1]), struct.pack("<II", 2, at.at[1] >> 32)]

    if is_read:
        with pytest.raises(CaptureError, match=r"the upper half of an address.* depend on it"):
            load(device, kernel, arguments)
    else:
        check_doubles(load(device, kernel, arguments))


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        lambda at: words(at.at[0] | 1 << 60),
        lambda at: words(at.at[0] >> 4),
        lambda at: words(at.at[0] >> 4 | 0x40 << 57),
        lambda at: words((at.at[0] - at.at[1]) % (1 << 64)),
        lambda at: struct.pack("<Ii", 5, (at.at[0] - at.at[1]) // 512),
        lambda at: struct.pack("<HIH", 5, at.at[0] >> 16 & LOW, 5),
    ],
    ids=["tag above", "shifted", "shifted with flags", "difference", "difference in 32 bits",
         "middle"],
)  # fmt: skip
def test_what_is_made_of_addresses_has_them_stay(device, form):
    """It is unknown of which addresses: input and output are copied; explain names parameters."""
    kernel = doubling(device, [8, 8, 8], at_beginning)
    run = load(device, kernel, lambda at: [words(at.at[0]), words(at.at[1]), form(at)])
    check_doubles(run)
    copied = r"input0 is copied by the graph, .* 'form_kernel' .* parameter 2 .* differs between"
    assert re.search(copied, run.explain())
    assert "output1 is copied by the graph" in run.explain()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (1, 2, 0)])
def test_what_is_given_an_address_in_two_pieces_has_it_stay(device, order):
    kernel = doubling(device, [8, 8, 16], at_beginning)

    def arguments(at):
        pieces = [struct.pack("<I", one) for one in (at.at[0] & LOW, at.at[0] >> 32)]
        pieces.append(struct.pack("<Q", 5))
        apart = b"".join(pieces[one] for one in order)
        return [words(at.at[0]), words(at.at[1]), apart]

    if order[:2] == (0, 1):  # it is a plain address
        check_doubles(load(device, kernel, arguments))
        return
    run = load(device, kernel, arguments)
    check_doubles(run)
    why = r"input0 is copied .* parameter 2 holds the lower half of an address .* and"
    assert re.search(why, run.explain())


def test_memory_that_a_library_keeps_is_refused(device):
    """A counter, a workspace, or a scalar on the device."""
    kept = int(call("cuMemAlloc", 4096))
    kernel = doubling(device, [8, 8, 8], at_beginning)
    with pytest.raises(CaptureError, match=r"parameter 2 is always .*, an address of memory that"):
        load(device, kernel, lambda at: [words(at.at[0]), words(at.at[1]), words(kept)])


def test_a_copy_into_a_variable_of_a_module_is_refused(device):
    """Its address is a constant: every executable would write there."""
    variable = int(call("cuMemAlloc", 4096))
    kernel = doubling(device, [8, 8], at_beginning)

    def step(at):
        call("cuMemcpyDtoDAsync", variable, at.at[0], 4 * N, at.stream)
        at.launch(kernel, words(at.at[0]), words(at.at[1]))

    with pytest.raises(CaptureError, match=r"memcpy .* is always .*, an address of memory that"):
        device.load(make_program(*PROGRAM), [step])


@pytest.mark.parametrize("writes", [False, True])
def test_the_proof_finds_an_address_that_no_word_holds(device, writes):
    """As of a texture, or of a variable that a library set before the capture."""
    hidden: dict[int, list[int]] = {}

    def double(arguments: bytes) -> None:
        source, target, texture = struct.unpack("<3Q", arguments)
        its_source, _ = hidden[texture]
        if writes:
            floats(its_source, N)[0] = 7.0
        else:
            source = its_source
        for index in range(N):
            floats(target, N)[index] = floats(source, N)[index] * 2

    kernel = device.simulator.kernel("texture_kernel", [8, 8, 8], double)

    def arguments(at):
        if at.number == 1:  # the template: the texture's number is always the same
            hidden[9] = at.at
        return [words(at.at[0]), words(at.at[1]), words(9)]

    message = "writes to memory of its capture" if writes else "gives a different result"
    with pytest.raises(CaptureError, match=message):
        load(device, kernel, arguments)
