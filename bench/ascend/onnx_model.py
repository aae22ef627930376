"""A model of one operator in ONNX's format, without its library: fields of protocol buffers.

Numbers of fields: onnx.proto of ONNX, messages ModelProto, GraphProto, NodeProto, ValueInfoProto,
TypeProto and TensorShapeProto.
"""

from __future__ import annotations

_FLOAT = 1
_IR_VERSION, _OPERATOR_SET = 8, 13


def _number(value: int) -> bytes:
    content = bytearray()
    while value > 0x7F:
        content.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*content, value])


def _field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _number(number << 3) + _number(value)
    content = value.encode() if isinstance(value, str) else value
    return _number(number << 3 | 2) + _number(len(content)) + content


def _tensor(name: str, count: int) -> bytes:
    shape = _field(1, _field(1, count))
    kind = _field(1, _FLOAT) + _field(2, shape)
    return _field(1, name) + _field(2, _field(1, kind))


def relu_model(count: int) -> bytes:
    """Return a model y = relu(x) for this many floats."""
    node = _field(1, "x") + _field(2, "y") + _field(3, "relu") + _field(4, "Relu")
    graph = _field(1, node) + _field(2, "graph")
    graph += _field(11, _tensor("x", count)) + _field(12, _tensor("y", count))
    operators = _field(1, "") + _field(2, _OPERATOR_SET)
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, operators)
