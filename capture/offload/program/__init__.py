"""Programs as plain data: built, compared, printed, checked and rewritten without torch."""

from offload.program.bindings import (
    Bindings,
    BoundProgram,
    KernelFunction,
    OpaqueCall,
    StoredTensor,
    Watched,
)
from offload.program.check import check_program
from offload.program.collectives import Group
from offload.program.decode import decode_program
from offload.program.device_kernels import (
    DeviceCall,
    DeviceFunction,
    DeviceKernel,
    Number,
    Pointer,
)
from offload.program.encode import encode_program
from offload.program.launch import (
    Argument,
    Callee,
    Effect,
    EffectKind,
    Kernel,
    Launch,
    Opaque,
    Operator,
)
from offload.program.plain_structure import plain_structure, with_objects
from offload.program.program import Caller, Overlap, Program, Result
from offload.program.rewrite import Rewritten, renumbered, rewrite
from offload.program.triton_kernels import TritonCode, TritonKernel
from offload.program.values import (
    ITEM_BYTES,
    MADE_ROLES,
    PLACED_ROLES,
    Role,
    Symbol,
    TensorView,
    Value,
    contiguous_strides,
    is_dense,
    same_strides,
    span_bytes,
    used_strides,
)

__all__ = [
    "ITEM_BYTES",
    "MADE_ROLES",
    "PLACED_ROLES",
    "Argument",
    "Bindings",
    "BoundProgram",
    "Callee",
    "Caller",
    "DeviceCall",
    "DeviceFunction",
    "DeviceKernel",
    "Effect",
    "EffectKind",
    "Group",
    "Kernel",
    "KernelFunction",
    "Launch",
    "Number",
    "Opaque",
    "OpaqueCall",
    "Operator",
    "Overlap",
    "Pointer",
    "Program",
    "Result",
    "Rewritten",
    "Role",
    "StoredTensor",
    "Symbol",
    "TensorView",
    "TritonCode",
    "TritonKernel",
    "Value",
    "Watched",
    "check_program",
    "contiguous_strides",
    "decode_program",
    "encode_program",
    "is_dense",
    "plain_structure",
    "renumbered",
    "rewrite",
    "same_strides",
    "span_bytes",
    "used_strides",
    "with_objects",
]
