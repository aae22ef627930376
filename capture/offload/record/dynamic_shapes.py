"""`dynamic_shapes=`: which sizes of a call's arguments may vary, as torch.export takes it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.errors import CaptureError
from offload.program.family import Dim, SizePlace
from offload.program.structure import Structure
from offload.record.call_arguments import CallArguments
from offload.record.callables import signature_of

DynamicShapes = Mapping[str, Any] | Sequence[Any]
"""Entries by parameter name, or in the order of positional arguments. For a tensor a mapping of
axes to Dims, or a Dim or None for each axis; for an integer a Dim; for a container an entry for
each item; None where nothing varies."""


@dataclasses.dataclass(frozen=True, slots=True)
class VaryingSizes:
    """Which sizes of one call may vary.

    Attributes:
        dims: the sizes that vary, with their values in the call.
        places: where the call gives them.
        axes: for each input, in order, the axes that vary, each with the position of its Dim.
    """

    dims: tuple[Dim, ...]
    places: tuple[SizePlace, ...]
    axes: tuple[Mapping[int, int], ...]


def varying_sizes(
    function: Callable[..., Any],
    dynamic_shapes: DynamicShapes,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> VaryingSizes:
    """Find the Dims in the arguments of a call.

    Args:
        function: what is called.
        dynamic_shapes: as `capture` takes it.
        args: of the call.
        kwargs: likewise.

    Raises:
        CaptureError: an entry fits no argument, is no Dim, or contradicts another entry about the
            same Dim; or nothing varies.
    """
    arguments = CallArguments(args, dict(kwargs))
    finding = _Finding(arguments.tensors)
    for name, structure, spec in _parts(function, dynamic_shapes, arguments.live):
        finding.look(structure, spec, f"dynamic_shapes[{name!r}]")
    if not finding.dims:
        raise CaptureError(
            "dynamic_shapes names no Dim: give torch.export.Dim objects, or leave it out"
        )
    axes: list[dict[int, int]] = [{} for _ in arguments.tensors]
    for place in finding.places:
        if place.leaf >= 0:
            axes[place.leaf][place.axis] = place.dim
    return VaryingSizes(tuple(finding.dims), tuple(finding.places), tuple(axes))


def _parts(
    function: Callable[..., Any], dynamic_shapes: DynamicShapes, arguments: Structure
) -> Iterator[tuple[Any, Structure, Any]]:
    """Yield each argument in order with its entry; an argument without a name has its number."""
    positional, named = arguments.children
    names = _names(function, len(positional.children))
    every = [*zip(names, positional.children, strict=True)]
    every += [*zip(named.keys, named.children, strict=True)]
    if isinstance(dynamic_shapes, Mapping):
        said = dict(dynamic_shapes)
        said.update(_of_rest(function, said, names))
        known = {name for name, _ in every}
        if unknown := sorted(str(one) for one in said if one not in known):
            raise CaptureError(
                f"dynamic_shapes names {', '.join(unknown)}, and the call gives "
                f"{', '.join(str(one) for one in known)}: name the parameters that are given"
            )
        yield from ((name, one, said.get(name)) for name, one in every)
        return
    if isinstance(dynamic_shapes, str) or not isinstance(dynamic_shapes, Sequence):
        raise CaptureError(
            "dynamic_shapes: expected a mapping by parameter name, or a tuple for each argument, "
            f"got {dynamic_shapes!r}"
        )
    if len(dynamic_shapes) != len(every):
        raise CaptureError(
            f"dynamic_shapes has {len(dynamic_shapes)} items, and the call gives {len(every)} "
            "arguments: expected one for each, None for what does not vary"
        )
    yield from ((name, one, dynamic_shapes[at]) for at, (name, one) in enumerate(every))


def _names(function: Callable[..., Any], n_positional: int) -> list[Any]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names: list[Any] = [one.name for one in signature_of(function) if one.kind in kinds]
    return [*names[:n_positional], *range(len(names), n_positional)]


def _of_rest(
    function: Callable[..., Any], said: dict[str, Any], names: Sequence[Any]
) -> dict[Any, Any]:
    """The entries given for `*args` under its name, by argument number."""
    kind = inspect.Parameter.VAR_POSITIONAL
    rest = next((one.name for one in signature_of(function) if one.kind is kind), None)
    if rest not in said:
        return {}
    of_rest = said.pop(rest)
    numbers = [one for one in names if isinstance(one, int)]
    if not isinstance(of_rest, Sequence) or len(of_rest) != len(numbers):
        raise CaptureError(
            f"dynamic_shapes[{rest!r}]: expected a tuple of {len(numbers)}, one for each argument, "
            f"got {of_rest!r}"
        )
    return dict(zip(numbers, of_rest, strict=True))


class _Finding:
    """The Dims found so far, and their places."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.dims: list[Dim] = []
        self.places: list[SizePlace] = []
        self._tensors = tensors
        self._n_constants = 0

    def look(self, structure: Structure, spec: Any, where: str) -> None:
        """Collect the Dims of an argument or of a part of it."""
        if structure.kind == "tensor":
            for axis, dim in self._axes(structure.leaf, spec, where):
                size = self._tensors[structure.leaf].shape[axis]
                position = self._note(dim, int(size), f"{where}[{axis}]")
                self.places.append(SizePlace(position, leaf=structure.leaf, axis=axis))
        elif structure.kind == "constant":
            self._constant(structure.constant, spec, where)
        else:
            for key, child, said in _children(structure, spec, where):
                self.look(child, said, f"{where}[{key!r}]")

    def _constant(self, constant: Any, spec: Any, where: str) -> None:
        place, self._n_constants = self._n_constants, self._n_constants + 1
        if spec is None:
            return
        if type(constant) is not int:
            raise CaptureError(
                f"{where}: expected None for a {type(constant).__qualname__}, got {spec!r}: only "
                "sizes of tensors and integers may vary"
            )
        self.places.append(SizePlace(self._note(spec, constant, where), constant=place))

    def _axes(self, leaf: int, spec: Any, where: str) -> Iterator[tuple[int, Any]]:
        n_axes = self._tensors[leaf].dim()
        if spec is None:
            return
        if isinstance(spec, Mapping):
            pairs = list(spec.items())
        elif isinstance(spec, Sequence) and not isinstance(spec, str) and len(spec) == n_axes:
            pairs = list(enumerate(spec))
        else:
            raise CaptureError(
                f"{where}: expected a mapping of axes to Dims, or one for each of the {n_axes} "
                f"axes, got {spec!r}"
            )
        for axis, dim in pairs:
            if not isinstance(axis, int) or not -n_axes <= axis < n_axes:
                raise CaptureError(
                    f"{where}: {axis!r} is not one of the {n_axes} axes of the tensor"
                )
            if isinstance(dim, int) and not isinstance(dim, bool):
                if dim != self._tensors[leaf].shape[axis]:
                    raise CaptureError(
                        f"{where}[{axis}] is {dim}, and the tensor's size there is "
                        f"{self._tensors[leaf].shape[axis]}"
                    )
            elif dim is not None:
                yield axis % n_axes, dim

    def _note(self, dim: Any, size: int, where: str) -> int:
        """Return the position of a Dim, which must agree with earlier occurrences.

        Raises:
            CaptureError: it is no Dim, or has another range or size than before.
        """
        found = _dim(dim, size, where)
        for position, other in enumerate(self.dims):
            if other.name == found.name:
                if other != found:
                    raise CaptureError(
                        f"{where} is {found}, and before it was {other}: one Dim has one range, "
                        "and one size in a call"
                    )
                return position
        if not found.minimum <= size or (found.maximum is not None and size > found.maximum):
            raise CaptureError(f"{where}: expected {found.name} in its range, got {found}")
        self.dims.append(found)
        return len(self.dims) - 1


def _children(structure: Structure, spec: Any, where: str) -> Iterator[tuple[Any, Structure, Any]]:
    """Yield the items of a container, with their entries."""
    keys: Sequence[Any] = structure.keys or range(len(structure.children))
    if spec is None:
        said: Mapping[Any, Any] = {}
    elif isinstance(spec, Mapping):
        said = spec
    elif isinstance(spec, Sequence) and len(spec) == len(keys):
        said = dict(zip(keys, spec, strict=True))
    else:
        raise CaptureError(
            f"{where}: expected one item for each of the {len(keys)} of the "
            f"{structure.type_name or structure.kind}, got {spec!r}"
        )
    if unknown := [one for one in said if one not in keys]:
        raise CaptureError(f"{where} has no {unknown[0]!r}: it has {list(keys)}")
    for key, child in zip(keys, structure.children, strict=True):
        yield key, child, said.get(key)


def _dim(dim: Any, size: int, where: str) -> Dim:
    """The Dim that a torch.export.Dim describes, without importing torch.export."""
    kind = type(dim)
    if kind.__module__ != "torch.export.dynamic_shapes" or kind.__name__ != "Dim":
        raise CaptureError(
            f"{where}: expected a torch.export.Dim with a name and a range of its own, or None, "
            f"got {dim!r}"
        )
    maximum = int(dim.max) if isinstance(dim.max, int) else None
    return Dim(dim.__name__, int(dim.min), maximum, size)
