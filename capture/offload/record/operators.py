"""Properties of a dispatched operator: its name, arguments in schema order, tensors."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type

from offload.console.user_code import user_location
from offload.errors import CaptureError
from offload.interpreter.eager_run import flat
from offload.interpreter.torch_names import dtype_name
from offload.program import Argument, Symbol
from offload.program.collectives import RECEIVES, WAIT

# Operators that only reserve memory: their Value begins without content, and no launch is kept.
_RESERVE_OPERATORS = frozenset(
    {
        "aten::empty.memory_format",
        "aten::empty_strided",
        "aten::empty_like",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::empty_permuted",
    }
)

# Operators that take tensors and answer with numbers from metadata alone: shapes, strides, dtypes,
# flags, addresses. torch tags some of those that read the content, not all, so an operator that is
# not listed here is assumed to read it: new or foreign operators are refused or guarded rather than
# frozen. (The choice of a CTC kernel depends on lengths on CUDA only; a weight's format is compared
# when it is loaded.)
_METADATA_OPERATORS = frozenset({"npu::get_npu_format"}) | frozenset(
    f"aten::{name}"
    for name in (
        "_debug_has_internal_overlap", "_fused_sdp_choice", "_has_compatible_shallow_copy_type",
        "_has_same_storage_numel", "_is_zerotensor", "_use_cudnn_ctc_loss",
        "_use_cudnn_ctc_loss.Tensor", "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor",
        "_version", "cudnn_is_acceptable", "dim", "get_device", "is_coalesced", "is_complex",
        "is_conj", "is_contiguous", "is_contiguous.memory_format", "is_distributed",
        "is_floating_point", "is_inference", "is_leaf", "is_neg", "is_pinned", "is_same_size",
        "is_set_to", "is_signed", "numel", "output_nr", "result_type.Scalar",
        "result_type.Scalar_Tensor", "result_type.Tensor", "retains_grad", "size", "size.int",
        "storage_offset", "stride", "stride.int", "sym_is_contiguous", "sym_numel", "sym_size",
        "sym_size.int", "sym_storage_offset", "sym_stride", "sym_stride.int",
    )
)  # fmt: skip

# Operators whose result shapes depend on the content of only the argument at this position,
# including those that torch's tag does not name (found by torch's rules for fake tensors).
_SHAPE_SOURCES = {
    "aten::masked_select": 1,
    "aten::_pack_padded_sequence": 1,
    "aten::_padded_dense_to_jagged_forward": 1,
}
_UNTAGGED_SHAPES = frozenset(_SHAPE_SOURCES) - {"aten::masked_select"}

# Operators that while training (argument 5) write running statistics (arguments 3 and 4) without
# declaring it in their schemas.
_BATCH_NORMS = frozenset(
    {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
)


# Other operators that write arguments at these positions without declaring it: peers write receive
# buffers, and the write is visible only after the wait.
_UNDECLARED_WRITES = {
    "aten::batch_norm_update_stats": frozenset({1, 2}),
    RECEIVES: frozenset({0}),
    WAIT: frozenset({0}),
}


def is_tensor(thing: Any) -> bool:
    """Whether a leaf of a Structure is a tensor."""
    return isinstance(thing, torch.Tensor)


def tensors_in(argument: Any) -> list[torch.Tensor]:
    """The tensors of an argument, including those in lists."""
    return [item for item in flat(argument) if isinstance(item, torch.Tensor)]


@dataclasses.dataclass(frozen=True, slots=True)
class Overload:
    """torch's description of an operator overload, read once, as schemas are slow to read.

    Attributes:
        name: `aten::add.Tensor`; the default overload has no suffix.
        parameters: names and defaults, in schema order.
        declares_write: for each parameter, whether the schema declares a write.
        returns: it returns something.
        reserves: it makes memory without content.
        random: it draws from a generator, unless its arguments disable dropout.
        reads_host: it may return a number that depends on a tensor's content.
        moves_metadata: it changes where or how its argument lies (`resize_`, `set_`, `t_`).
        dynamic_shape: its results' shapes may depend on content.
        is_aten: it is torch's own.
    """

    name: str
    parameters: tuple[tuple[str, Any], ...]
    declares_write: tuple[bool, ...]
    returns: bool
    reserves: bool
    random: bool
    reads_host: bool
    moves_metadata: bool
    dynamic_shape: bool
    is_aten: bool

    def in_order(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """All arguments in schema order, defaults filled in."""
        rest = self.parameters[len(args) :]
        return [*args, *(kwargs.get(name, default) for name, default in rest)]

    def draws(self, arguments: list[Any]) -> bool:
        """Whether a launch with these arguments, in schema order, draws from a generator.

        torch's tag ignores arguments: fused attention without dropout is tagged as well, and so are
        recurrent layers and `rrelu` in evaluation. They draw nothing then: `use_dropout` in
        transformers/cuda/attention.cu, `training` in cuda/RreluWithNoise.cu (both ATen/native). The
        meaning of other libraries' parameters is unknown: their operators draw as tagged.
        """
        if not (self.random and self.is_aten):
            return self.random
        given = {
            name: argument for (name, _), argument in zip(self.parameters, arguments, strict=True)
        }
        drops = given.get("dropout_p", given.get("dropout", 1)) != 0
        return drops and given.get("train", given.get("training", True)) is not False


NO_NESTED_ENCODER = "build nn.TransformerEncoder with enable_nested_tensor=False"


@functools.cache
def operator_of(func: Any) -> Overload:
    """The Overload of an `OpOverload`."""
    schema = func._schema
    overload = "" if func._overloadname == "default" else func._overloadname
    name = f"{schema.name}.{overload}" if overload else schema.name
    writes = (one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return Overload(
        name,
        tuple((one.name, _default(one)) for one in schema.arguments),
        tuple(writes),
        returns=bool(schema.returns),
        reserves=name in _RESERVE_OPERATORS,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        reads_host=torch.Tag.data_dependent_output in func.tags
        or _answers_in_numbers(name, schema),
        moves_metadata=torch.Tag.inplace_view in func.tags,
        dynamic_shape=name in _UNTAGGED_SHAPES or _tagged_dynamic(func),
        is_aten=func.namespace == "aten",
    )


# Numbers of c10::ScalarType (c10/core/ScalarType.h), which schemas use as defaults of dtypes.
_DTYPE_NUMBERS = {3: torch.int32, 4: torch.int64, 6: torch.float32, 7: torch.float64}


def _default(argument: Any) -> Any:
    """The default of a schema's argument; a dtype's number becomes a dtype."""
    value = argument.default_value
    if type(value) is int and "ScalarType" in str(argument.real_type):
        return _DTYPE_NUMBERS.get(value, value)
    return value


def written_arguments(operator: Overload, arguments: list[Any]) -> tuple[bool, ...]:
    """For each argument, whether it is written: as declared, or as known otherwise."""
    trains = operator.name in _BATCH_NORMS and bool(arguments[5])
    writes = {3, 4} if trains else _UNDECLARED_WRITES.get(operator.name, frozenset())
    return tuple(
        is_declared or position in writes
        for position, is_declared in enumerate(operator.declares_write)
    )


def _answers_in_numbers(name: str, schema: Any) -> bool:
    """Whether it takes tensors, returns no tensor, and is not known to read metadata alone."""
    takes, returns = (
        any("Tensor" in str(one.type) for one in side)
        for side in (schema.arguments, schema.returns)
    )
    return takes and bool(schema.returns) and not returns and name not in _METADATA_OPERATORS


def _tagged_dynamic(func: Any) -> bool:
    """Whether torch tags shapes as content-dependent; for an out-variant its operator decides."""
    variants = [func]
    if func._overloadname.endswith("out"):
        packet = func.overloadpacket
        variants += [getattr(packet, name) for name in packet.overloads() if name != "hacked_twin"]
    return any(torch.Tag.dynamic_output_shape in one.tags for one in variants)


def is_plain_class(tensor: torch.Tensor) -> bool:
    """Whether it is torch's own Tensor or Parameter, by class, as any tensor may be a Parameter."""
    return type(tensor) is torch.Tensor or issubclass(type(tensor), torch.nn.Parameter)


@functools.cache
def is_wrapper(kind: type) -> bool:
    """Whether a tensor class wraps plain tensors and can be flattened, such as DTensor.

    Nested tensors do not count: their sizes are content.
    """
    is_nested = kind.__module__.startswith("torch.nested.")
    return is_traceable_wrapper_subclass_type(kind) and not is_nested


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether it wraps another tensor inside torch.func or torch.func.functionalize."""
    functorch: Any = torch._C._functorch
    return bool(
        functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor)
    )


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a strided view of memory that can be watched.

    Wrapper subclasses have a storage of some size at address 0, without content.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if (
            torch.nn.parameter.is_lazy(tensor)
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or tensor.is_meta
            or tensor._is_zerotensor()
            or is_transformed(tensor)
            or not torch._C._has_storage(tensor)
        ):
            return False
        if type(tensor) is FakeTensor:
            return True
        storage = tensor.untyped_storage()
        try:
            return storage.nbytes() == 0 or storage.data_ptr() != 0
        except RuntimeError:  # torch raises for subclasses whose storage has no address
            return False


def check_plain(tensor: torch.Tensor, where: str) -> None:
    """Refuse tensors that are not a strided view of plain memory.

    Raises:
        CaptureError: a subclass with its own behaviour, a sparse, nested, quantised or zero-tensor
            layout, or a tensor of a functional transform.
    """
    if not _is_plain(tensor):
        raise CaptureError(f"{user_location()}: {where} uses {_why_not_plain(tensor, where)}")


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        (type(tensor) is FakeTensor or is_plain_class(tensor))
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()
        and not torch.nn.parameter.is_lazy(tensor)
        and not is_transformed(tensor)
    )


def _why_not_plain(tensor: torch.Tensor, where: str) -> str:
    """What a tensor is that is not plain, and what to do."""
    if is_transformed(tensor):
        return (
            "a tensor of a transform (torch.func, functionalize): capture outside of the "
            "transform, with plain tensors"
        )
    if torch.nn.parameter.is_lazy(tensor):
        return "a parameter that has no shape yet: call the model once before capturing it"
    if tensor.is_nested:
        return (
            "a nested tensor: only plain strided tensors can be recorded; use padded ones "
            f"({NO_NESTED_ENCODER})"
        )
    kind = "quantized tensor" if tensor.is_quantized else type(tensor).__qualname__
    if kind == "Tensor" and tensor._is_zerotensor():
        kind = "tensor of zeros without memory"
    return (
        f"a {kind} of layout {tensor.layout}: only plain strided tensors can be recorded"
        f"{_plain_instead(tensor, where)}"
    )


def _plain_instead(tensor: torch.Tensor, where: str) -> str:
    """How to use a plain tensor instead; empty where nothing is known."""
    if tensor.layout is not torch.strided:
        if torch._C._current_graph_task_id() >= 0 or "embedding" in where:
            return (
                ", and this is a sparse gradient: give the layer that makes it sparse=False "
                "(nn.Embedding, nn.EmbeddingBag), and the parameters an optimizer for dense "
                "gradients (Adam instead of SparseAdam); or leave backward() and the optimizer's "
                "step out of the captured call"
            )
        return "; use its .to_dense()"
    if hasattr(tensor, "to_local"):
        return "; use its .to_local(), which is this rank's part"
    if not has_plain_memory(tensor):
        return "; use the plain tensors that it holds or represents"
    if not is_plain_class(tensor):
        return "; pass it .as_subclass(torch.Tensor)"
    return ""


def shape_depends_on_data(operator: Overload, arguments: list[Any]) -> bool:
    """Whether an operator's results may have other shapes for other values of its arguments.

    torch's tag covers every overload that might; some are static for these arguments.
    """
    if not operator.dynamic_shape:
        return False
    name = operator.name
    if name.startswith("aten::index.Tensor"):
        return any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(arguments[1]))
    if name.startswith("aten::linalg_lstsq"):
        return arguments[3] not in (None, "gelsy")  # residuals are left empty by this driver
    if name == "aten::_padded_dense_to_jagged_forward":
        return arguments[2] is None  # the total length was not given
    # For ctc_loss only the second result varies, with lengths that every execution compares.
    return not name.startswith("aten::_ctc_loss")


def shape_sources(name: str, arguments: list[Any]) -> list[torch.Tensor]:
    """The tensors on whose values an operator's result shapes may depend."""
    position = _SHAPE_SOURCES.get(name)
    return tensors_in(arguments if position is None else arguments[position])


def argument_data(argument: Any) -> Argument:
    """An operator argument that is neither tensor, list nor generator, as a Program holds it.

    Raises:
        CaptureError: a Program cannot hold it.
    """
    if isinstance(argument, torch.dtype):
        return Symbol("dtype", dtype_name(argument))
    if isinstance(argument, torch.device):
        return Symbol("device", argument.type)
    if isinstance(argument, torch.layout):
        return Symbol("layout", str(argument).removeprefix("torch."))
    if isinstance(argument, torch.memory_format):
        return Symbol("memory_format", str(argument).removeprefix("torch."))
    if argument is None or isinstance(argument, (bool, int, float, complex, str)):
        return argument
    if isinstance(argument, (torch.SymInt, torch.SymFloat)):
        number: Any = argument  # of a Program that is only inspected (`symbolic_sizes`)
        return cast(Argument, number)
    raise CaptureError(
        f"{user_location()}: an operator takes a {type(argument).__qualname__}, which a program "
        "cannot hold"
    )


_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, so that equality compares bits (NaN, -0.0)."""
    plain = tensor.detach()
    if plain.is_conj():
        plain = torch._conj(plain)
    if plain.is_neg():
        plain = torch._neg_view(plain)
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.view(_INTEGER_OF_SIZE[plain.element_size()])
