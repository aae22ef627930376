"""The same Program in float64, the reference for rounding errors."""

from __future__ import annotations

import dataclasses

from offload.program import ITEM_BYTES, Argument, Launch, Program, Symbol, TensorView, Value

_NARROW = ("float32", "bfloat16", "float16")
_WIDE = "float64"


def widened(program: Program) -> Program | None:
    """The Program with float64 in place of each narrower floating-point dtype.

    Returns:
        None if a Value is viewed in several dtypes, so that its bytes matter.
    """
    dtypes = {value.index: value.dtype for value in program.values}
    for launch in program.launches:
        for view in (*launch.views(), *launch.made()):
            if view.dtype != dtypes[view.value]:
                return None
    return dataclasses.replace(
        program,
        values=tuple(_value(value) for value in program.values),
        launches=tuple(_launch(launch) for launch in program.launches),
        inputs=tuple(_view(view) for view in program.inputs),
        results=tuple(
            dataclasses.replace(result, view=_view(result.view)) for result in program.results
        ),
    )


def _value(value: Value) -> Value:
    if value.dtype not in _NARROW:
        return value
    size_bytes = value.size_bytes * ITEM_BYTES[_WIDE] // ITEM_BYTES[value.dtype]
    return dataclasses.replace(value, dtype=_WIDE, size_bytes=size_bytes)


def _view(view: TensorView) -> TensorView:
    if view.dtype not in _NARROW:
        return view
    offset_bytes = view.offset_bytes * ITEM_BYTES[_WIDE] // ITEM_BYTES[view.dtype]
    return dataclasses.replace(view, dtype=_WIDE, offset_bytes=offset_bytes)


def _argument(argument: Argument) -> Argument:
    if isinstance(argument, TensorView):
        return _view(argument)
    if isinstance(argument, Symbol):
        is_narrow = argument.kind == "dtype" and argument.name in _NARROW
        return Symbol("dtype", _WIDE) if is_narrow else argument
    return tuple(_argument(one) for one in argument) if isinstance(argument, tuple) else argument


def _launch(launch: Launch) -> Launch:
    return dataclasses.replace(
        launch,
        arguments=tuple(_argument(one) for one in launch.arguments),
        results=tuple(None if one is None else _view(one) for one in launch.results),
    )
