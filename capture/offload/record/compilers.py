"""Whose code takes part when torch.compile compiles: torch's, an installed package's, the user's.

Private parts of torch: the classes to which torch.compile gives the name of a compiler
(torch/__init__.py, 2.13), and which settings of its compilers are not the default's
(torch/utils/_config_module.py).
"""

from __future__ import annotations

import functools
import importlib.metadata
import sys
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

import torch

from offload.record.compiler_tables import tables_of_user

_INDUCTOR = "torch._inductor.config"
_AUTOGRAD = "torch._functorch.config"
_OF_GRAPHS = "joint_custom_pass"  # of the joint graph, whatever compiles it
_HARMLESS = "trace."  # what is done with traces of a compilation


def are_originals_called() -> bool:
    """Whether the user has torch call originals: `torch.compiler.set_stance("force_eager")`."""
    stance = getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None)
    return getattr(stance, "stance", "") == "force_eager"


def is_of_torch(compiler: Any) -> bool:
    """Whether a compiler is torch's, such as inductor, or one of an installed package.

    A function that is registered by name (`torch._dynamo.register_backend`) is the user's, and so
    is a compiler of torch's in which a function of the user's takes part.
    """
    compiler = _unwrapped(compiler)
    function = _function_of(compiler)
    if is_in_torch(function):
        return not settings_of_user(compiler)
    name = getattr(compiler, "compiler_name", "")
    return name in _installed() and torch._dynamo.lookup_backend(name) is function


def settings_of_user(compiler: Any) -> tuple[str, ...]:
    """Settings of a compiler of torch's that hold functions of the user's, such as a pass.

    They are those of this thread now, and those that torch.compile was given; also Inductor's own
    tables of lowerings and patterns, which hold for all compilations.
    """
    compiler = _unwrapped(compiler)
    function = _function_of(compiler)
    if not is_in_torch(function):
        return ()
    settings: dict[str, Any] = {}
    name = getattr(function, "__name__", "")
    if not name.startswith("eager"):  # which runs the graph as it is
        graphs = sys.modules.get(_AUTOGRAD)
        settings[f"{_AUTOGRAD}.{_OF_GRAPHS}"] = getattr(graphs, _OF_GRAPHS, None)
    if _is_inductor(function):
        given = getattr(compiler, "config", {})
        changed = {**_changed(sys.modules.get(_INDUCTOR)), **given}
        settings |= {
            f"{_INDUCTOR}.{key}": value
            for key, value in changed.items()
            if not key.startswith(_HARMLESS)
        }
    found = [key for key, value in settings.items() if not _are_in_torch(value)]
    return (*found, *(tables_of_user() if _is_inductor(function) else ()))


def _changed(config: Any) -> dict[str, Any]:
    """The settings that are not the default's."""
    names = () if config is None else config._config
    return {name: getattr(config, name) for name in names if not config._is_default(name)}


def _unwrapped(compiler: Any) -> Any:
    """What torch.compile made of a compiler, or the compiler."""
    if isinstance(compiler, str):
        compiler = torch._dynamo.lookup_backend(compiler)
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    return compiler


def _function_of(compiler: Any) -> Any:
    """The function that compiles; of `torch._dynamo.optimize(function)` itself."""
    return getattr(compiler, "compiler_fn", compiler)


def _is_inductor(function: Any) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    of_torchs = isinstance(function, torch._TorchCompileInductorWrapper)
    module = getattr(function, "__module__", "")
    return of_torchs or module.startswith(("torch._inductor.", "torch._dynamo.backends.inductor"))


@functools.cache
def _installed() -> frozenset[str]:
    """The compilers of installed packages, by name."""
    return frozenset(importlib.metadata.entry_points(group="torch_dynamo_backends").names)


def is_in_torch(function: Any) -> bool:
    """Whether torch defines a function, or the class of a callable and all that it calls.

    An object of torch's may hold functions of the user's, as a PatternMatcherPass does in its
    patterns, so its methods do not count.
    """
    if isinstance(function, functools.partial):
        return _are_in_torch((function.func, function.args, function.keywords))
    if isinstance(function, MethodType) and not isinstance(function.__self__, type):
        return False
    module = getattr(function, "__module__", None) or ""
    given = getattr(function, "kwargs", {})  # of `aot_autograd`, the parts of a compiler
    return module.partition(".")[0] == "torch" and _are_in_torch(given)


def _are_in_torch(given: Any) -> bool:
    """Whether torch defines all callables in some data."""
    return all(map(is_in_torch, _callables(given)))


def _callables(given: Any) -> Iterator[Any]:
    if isinstance(given, Mapping):
        given = tuple(given.values())
    if isinstance(given, (list, tuple, set, frozenset)):
        for one in given:
            yield from _callables(one)
    elif callable(given):
        yield given
