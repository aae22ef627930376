"""Offline models on an Ascend device: one launch, whose data buffers are re-addressed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from offload.backends.base import Capabilities
from offload.backends.loaded import LaunchReport, Loaded, Prepared, Streams
from offload.errors import BackendUnavailable, CaptureError
from offload.native import _native
from offload.plan import Plan, SlotKind, check_plan
from offload.plan.topology import Machine
from offload.program import (
    ITEM_BYTES,
    BoundProgram,
    Launch,
    Operator,
    Program,
    Result,
    Role,
    TensorView,
    Value,
    plain_structure,
)
from offload.program.structure import flatten

if TYPE_CHECKING:
    from offload.backends.ascend.backend import AscendBackend

OFFLINE_OPERATOR = "offload::offline_model"
"""The operator of an offline model's only launch; torch has no operator of this name."""

# aclDataType, for the dtypes that torch has.
_DTYPES = {
    0: "float32", 1: "float16", 2: "int8", 3: "int32", 4: "uint8", 6: "int16", 7: "uint16",
    8: "uint32", 9: "int64", 10: "uint64", 11: "float64", 12: "bool", 16: "complex64",
    17: "complex128", 27: "bfloat16", 33: "complex32", 35: "float8_e5m2", 36: "float8_e4m3fn",
}  # fmt: skip

# aclFormat of memory in the order of its shape: NCHW, NHWC, ND, HWCN, NDHWC, NCDHW, NC, NCL.
_PLAIN_FORMATS = {0, 1, 2, 16, 27, 30, 35, 47}


class OfflineModelBackend:
    """The backend of one loaded offline model. Its feature map stays where it was loaded."""

    capabilities = Capabilities(moves_feature_map=False, queues_work=True)
    opaque = weights = timing = offline = sizes = lanes = dispatch = None

    def __init__(self, backend: AscendBackend, model: _native.AscendOfflineModel) -> None:
        self.name = backend.name
        self._backend = backend
        self._model = model

    def machine(self, index: int | None = None) -> Machine:
        """Return the machine of the backend that loaded it."""
        return self._backend.device_machine(index)

    def records(self) -> str:
        """Nothing is recorded for it."""
        return self._backend.records()

    def prepare(self, bound: BoundProgram) -> Prepared:
        """Return the Program that `AscendOfflineLoader` made."""
        return Prepared(bound)

    def instantiate(self, prepared: Prepared, plan: Plan) -> Loaded:
        """Return the model already loaded; each input's and output's slot is one data buffer.

        Raises:
            PlanError: the Plan does not fit the Program.
        """
        program = prepared.program
        check_plan(program, plan)
        # The model's words are its slots, in the order of Plans.
        kinds = [slot.kind for slot in plan.slots]
        n_buffers = len(self._model.inputs) + len(self._model.outputs)
        assert all(kind in (SlotKind.INPUT, SlotKind.OUTPUT) for kind in kinds[:n_buffers])
        index = program.device_index or 0
        reports = (LaunchReport("model", 0),)
        return Loaded(
            self._model,
            frozenset(),
            lambda: reports,
            device=self._backend.tensor_device(index),
            alignment_bytes=self._backend.tensor_alignment_bytes,
            notes=self._notes,
            streams=Streams(self._backend.current_stream),
        )

    def _notes(self) -> tuple[str, ...]:
        model = self._model
        return (
            f"an offline model: its feature map ({model.work_bytes} bytes) lies where it was "
            f"loaded, its weights take {model.weight_bytes} bytes",
            f"data buffers given another address so far: {model.n_updates}",
            "streams: the runtime does not report how many an offline model uses",
        )

    def prove(self, prepared: Prepared, plan: Plan) -> None:
        """Do nothing: the runtime itself sets a model's addresses."""


class AscendOfflineLoader:
    """Loads offline models for the device of a backend; see `OfflineLoader`."""

    def __init__(self, backend: AscendBackend) -> None:
        self._backend = backend

    def open(self, path: Path, index: int | None) -> tuple[Prepared, OfflineModelBackend]:
        """Load an offline model, which is its single launch.

        Raises:
            BackendUnavailable, CaptureError, ExecutionError: as `OfflineLoader.open`.
        """
        backend = self._backend
        index = backend.current_device() if index is None else index
        backend.device_machine(index)
        if not _native.ascend_capabilities()["offline_model"]:
            raise BackendUnavailable(
                "the runtime loads no offline models (aclmdlLoadFromFileWithMem): libacl_mdl.so "
                "is missing"
            )
        model = _native.AscendOfflineModel(
            device=index, path=str(path), copies_on_device=backend.copies_on_device
        )
        try:
            program = _program_of(model, path, backend.records(), index)
        except BaseException:
            model.close()
            raise
        return Prepared(BoundProgram(program)), OfflineModelBackend(backend, model)


def _program_of(model: _native.AscendOfflineModel, path: Path, device: str, index: int) -> Program:
    inputs = list(_values(model.inputs, Role.INPUT, path, 0))
    outputs = list(_values(model.outputs, Role.OUTPUT, path, len(inputs)))
    views = {
        one.index: TensorView(one.index, 0, one.shape, one.strides, one.dtype)
        for one in (*inputs, *outputs)
    }
    launch = Launch(
        index=0,
        callee=Operator(OFFLINE_OPERATOR),
        arguments=tuple(views[one.index] for one in inputs),
        results=tuple(views[one.index] for one in outputs),
        reads=tuple(one.index for one in inputs),
        writes=tuple(one.index for one in outputs),
        random=False,
        guard=None,
        guards_shape=False,
        source=str(path),
    )
    call: tuple[tuple[Value, ...], dict[str, Value]] = (tuple(inputs), {})
    return Program(
        device=device,
        device_index=index,
        values=(*inputs, *outputs),
        launches=(launch,),
        inputs=tuple(views[one.index] for one in inputs),
        results=tuple(Result(views[one.index]) for one in outputs),
        arguments_structure=plain_structure(flatten(call, _is_value, share_same=False)[1]),
        result_structure=plain_structure(flatten(tuple(outputs), _is_value, share_same=True)[1]),
        parameter_names=tuple(one.name for one in inputs),
        unchecked=f"it was compiled elsewhere: {path}",
    )


def _is_value(item: object) -> bool:
    return isinstance(item, Value)


def _values(
    tensors: list[tuple[str, int, tuple[int, ...], int, int]], role: Role, path: Path, first: int
) -> Iterator[Value]:
    for place, (name, kind, shape, size_bytes, format_number) in enumerate(tensors):
        dtype = _DTYPES.get(kind)
        if dtype is None:
            raise CaptureError(f"{path}: {role} {name!r} has data type {kind}, which torch lacks")
        if format_number not in _PLAIN_FORMATS:
            raise CaptureError(
                f"{path}: {role} {name!r} has format {format_number}, in which the layout of its "
                "elements does not follow from its shape; compile the model with inputs and "
                "outputs in format ND"
            )
        if math.prod(shape) * ITEM_BYTES[dtype] != size_bytes or min(shape, default=0) < 0:
            raise CaptureError(
                f"{path}: {role} {name!r} of shape {list(shape)} takes {size_bytes} bytes: its "
                "shape is known only at execution, or its format is the device's own; compile "
                "the model for one shape, with inputs and outputs in format ND"
            )
        strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        yield Value(first + place, role, shape, strides, dtype, size_bytes, name)
