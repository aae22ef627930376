"""Products, convolutions and attention as calls of our own templates (`kernels/*.hpp`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from offload.compile.convolutions import CONVOLUTION, MAX_POOL, convolution, max_pool_sizes
from offload.compile.crossover import why_no_attention, why_no_product
from offload.compile.endings import Ending, read_ending
from offload.compile.refusal import UnsupportedRegion
from offload.compile.toolchain import EXPORTED
from offload.program import (
    ITEM_BYTES,
    Launch,
    Program,
    TensorView,
    contiguous_strides,
    same_strides,
)

PRELUDE = "\n".join(
    f'#include "{name}.hpp"' for name in ("attention", "batched", "convolution", "pooling")
)
"""The common prelude of the sources of `function`."""

_PRODUCTS = ("aten::addmm", "aten::mm")
_BATCHED = "aten::bmm"
_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

_ELEMENTS = {"float32": "float", "bfloat16": "offload::kernels::BFloat16"}

_MOST_COLUMNS = 4096  # of scores in a row of attention, which are on the stack


def function(symbol: str, program: Program, *, packed: bool = False) -> str:
    """The source of `void symbol(void* const* words)` for a region.

    Args:
        symbol: its name.
        program: the region as a Program: a product with its ending, or attention.
        packed: for a product: its matrix follows its inputs as panels, which it reads.

    Raises:
        UnsupportedRegion: the template does not support these tensors.
    """
    body = _BODIES[program.launches[0].name]
    return _function(symbol, body(_Words(program, packed)))


def scratch_bytes(program: Program) -> tuple[int, ...]:
    """The sizes of the memory ranges that a region's function takes behind its results."""
    launch = program.launches[0]
    of_images = convolution(launch).scratch_bytes if launch.name == CONVOLUTION else 0
    is_normed = launch.name in (CONVOLUTION, *_PRODUCTS) and read_ending(program).norm is not None
    of_terms = 2 * _n_channels(launch) * ITEM_BYTES["float32"] if is_normed else 0
    return tuple(size_bytes for size_bytes in (of_images, of_terms) if size_bytes)


def packing_function(symbol: str, matrix: TensorView) -> str:
    """The source of a function that packs a matrix; its words are the weight's and the panels'.

    Args:
        symbol: its name.
        matrix: K rows of N columns of the weight.

    Raises:
        UnsupportedRegion: the template does not support the matrix.
    """
    depth, columns = matrix.shape
    order, stride = _order(matrix.shape, matrix.strides)
    element = _element(matrix)
    return _function(
        symbol,
        f"offload::kernels::pack<{columns}, {depth}, offload::kernels::Order::{order}, {stride}>("
        f"(const {element}*)((const char*)words[0] + {matrix.offset_bytes}), "
        f"({element}*)words[1]);",
    )


def matrix_of(launch: Launch) -> TensorView | None:
    """The matrix that rows are multiplied with; None if the launch has none."""
    if launch.name == CONVOLUTION:
        found = convolution(launch)
        return found.matrix if found.has_few_pixels else None
    if launch.name not in _PRODUCTS:
        return None
    return _view(launch.arguments[1 if launch.name == "aten::mm" else 2])


def n_rows(launch: Launch) -> int:
    """The number of rows multiplied with that matrix."""
    if launch.name == CONVOLUTION:
        return convolution(launch).n_pixels
    (made, *_) = launch.made()
    return made.shape[0]


def _function(symbol: str, body: str) -> str:
    return f"{EXPORTED} void {symbol}(void* const* words) {{\n  {body}\n}}"


def _n_channels(launch: Launch) -> int:
    (made, *_) = launch.made()
    return made.shape[1]


@dataclasses.dataclass(frozen=True, slots=True)
class _Words:
    """The words of a region's function: its inputs, packed matrix, results, scratch memory."""

    program: Program
    packed: bool

    def pointer(self, view: TensorView) -> str:
        """The pointer to a view of an input or a result."""
        inputs = [one.value for one in self.program.inputs]
        results = [one.view.value for one in self.program.results]
        if view.value in inputs:
            word = inputs.index(view.value)
        else:
            word = len(inputs) + int(self.packed) + results.index(view.value)
        return f"({_element(view)}*)((char*)words[{word}] + {view.offset_bytes})"

    def optional(self, view: TensorView | None) -> str:
        """The same, or a null pointer for None."""
        return "nullptr" if view is None else self.pointer(view)

    def panels(self, matrix: TensorView) -> str:
        """The pointer to a packed matrix."""
        return f"({_element(matrix)}*)words[{len(self.program.inputs)}]"

    def scratch(self, number: int) -> str:
        """The pointer to a range of scratch memory."""
        before = len(self.program.inputs) + int(self.packed) + len(self.program.results)
        return f"(float*)words[{before + number}]"


def _element(*views: TensorView) -> str:
    """The C++ type of the elements that the tensors have in common."""
    dtypes = list(dict.fromkeys(view.dtype for view in views))
    if len(dtypes) > 1:
        raise UnsupportedRegion(f"a template of tensors of {' and '.join(dtypes)}")
    if dtypes[0] not in _ELEMENTS:
        raise UnsupportedRegion(f"templates are for float32 and bfloat16, not for {dtypes[0]}")
    return _ELEMENTS[dtypes[0]]


def _refuse(why: str) -> None:
    if why:
        raise UnsupportedRegion(why)


def _view(argument: object) -> TensorView:
    if not isinstance(argument, TensorView):
        raise UnsupportedRegion(f"{argument!r} is not a tensor")
    return argument


# ---- linear layers ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Product:
    """Operands of a product; `bias` is None if it has none."""

    x: TensorView
    w: TensorView
    bias: TensorView | None


def _product(launch: Launch) -> _Product:
    if launch.name == "aten::mm":
        return _Product(_view(launch.arguments[0]), _view(launch.arguments[1]), None)
    bias, x, w = (_view(one) for one in launch.arguments[:3])
    if [float(one) for one in launch.arguments[3:5]] != [1.0, 1.0]:  # type: ignore[arg-type]
        raise UnsupportedRegion("a product with factors other than 1")
    columns = w.shape[1]
    if bias.shape[-1:] != (columns,) or (columns > 1 and bias.strides[-1] != 1):
        raise UnsupportedRegion("a product whose bias is not a row")
    if any(
        size != 1 and stride for size, stride in zip(bias.shape[:-1], bias.strides, strict=False)
    ):
        raise UnsupportedRegion("a product with a bias by row")
    return _Product(x, w, bias)


def _linear(words: _Words) -> str:
    program = words.program
    launch = program.launches[0]
    product, ending = _product(launch), read_ending(program)
    (rows, depth), columns = product.x.shape, product.w.shape[1]
    if depth > 1 and product.x.strides[1] != 1:
        raise UnsupportedRegion("a product of a matrix whose rows are not contiguous")
    order, w_stride = _order(product.w.shape, product.w.strides)
    matrix = words.pointer(product.w)
    if words.packed:
        order, w_stride = "kPacked", 0
        matrix = words.panels(product.w)
    (result,) = program.results
    if not _is_contiguous(result.view):
        raise UnsupportedRegion("a product whose result is not laid out in rows")
    given = [product.x, product.w, *([] if product.bias is None else [product.bias])]
    element = _element(*given, result.view)
    _refuse(why_no_product(product.x.dtype, rows))
    if ending.added is not None or (ending.norm is not None and element != "float"):
        raise UnsupportedRegion("a product with another ending than its template has")
    template = "Linear<" if element == "float" else f"LinearBFloat16<{element}, "
    numbers = (rows, columns, depth, product.x.strides[0], f"Order::{order}", w_stride, columns)
    before, terms = _terms(words, product.bias, ending)
    return (
        f"using namespace offload::kernels;\n  {before}"
        f"{template}{', '.join(map(str, numbers))}, "
        f"{ending.source(has_bias=product.bias is not None)}>::run("
        f"{words.pointer(product.x)}, {matrix}, {terms}, {words.pointer(result.view)});"
    )


def _terms(words: _Words, bias: TensorView | None, ending: Ending) -> tuple[str, str]:
    """The `Terms` of an ending in C++, and the statement that computes them for a batch norm."""
    added = "" if ending.added is None else words.pointer(ending.added)
    if ending.norm is None:
        given = words.optional(bias)
        return "", f"{{{given}, nullptr, {added}}}" if added else f"{{{given}}}"
    norm, launch = ending.norm, words.program.launches[0]
    of_norm = [words.optional(one) for one in (bias, norm.weight, norm.bias)]
    of_norm += [words.pointer(norm.mean), words.pointer(norm.variance)]
    scratch = words.scratch(len(scratch_bytes(words.program)) - 1)  # behind all others
    before = (
        f"const Terms terms = norm_terms<{_n_channels(launch)}>("
        f"{', '.join(of_norm)}, {norm.epsilon!r}f, {scratch});\n  "
    )
    return before, f"{{terms.bias, terms.scale, {added or 'nullptr'}}}"


def _batched(words: _Words) -> str:
    launch, result = words.program.launches[0], words.program.results
    if len(words.program.launches) > 1:
        raise UnsupportedRegion("batched products with an ending")
    x, w = (_view(one) for one in launch.arguments[:2])
    (batches, rows, depth), columns = x.shape, w.shape[2]
    if depth > 1 and x.strides[2] != 1:
        raise UnsupportedRegion("a product of a matrix whose rows are not contiguous")
    if len(result) != 1 or not _is_contiguous(result[0].view):
        raise UnsupportedRegion("a product whose result is not laid out in rows")
    _refuse(why_no_product(x.dtype, rows))
    order, w_stride = _order(w.shape[1:], w.strides[1:])
    element = _element(x, w, result[0].view)
    numbers = (rows, columns, depth, x.strides[1], f"Order::{order}", w_stride, columns)
    steps = (batches, x.strides[0], w.strides[0], rows * columns, batches * rows * columns * depth)
    pointers = (words.pointer(one) for one in (x, w, result[0].view))
    return (
        "using namespace offload::kernels;\n  "
        f"Batched<Product<{element}, {element}, {', '.join(map(str, numbers))}>, "
        f"{', '.join(map(str, steps))}>::run({', '.join(pointers)});"
    )


def _order(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[str, int]:
    """Which elements of a matrix of K rows and N columns are contiguous, and the other stride."""
    depth, columns = shape
    if depth == 1 or strides[0] == 1:
        return "kColumns", strides[1] if columns > 1 else depth
    if columns == 1 or strides[1] == 1:
        return "kRows", strides[0]
    raise UnsupportedRegion("a product with a matrix whose rows and columns are not contiguous")


def _is_contiguous(view: TensorView) -> bool:
    return same_strides(view.shape, view.strides, contiguous_strides(view.shape))


# ---- convolutions -------------------------------------------------------------------------------


def _convolution(words: _Words) -> str:
    found, ending = convolution(words.program.launches[0]), read_ending(words.program)
    (result,) = words.program.results
    if not _is_contiguous(result.view):
        raise UnsupportedRegion("a convolution whose result is not laid out by channel")
    if ending.added is not None and not found.adds:
        raise UnsupportedRegion("a convolution with another ending than its template has")
    numbers, weights = [found.sizes], words.pointer(found.w)
    if found.has_few_pixels:
        numbers += ["Order::kPacked", "0"] if words.packed else _matrix_order(found.matrix)
        weights = words.panels(found.w) if words.packed else weights
    numbers.append(ending.source(has_bias=found.bias is not None))
    before, terms = _terms(words, found.bias, ending)
    pointers = [words.pointer(found.x), weights, terms, words.pointer(result.view)]
    if found.scratch_bytes:
        pointers.append(words.scratch(0))
    return (
        f"using namespace offload::kernels;\n  {before}"
        f"{found.template}<{', '.join(numbers)}>::run({', '.join(pointers)});"
    )


def _matrix_order(matrix: TensorView) -> list[str]:
    order, stride = _order(matrix.shape, matrix.strides)
    return [f"Order::{order}", str(stride)]


def _max_pool(words: _Words) -> str:
    launch = words.program.launches[0]
    x, (out, *_) = _view(launch.arguments[0]), launch.made()
    if [one.view.value for one in words.program.results] != [out.value]:
        raise UnsupportedRegion("pooling with further results in use")
    return (
        "using namespace offload::kernels;\n  "
        f"MaxPool<{max_pool_sizes(launch)}>::run({words.pointer(x)}, {words.pointer(out)});"
    )


# ---- attention ----------------------------------------------------------------------------------


def _attention(words: _Words) -> str:
    program = words.program
    launch = program.launches[0]
    q, k, v = (_view(one) for one in launch.arguments[:3])
    dropout, is_causal, mask, scale = launch.arguments[3:7]
    (batches, heads, rows, width), columns = q.shape, k.shape[2]
    out = launch.results[0]
    if dropout or out is None or [one.view.value for one in program.results] != [out.value]:
        raise UnsupportedRegion("attention with dropout, or with further results in use")
    _refuse(why_no_attention(q.dtype, rows, columns))
    if columns > _MOST_COLUMNS or heads % k.shape[1] or v.shape[1] != k.shape[1]:
        raise UnsupportedRegion("attention of other sizes than the template supports")
    if any(one.shape[3] > 1 and one.strides[3] != 1 for one in (q, k, v, out)):
        raise UnsupportedRegion("attention whose heads are not contiguous")
    added = None if mask is None else _mask(_view(mask), (batches, heads, rows, columns))
    element = _element(q, k, v, out)
    mask_element = element if mask is None else _element(_view(mask))
    numbers = (batches, heads, heads // k.shape[1], rows, columns, width, v.shape[3])
    strides = ", ".join(
        f"Strides{{{', '.join(map(str, one.strides[:3]))}}}" for one in (q, k, v, out)
    )
    mask_strides = ", ".join(map(str, (0, 0, 0, 0) if added is None else added))
    pointers = [words.pointer(one) for one in (q, k, v)]
    pointers.append(words.optional(None if mask is None else _view(mask)))
    pointers.append(words.pointer(out))
    factor = 1 / math.sqrt(width) if scale is None else float(scale)  # type: ignore[arg-type]
    return (
        "using namespace offload::kernels;\n  "
        f"Attention<{element}, {mask_element}, {', '.join(map(str, numbers))}, {strides}, "
        f"{_flag(is_causal)}, {_flag(mask is not None)}, MaskStrides{{{mask_strides}}}>::run("
        f"{', '.join(pointers)}, {factor!r}f);"
    )


def _flag(value: object) -> str:
    return "true" if value else "false"


def _mask(mask: TensorView, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a mask that is broadcast in dimensions of one element."""
    missing = len(shape) - len(mask.shape)
    sizes = (1,) * missing + mask.shape
    strides = (0,) * missing + mask.strides
    for size, wanted in zip(sizes, shape, strict=True):
        if size not in (1, wanted):
            raise UnsupportedRegion("attention with a mask of another shape")
    return tuple(stride if size > 1 else 0 for size, stride in zip(sizes, strides, strict=True))


_BODIES: Mapping[str, Callable[[_Words], str]] = {
    **dict.fromkeys(_PRODUCTS, _linear),
    _BATCHED: _batched,
    CONVOLUTION: _convolution,
    MAX_POOL: _max_pool,
    _ATTENTION: _attention,
}

TEMPLATES = frozenset(_BODIES)
"""Operators with a template."""
