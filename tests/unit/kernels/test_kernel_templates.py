"""Templates of kernels against float64, over sizes that fill vectors and sizes that do not."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_sources import call, library, needs_compiler, region_of
from torch import nn
from torch.nn import functional

from offload.compile.extraction import Extracted
from offload.compile.packing import Packing, pack
from offload.compile.proof import run
from offload.compile.refusal import UnsupportedRegion
from offload.compile.templates import PRELUDE, function, matrix_of, packing_function
from offload.program import Program

pytestmark = needs_compiler

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu of tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}

# Rows, columns and depth: one, vectors and panels filled or not; more than one block of depth.
SIZES = [
    (1, 1, 1), (1, 64, 64), (1, 33, 67), (2, 7, 300), (3, 16, 16), (4, 48, 32), (5, 1, 9),
    (8, 48, 64), (9, 50, 67), (13, 101, 67), (16, 192, 64), (17, 47, 257), (9, 31, 513),
    (33, 16, 5),
]  # fmt: skip

GUARD = 64


DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2**-8, 2e-5)}
"""Relative and absolute tolerance of products against float64. In bfloat16 a result is rounded
once, by half a unit in the last place.
"""


def guarded(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of NaN aligned only to its elements, and the memory around it."""
    count = torch.Size(shape).numel()
    around = torch.full((count + 2 * GUARD + 1,), float("nan"), dtype=dtype)
    return around[GUARD + 1 : GUARD + 1 + count].view(shape), around


def place(tensor: torch.Tensor) -> torch.Tensor:
    """A copy surrounded by NaN, which any read beyond it turns into NaN."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    _, around = guarded(count, dtype=tensor.dtype)
    inside = around[GUARD + 1 : -GUARD].as_strided(tensor.shape, tensor.stride(), GUARD + 1)
    return inside.copy_(tensor)


def check(loaded: ctypes.CDLL, symbol: str, model, inputs, region) -> None:
    """Run a function beside the model in float64, on memory between guards."""
    given = [place(one) for one in region_inputs(region, model, inputs)]
    check_with(loaded, symbol, model, inputs, given)


def check_with(loaded: ctypes.CDLL, symbol: str, model, inputs, given) -> None:
    (dtype,) = {one.dtype for one in inputs}
    wide = model.double()(*(one.double() for one in inputs))
    model.to(dtype)
    made, around = guarded(*wide.shape, dtype=dtype)
    call(loaded, symbol, [*given, made])
    assert around[: GUARD + 1].isnan().all()
    assert around[-GUARD:].isnan().all()
    relative, absolute = TOLERANCES[dtype]
    torch.testing.assert_close(made.double(), wide, rtol=relative, atol=absolute)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory from its first element on."""
    offset_bytes = tensor.element_size() * tensor.storage_offset()
    size_bytes = tensor.untyped_storage().nbytes() - offset_bytes
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(tensor.untyped_storage(), offset_bytes, (size_bytes,), (1,))


def region_inputs(region, model, inputs):
    """The tensors of a region's inputs, by their names in its program."""
    named = dict(model.named_parameters())
    positions = {f"args[{number}]": one for number, one in enumerate(inputs)}
    return [
        (named | positions)[region.program.values[view.value].name].detach()
        for view in region.program.inputs
    ]


class Product(nn.Module):
    def __init__(self, columns, depth, bias, activation) -> None:
        super().__init__()
        self.linear = nn.Linear(depth, columns, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x):
        return self.activation(self.linear(x))


class Turned(nn.Module):
    """A product with a weight whose rows are contiguous along the other dimension."""

    def __init__(self, columns, depth) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(depth, columns))
        self.bias = nn.Parameter(torch.randn(columns))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


def product_cases() -> Iterator[tuple[str, Callable[[], nn.Module], tuple[int, int]]]:
    """Names, functions that make a model, and the shape of its input."""
    kinds = itertools.product([True, False], [*ACTIVATIONS, *ACTIVATIONS])
    for size, (bias, activation) in zip(itertools.cycle(SIZES), kinds, strict=False):
        make = functools.partial(Product, *size[1:], bias, activation)
        yield f"{size} {bias} {activation}", make, (size[0], size[2])
    for size in SIZES:
        yield f"{size} turned", functools.partial(Turned, *size[1:]), (size[0], size[2])


CASES = {
    f"{name} {str(dtype).removeprefix('torch.')}": (make, shape, dtype)
    for dtype in DTYPES
    for name, make, shape in product_cases()
}


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory):
    """One function for each case, all in one library."""
    made, texts = {}, [PRELUDE]
    torch.manual_seed(0)
    for number, (name, (make, shape, dtype)) in enumerate(CASES.items()):
        model, inputs = make().to(dtype), (torch.randn(shape, dtype=dtype),)
        region = region_of(model, *inputs)
        texts.append(function(f"product_{number}", region.program))
        texts.append(function(f"packed_{number}", region.program, packed=True))
        texts.append(packing_function(f"pack_{number}", packing_of(region).matrix))
        made[name] = (f"product_{number}", model, inputs, region)
    return library("\n".join(texts), tmp_path_factory.mktemp("products")), made


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_products(products, name):
    loaded, made = products
    symbol, model, inputs, region = made[name]
    check(loaded, symbol, model, inputs, region)


def packing_of(region: Extracted) -> Packing:
    matrix = matrix_of(region.program.launches[0])
    assert matrix is not None
    return pack(region.program, matrix)


@pytest.mark.parametrize("name", CASES)
def test_products_with_panels(products, name):
    """The panels have the bits of the launches that they replace, zeros included."""
    loaded, made = products
    symbol, model, inputs, region = made[name]
    number = symbol.partition("_")[2]
    matrix = matrix_of(region.program.launches[0])
    position = [view.value for view in region.program.inputs].index(matrix.value)
    given = [place(one) for one in region_inputs(region, model, inputs)]
    shape = packing_of(region).program.results[0].view.shape
    panels, around = guarded(*shape, dtype=given[position].dtype)
    call(loaded, f"pack_{number}", [given[position], panels])
    assert around[: GUARD + 1].isnan().all()
    assert around[-GUARD:].isnan().all()
    (expected,) = run(packing_of(region).program, [as_bytes(given[position])])
    assert torch.equal(panels.view(expected.dtype), expected)
    given[position] = torch.full_like(given[position], float("nan"))  # which is never read
    check_with(loaded, f"packed_{number}", model, inputs, [*given, panels])


class Batched(nn.Module):
    """Products of a matrix with each of many, with contiguous rows or columns."""

    def __init__(self, batches, columns, depth, turned) -> None:
        super().__init__()
        self.turned = turned
        self.weight = nn.Parameter(
            torch.randn(batches, *((columns, depth) if turned else (depth, columns)))
        )

    def forward(self, x):
        return torch.bmm(x, self.weight.transpose(1, 2) if self.turned else self.weight)


BATCHED_CASES = list(itertools.product(SIZES, [1, 3], [True, False], DTYPES))


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory):
    made, texts = {}, [PRELUDE]
    torch.manual_seed(2)
    for number, case in enumerate(BATCHED_CASES):
        (rows, columns, depth), batches, turned, dtype = case
        model = Batched(batches, columns, depth, turned).to(dtype)
        inputs = (torch.randn(batches, rows, depth, dtype=dtype),)
        region = region_of(model, *inputs)
        texts.append(function(f"batched_{number}", region.program))
        made[case] = (f"batched_{number}", model, inputs, region)
    return library("\n".join(texts), tmp_path_factory.mktemp("batched")), made


@pytest.mark.slow
@pytest.mark.parametrize("case", BATCHED_CASES)
def test_batched_products(batched, case):
    loaded, made = batched
    symbol, model, inputs, region = made[case]
    check(loaded, symbol, model, inputs, region)


HEADS = {
    "causal": ((2, 3, 5, 8), (2, 3, 5, 8), True, None),
    "more columns": ((1, 2, 3, 16), (1, 2, 33, 16), False, None),
    "more rows": ((1, 2, 37, 5), (1, 2, 4, 5), True, None),
    "one row": ((1, 4, 1, 32), (1, 4, 70, 32), False, None),
    "blocks of rows": ((1, 1, 50, 16), (1, 1, 50, 16), True, None),
    "mask": ((2, 2, 6, 8), (2, 2, 9, 8), False, (2, 1, 6, 9)),
    "mask repeated": ((2, 2, 6, 8), (2, 2, 40, 8), False, (2, 1, 1, 40)),
    "mask of two dimensions": ((1, 2, 17, 8), (1, 2, 17, 8), False, (17, 17)),
}


class Attention(nn.Module):
    def __init__(self, is_causal) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, q, k, v, mask=None):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.is_causal
        )


HEAD_CASES = {
    f"{name} {kind}": (*shapes, dtype, mask_dtype)
    for kind, dtype, mask_dtype in [
        ("float32", torch.float32, torch.float32),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("bfloat16, mask float32", torch.bfloat16, torch.float32),
    ]
    for name, shapes in HEADS.items()
    if shapes[3] is not None or dtype == mask_dtype
}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory):
    made, texts = {}, [PRELUDE]
    torch.manual_seed(1)
    for number, (name, case) in enumerate(HEAD_CASES.items()):
        asked, known, is_causal, mask, dtype, mask_dtype = case
        inputs = [torch.randn(shape, dtype=dtype) for shape in (asked, known, known)]
        if mask is not None:
            added = torch.randn(mask, dtype=mask_dtype)
            inputs.append(added.masked_fill(torch.rand(mask) < 0.3, float("-inf")))
        model = Attention(is_causal)
        region = region_of(model, *inputs)
        texts.append(function(f"heads_{number}", region.program))
        made[name] = (f"heads_{number}", model, inputs, region)
    return library("\n".join(texts), tmp_path_factory.mktemp("heads")), made


def tolerance_of(model: Attention, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The tolerance of an attention result against float64, by element.

    In bfloat16 the result and each weight are rounded by half a unit in the last place, so the same
    attention over the magnitudes of the values bounds the effect of the weights' roundings.
    """
    q, k, v, *mask = (one.double() for one in inputs)
    result, sizes = model(q, k, v, *mask).abs(), model(q, k, v.abs(), *mask)
    if inputs[0].dtype == torch.float32:
        return 2e-5 * result + 2e-6
    return 2**-8 * (1.001 * result + sizes) + 2e-6


def check_attention(loaded: ctypes.CDLL, symbol: str, model, inputs: list[torch.Tensor]) -> None:
    recorded = model(*inputs)
    expected = model(*(one.double() for one in inputs))
    given = [place(one) for one in inputs]
    count = recorded.untyped_storage().nbytes() // recorded.element_size()
    _, around = guarded(count, dtype=recorded.dtype)
    found = around.as_strided(recorded.shape, recorded.stride(), GUARD + 1)
    call(loaded, symbol, [*given, found])
    assert around[: GUARD + 1].isnan().all()
    assert around[-GUARD:].isnan().all()
    assert ((found.double() - expected).abs() <= tolerance_of(model, inputs)).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", HEAD_CASES)
def test_attention(heads, name):
    loaded, made = heads
    symbol, model, inputs, _ = made[name]
    check_attention(loaded, symbol, model, inputs)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_row_that_sees_nothing_is_as_torch_has_it(heads, kind):
    loaded, made = heads
    symbol, model, inputs, _ = made[f"mask {kind}"]
    inputs = [one.clone() for one in inputs]
    inputs[3][:, :, 2] = float("-inf")
    expected = model(*inputs)
    assert not expected[:, :, 2].any()
    check_attention(loaded, symbol, model, inputs)


def refused(program: Program) -> str:
    with pytest.raises(UnsupportedRegion) as told:
        function("kernel", program)
    return str(told.value)


def test_what_templates_do_not_take_is_refused():
    x, w = torch.randn(4, 6), torch.randn(6, 5)
    scaled = region_of(lambda c, a, b: torch.addmm(c, a, b, alpha=2), torch.randn(5), x, w)
    assert "factors other than 1" in refused(scaled.program)
    by_row = region_of(torch.addmm, torch.randn(4, 5), x, w)
    assert "bias by row" in refused(by_row.program)
    of_one_number = region_of(torch.addmm, torch.tensor(2.0), x, w)
    assert "whose bias is not a row" in refused(of_one_number.program)
    wide = region_of(torch.mm, x.double(), w.double())
    assert "float32 and bfloat16, not for float64" in refused(wide.program)
    sparse = region_of(torch.mm, x, torch.randn(12, 10)[::2, ::2])
    assert "rows and columns are not contiguous" in refused(sparse.program)
    turned = region_of(lambda a, b: torch.bmm(a.mT, b), x.T[None].contiguous(), w[None])
    assert "whose rows are not contiguous" in refused(turned.program)


def test_tensors_of_several_dtypes_are_refused():
    region = region_of(torch.mm, torch.randn(4, 6), torch.randn(6, 5))
    (launch,) = region.program.launches
    x, w = launch.arguments
    mixed = dataclasses.replace(launch, arguments=(dataclasses.replace(x, dtype="bfloat16"), w))
    program = dataclasses.replace(region.program, launches=(mixed,))
    assert "of bfloat16 and float32" in refused(program)
    with pytest.raises(UnsupportedRegion, match="float64 is not packed"):
        pack(program, dataclasses.replace(w, dtype="float64"))
