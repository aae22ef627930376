"""Kernels that get TMA descriptors by value, in the layout of real sm_90 kernels."""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

import pytest
import torch

from offload.errors import CaptureError

pytest.importorskip("cuda.bindings.driver", reason="graphs are read by NVIDIA's Python bindings")

from loading import ACT, IN, OUT, WEIGHT, Device, N, on_device, result
from small_graphs import StepCapturer, floats, make_program, words

from offload.backends.cuda import CudaBackend
from offload.program import Bindings, BoundProgram, TensorView

# The fields of a 64 x 16384 tensor of 16 bits after its address, where ptxas writes them for
# tensormap.replace: strides in units of 16 bytes, sizes less one. A pair of sizes resembles an
# address.
FIELDS = bytearray(120)
struct.pack_into("<I", FIELDS, 12 - 8, 128 // 16)
struct.pack_into("<2I", FIELDS, 32 - 8, 64 - 1, 16384 - 1)
FIELDS[0] = 0xA2


class Form(NamedTuple):
    """How a kernel takes its arguments.

    Attributes:
        parameters: offset and bytes of each.
        maps: offsets of the descriptors of two sources and a result in the argument block.
    """

    parameters: tuple[tuple[int, int], ...]
    maps: tuple[int, int, int]


# Offsets count from the parameters' place in the constant bank, 0x210 on sm_90: 48 is a multiple of
# 64 there, and 112 of 128.
PRODUCT = Form(((48, 2304),), (48, 176, 304))  # sm90_xmma_gemm_* of cuBLASLt 13.1
CUTLASS = Form(((112, 1792),), (112, 240, 368))  # GemmUniversal of torch 2.11
TRITON = Form(  # three tensor descriptors of Triton 3.6: map, sizes, strides; two scratch pointers
    (
        *((48, 128), (176, 4), (180, 4), (184, 8), (192, 8)),
        *((240, 128), (368, 4), (372, 4), (376, 8), (384, 8)),
        *((432, 128), (560, 4), (564, 4), (568, 8), (576, 8)),
        *((584, 8), (592, 8)),
    ),
    (48, 240, 432),
)
FORMS = {"product": PRODUCT, "cutlass": CUTLASS, "triton": TRITON}


def tensor_map(address: int) -> bytes:
    return words(address) + bytes(FIELDS)


class Products:
    """A kernel of a form, which reads two sources and writes a result by their descriptors."""

    def __init__(self, device: Device, form: Form) -> None:
        self.form = form
        places, sizes = zip(*form.parameters, strict=True)
        self.kernel = device.simulator.kernel("tensor_map_kernel", sizes, self._run, places)

    def _run(self, block: bytes) -> None:
        assert len(block) == sum(self.form.parameters[-1])
        found = []
        for at in self.form.maps:
            assert block[at + 8 : at + 128] == FIELDS
            found.append(int.from_bytes(block[at : at + 8], "little"))
        one, other, target = found
        for index in range(N):
            floats(target, N)[index] = floats(one, N)[index] + 2 * floats(other, N)[index]

    def launch(self, at, *addresses: int, encode=tensor_map) -> None:
        """Launch on two sources and a result; all other arguments are zeros."""
        block = bytearray(sum(self.form.parameters[-1]))
        for place, address in zip(self.form.maps, addresses, strict=True):
            block[place : place + 128] = encode(address)
        at.launch(self.kernel, *(bytes(block[p : p + size]) for p, size in self.form.parameters))


def chained(products: Products, **how):
    """act = x + 2x, out = act + 2w, with the weight's descriptor 256 bytes into it."""
    program = make_program(
        [(IN, N), (WEIGHT, 2 * N), (ACT, N), (OUT, N)], [("0", "2"), ("12", "3")]
    )
    steps = [
        lambda at: products.launch(at, at.at[0], at.at[0], at.at[2], **how),
        lambda at: products.launch(at, at.at[2], at.at[1] + 256, at.at[3], **how),
    ]
    return program, steps


def with_weight(program, weight):
    view = TensorView(1, 0, (2 * N,), (1,), "float32")
    program = dataclasses.replace(program, weight_views={1: (view,)})
    return BoundProgram(program, Bindings(weights={1: (weight,)}))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_descriptors_are_relocated_by_the_word_of_their_address(device, form):
    products = Products(device, form)
    program, steps = chained(products)
    weight = on_device(torch.randn(2 * N))
    run = device.load(with_weight(program, weight), steps)
    for _ in range(3):
        x = on_device(torch.randn(N))
        expected = x + 2 * x + 2 * weight[64 : 64 + N]
        assert torch.equal(result(run, x), expected)
    assert device.simulator.errors == []


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_word_is_the_first_of_a_descriptor_and_no_other_of_it(device, form):
    program, steps = chained(Products(device, form))
    found = CudaBackend(StepCapturer(steps)).prepare(BoundProgram(program)).state.discovery
    assert [
        (one.node, one.offset_bytes, one.value, one.value_offset_bytes) for one in found.words
    ] == [
        (node, at, value, offset)
        for node, given in ((0, [(0, 0), (0, 0), (2, 0)]), (1, [(2, 0), (1, 256), (3, 0)]))
        for at, (value, offset) in zip(form.maps, given, strict=True)
    ]
    assert (found.noise, found.constants) == ((), ())


@pytest.mark.parametrize(
    "encode",
    [
        pytest.param(lambda at: words(at >> 4) + bytes(FIELDS), id="not-a-plain-word"),
        pytest.param(
            lambda at: words(at) + bytes(FIELDS[:-8]) + words(at >> 9), id="said-twice-otherwise"
        ),
    ],
)
def test_a_descriptor_that_says_its_address_otherwise_is_refused(device, encode):
    program, steps = chained(Products(device, PRODUCT), encode=encode)
    with pytest.raises(CaptureError, match=r"parameter 0 .* is not an address of an allocation"):
        device.load(program, steps, verify=False)
