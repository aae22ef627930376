"""Operators that launch Triton kernels: of `torch.library.triton_op`, and in traced graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def triton_body(func: Any, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The Python function of an operator made by `triton_op` for its arguments' device.

    torch keeps them by name (`triton_ops_to_kernels` in torch/_library/triton.py, and `OPDEFS` in
    torch/_library/custom_ops.py, 2.13), as its own decomposition of these operators does.

    Returns:
        None: another operator, or one whose implementation for the device was registered by itself.
    """
    registry: Any = sys.modules.get("torch._library.triton")
    if registry is None or func._schema.name not in registry.triton_ops_to_kernels:
        return None
    definition = torch._library.custom_ops.OPDEFS.get(func._schema.name)
    if definition is None or func is not definition._opoverload:
        return None
    tensors = (one for one in tree_leaves(args) if isinstance(one, torch.Tensor))
    device = next((one.device.type for one in tensors), "cpu")
    if device in definition._backend_fns:
        return None
    body: Callable[..., Any] = definition._init_fn
    return body


def triton_launch(func: Any) -> Callable[..., Any] | None:
    """What launches a kernel that stands in a graph of torch.compile's or torch.export's.

    torch traces a launch as one of two higher-order operators. Each has an implementation that
    calls the kernel: the functional one on copies of what it writes
    (torch/_higher_order_ops/triton_kernel_wrap.py, 2.13).

    Returns:
        None: another operator.
    """
    module: Any = sys.modules.get("torch._higher_order_ops.triton_kernel_wrap")
    if module is None:
        return None
    bodies: dict[Any, Callable[..., Any]] = {
        module.triton_kernel_wrapper_mutation: module.triton_kernel_wrapper_mutation_dense,
        module.triton_kernel_wrapper_functional: module.triton_kernel_wrapper_functional_dense,
    }
    return bodies.get(func)


def plain_attention(func: Any) -> Callable[..., Any] | None:
    """What `flex_attention` computes where it is not compiled, in operators.

    As torch's own implementation for all devices: `sdpa_dense` in
    torch/_higher_order_ops/flex_attention.py, 2.13.

    Returns:
        None: another operator.
    """
    module: Any = sys.modules.get("torch._higher_order_ops.flex_attention")
    if module is None or func is not module.flex_attention:
        return None
    attention: Callable[..., Any] = module.sdpa_dense
    return attention
