"""Keeps torch's compiler out of offload's own functions, where a compiled function calls them.

`torch.compiler.disable` does the same by a wrapper, but imports the compiler, which takes seconds.
Private parts of torch 2.13: the attributes that it sets on a function and Dynamo asks for before it
follows a call (`_torchdynamo_disable`: `check_inlineable` in torch/_dynamo/symbolic_convert.py,
`SkipFunctionVariable` in torch/_dynamo/variables/functions.py), and the strategy of a code object
(`set_code_exec_strategy`: torch/csrc/dynamo/eval_frame_cpp.cpp), which is asked when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])

_SKIP = eval_frame._FrameAction.SKIP
_NEVER_COMPILED = eval_frame._FrameExecStrategy(_SKIP, _SKIP)  # nor what it calls


def outside_graphs(function: Function) -> Function:
    """Let a function run between the graphs of a compiled function that calls it.

    torch ends a graph at the call, and begins another behind it. With `fullgraph=True` it raises
    its `Unsupported`, which has the reason that is given here.
    """
    marked: Any = function
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = (
        f"offload's {function.__qualname__} runs between graphs: call it outside of the compiled "
        "function, or compile without fullgraph=True"
    )
    code = getattr(inspect.unwrap(function), "__code__")  # noqa: B009 - of any Python function
    eval_frame.set_code_exec_strategy(code, _NEVER_COMPILED)
    return function
