"""What the command line can diagnose: a trace file, a saved program, a model that code makes."""

from __future__ import annotations

import importlib
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.api.captured import open_file
from offload.console.progress import reporting, stage
from offload.errors import DiagnosisError
from offload.files.tensors import inputs_of, load_tensors
from offload.observe.diagnosis.diagnosis import Diagnosis
from offload.observe.diagnosis.models import diagnose_call, diagnose_saved
from offload.observe.diagnosis.traces import diagnose_trace
from offload.program.structure import unflatten

_EXPECTED = (
    "expected a trace file, a saved program, or package.module:name of a function that returns "
    "(model, args) or (model, args, kwargs)"
)


def diagnose_target(
    target: str, input_file: Path | None = None, *, triton: bool = False
) -> Diagnosis:
    """Diagnose a trace file, a saved program on the inputs of a file, or a model that code makes.

    Args:
        target: the path of a trace or a saved program, or `package.module:name` of a function
            that returns the model and its arguments; it is called under `torch.no_grad()`.
        input_file: for a saved program, the safetensors file with its inputs.
        triton: whether a saved program may hold sources of Triton kernels, as in `offload.open`.

    Raises:
        DiagnosisError: it is something else, inputs were given without a saved program, or making
            or calling the model raised an error.
        FileError: a file cannot be read in its format.
        BindingError: the inputs do not fit the saved program.
    """
    path = Path(target)
    if path.is_file() and (path.suffix == ".offload" or zipfile.is_zipfile(path)):
        return _diagnose_file(path, input_file, triton=triton)
    if input_file is not None:
        raise DiagnosisError(f"{target}: inputs can be given for a saved program only")
    if path.is_file():
        return diagnose_trace(path)
    with torch.no_grad():
        model, args, kwargs = _make_model(target)
        try:
            model(*args, **kwargs)
        except Exception as error:
            raise DiagnosisError(
                f"{target}: calling the model raised {type(error).__name__}: {error}"
            ) from error
        return diagnose_call(model, args, kwargs, subject=target)


def _diagnose_file(path: Path, input_file: Path | None, *, triton: bool) -> Diagnosis:
    captured = open_file(path, triton=triton)
    program = captured.program
    tensors = inputs_of(program, {} if input_file is None else load_tensors(input_file))
    args, kwargs = unflatten(captured.bound.arguments_structure, tensors)
    return diagnose_saved(captured, args, kwargs, subject=str(path))


def _make_model(
    target: str,
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise DiagnosisError(f"{target}: there is no such file; {_EXPECTED}")
    try:
        with reporting(after_s=0), stage("making the model"):
            factory = getattr(importlib.import_module(module_name), name)
            made = factory()
    except Exception as error:
        raise DiagnosisError(
            f"{target}: making the model raised {type(error).__name__}: {error}; {_EXPECTED}"
        ) from error
    match made:
        case (model, tuple() as args):
            return model, args, {}
        case (model, tuple() as args, dict() as kwargs):
            return model, args, kwargs
    raise DiagnosisError(
        f"{target} returned a {type(made).__qualname__} with other items; {_EXPECTED}, with args "
        "a tuple and kwargs a dict"
    )
