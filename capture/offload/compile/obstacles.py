"""Why a launch stays as recorded: operators and tensors that kernels do not support."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.compile.extraction import is_plain, whole_view
from offload.compile.functional import functional_name
from offload.compile.templates import TEMPLATES
from offload.interpreter.torch_names import find_overload
from offload.program import Launch, Operator, Program, Role, TensorView, Value, is_dense

LOOP_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        "_adaptive_avg_pool2d", "_chunk_cat", "_log_softmax",
        "_native_batch_norm_legit_no_training", "_prelu_kernel", "_safe_softmax", "_softmax",
        "_to_copy", "adaptive_max_pool2d", "adaptive_max_pool3d", "addmv", "addr", "all", "all.dim",
        "amax", "amin", "aminmax", "any", "any.dim", "arange.start_step", "argmax", "argmin",
        "as_strided_copy", "as_strided_scatter", "avg_pool2d", "avg_pool3d",
        "binary_cross_entropy_with_logits", "block_diag", "cat", "channel_shuffle", "clone",
        "constant_pad_nd", "count_nonzero", "diag_embed", "diagonal_copy", "diagonal_scatter",
        "dist", "dot", "embedding", "expand_copy", "fill.Scalar", "flip", "floor_divide",
        "full_like", "gather", "glu", "hardswish", "huber_loss", "index.Tensor", "index_add",
        "index_copy", "index_fill.int_Scalar", "index_fill.int_Tensor", "index_put", "index_select",
        "log_sigmoid_forward", "logsumexp", "masked_fill.Tensor", "max", "max.dim",
        "max_pool2d_with_indices", "max_pool3d_with_indices", "max_unpool2d", "max_unpool3d",
        "mean", "mean.dim", "min", "min.dim", "mse_loss", "mv", "nansum", "narrow_copy",
        "native_group_norm", "native_layer_norm", "new_full", "new_ones", "new_zeros",
        "nll_loss_forward", "norm.ScalarOpt_dim", "ones_like", "permute_copy", "pixel_shuffle",
        "pixel_unshuffle", "prod", "prod.dim_int", "put", "reflection_pad1d", "renorm", "repeat",
        "replication_pad1d", "replication_pad2d", "roll", "rot90", "rsub.Tensor", "scatter.reduce",
        "scatter.src", "scatter_add", "select_scatter", "slice_scatter", "smooth_l1_loss",
        "soft_margin_loss", "split_with_sizes_copy", "squeeze_copy", "stack", "std.correction",
        "std_mean.correction", "sum", "sum.dim_IntList", "t_copy", "take", "trace",
        "transpose_copy.int", "tril", "triu", "unbind_copy.int", "unfold_copy", "unsqueeze_copy",
        "var.correction", "var_mean.correction", "vdot", "view_copy", "where.self", "zeros_like",
    )
)  # fmt: skip
"""Operators that Inductor makes loops of without a fallback, besides those that torch tags as
pointwise.
"""

_DTYPES = frozenset(
    (
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "bool",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
    )
)


def why_not(program: Program, launch: Launch) -> str:
    """Why a launch stays as recorded; empty if it may be fused."""
    whys = (why for is_so, why in _OBSTACLES if is_so(program, launch))
    return next(whys, "") or _unlike(program, launch)


def _unlike(program: Program, launch: Launch) -> str:
    """Why kernels do not support a tensor of a launch; empty if they do."""
    for view in _used(program, launch):
        if view.conjugate or view.negative:
            return "of a lazy view, conjugated or negated"
        if why := _why_not_of(program.values[view.value], view.dtype):
            return why
    if any(view != whole_view(program.values[view.value]) for view in launch.made()):
        return "returns a part of the tensor that it makes"
    return ""


def _why_not_of(value: Value, seen_as: str) -> str:
    """Why kernels do not support a Value; empty if they do."""
    if unknown := [dtype for dtype in (seen_as, value.dtype) if dtype not in _DTYPES]:
        return f"of {unknown[0]}"
    if not value.size_bytes:
        return EMPTY
    if not is_dense(value.shape, value.strides):
        return "of a tensor with gaps, or with elements that share memory"
    if not is_plain(value):
        return "of a tensor that is a part of larger memory, or in a device's format"
    return ""


def _used(program: Program, launch: Launch) -> tuple[TensorView, ...]:
    """The operands of a launch, and its results without empty tensors."""
    made = (view for view in launch.made() if program.values[view.value].size_bytes)
    return (*launch.views(), *made)


def _is_known(operator: str) -> bool:
    if operator in LOOP_OPERATORS or operator in TEMPLATES:
        return True
    overload = find_overload(operator)
    return torch.Tag.pointwise in overload.tags and not overload._schema.is_mutable


def _is_followed(program: Program, launch: Launch) -> bool:
    """Whether an in-place write may be to memory that is not visible elsewhere."""
    return bool(functional_name(launch)) and all(
        program.values[index].role in (Role.ACTIVATION, Role.OUTPUT) for index in launch.writes
    )


WRITES = "writes its arguments"
"""Why a launch stays that writes to memory which is visible elsewhere."""

EMPTY = "of an empty tensor"
"""Why a launch stays that has a tensor without elements."""


def _base_name(launch: Launch) -> str:
    """The name of torch's operator, without its overload and in-place mark."""
    return launch.name.removeprefix("aten::").partition(".")[0].removesuffix("_")


def _steps_beyond_half(launch: Launch) -> bool:
    """Whether it computes the next number in a 16-bit dtype, which Inductor widens."""
    is_half = any(view.dtype in ("bfloat16", "float16") for view in launch.views())
    return _base_name(launch) == "nextafter" and is_half


def _rounds_quotients(program: Program, launch: Launch) -> bool:
    """Whether Inductor rounds a floating-point quotient that torch computes exactly, by `fmod`.

    `fmod` itself is NaN in a compiler's fast form if its arguments are far apart.
    """
    name = _base_name(launch)
    is_floor = name in ("floor_divide", "fmod", "remainder") or (
        name == "div" and "floor" in launch.arguments
    )
    return is_floor and any("float" in view.dtype for view in _used(program, launch))


def _truncates_quotients(program: Program, launch: Launch) -> bool:
    """Whether it divides integers as C++ does, where division by zero would end the process."""
    is_trunc = _base_name(launch) == "div" and "trunc" in launch.arguments
    return is_trunc and not any("float" in view.dtype for view in launch.views())


def _special_powers(launch: Launch) -> bool:
    """Whether torch computes this power as a root, with other zeros and infinities."""
    if _base_name(launch) not in ("pow", "float_power"):
        return False
    is_half = any(view.dtype == "float16" for view in launch.views())
    return any(
        isinstance(one, (int, float)) and (one == -0.5 or (is_half and one == 0.5))
        for one in launch.arguments
    )


def _sums_bytes(launch: Launch) -> bool:
    """Whether it adds up 8-bit numbers in 8 bits, which Inductor's vectors do not."""
    made = [view.dtype for view in launch.made()]
    return _base_name(launch) in ("sum", "prod") and made[:1] in (["int8"], ["uint8"])


_OBSTACLES: tuple[tuple[Callable[[Program, Launch], bool], str], ...] = (
    (
        lambda _, launch: not (isinstance(launch.callee, Operator) and launch.callee.is_aten),
        "not an operator of torch's own",
    ),
    (lambda _, launch: launch.random, "draws random numbers"),
    (
        lambda _, launch: _base_name(launch) == "erf",
        "torch's vectors compute it from 1, and lose precision near 0",
    ),
    (
        lambda _, launch: _base_name(launch) == "acosh",
        "torch's vectors overflow beyond 1e19, which acosh does not",
    ),
    (
        lambda _, launch: "_polynomial_" in _base_name(launch),
        "a compiler's fast form of its recurrence differs from torch's for NaN",
    ),
    (
        lambda _, launch: _steps_beyond_half(launch),
        "Inductor computes the next number in float32, which 16 bits cannot represent",
    ),
    (
        lambda _, launch: _base_name(launch) == "erfinv",
        "Inductor's is inexact near 1 and -1",
    ),
    (
        lambda _, launch: _special_powers(launch),
        "torch computes it as a root, whose zeros and infinities Inductor's power does not have",
    ),
    (
        lambda _, launch: _sums_bytes(launch),
        "sums in 8 bits, which Inductor's loops do not compute",
    ),
    (
        _truncates_quotients,
        "divides integers, where Inductor's loops do not detect division by zero",
    ),
    (_rounds_quotients, "computes a remainder exactly, which Inductor's loops do not"),
    (lambda _, launch: launch.guard is not None or launch.guards_shape, "is guarded"),
    (
        lambda program, launch: (
            set(launch.writes) != {view.value for view in launch.made()}
            and not _is_followed(program, launch)
        ),
        WRITES,
    ),
    (
        lambda _, launch: not _is_known(launch.name) and not functional_name(launch),
        "no kernel is made for this operator",
    ),
    (
        lambda _, launch: (
            not launch.results or (None in launch.results and not functional_name(launch))
        ),
        "returns no new tensor",
    ),
)
