"""Arguments of a captured call: by position or keyword, nested, constant, changed in Python."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math

import pytest
import torch
from checks import Call, Point, assert_same, capture, check, normal, refusal
from torch import nn

import offload


def weighted(a, b, scale=2.0, *, bias=None):
    result = a * scale - b
    return result if bias is None else result + bias


@pytest.mark.parametrize("recorded", ["positional", "mixed", "keyword"])
@pytest.mark.parametrize("replayed", ["positional", "mixed", "keyword"])
def test_positional_and_keyword_arguments(recorded, replayed):
    forms = {
        "positional": lambda a, b, c: Call(a, b, 3.0, bias=c),
        "mixed": lambda a, b, c: Call(a, scale=3.0, bias=c, b=b),
        "keyword": lambda a, b, c: Call(bias=c, b=b, a=a, scale=3.0),
    }
    tensors = [normal(3) for _ in range(6)]
    run = check(weighted, forms[recorded](*tensors[:3]))
    call = forms[replayed](*tensors[3:])
    assert_same(call.on(run), call.on(weighted))


class Optional(nn.Module):
    def forward(self, x, mask=None, flags=(1, "two", None)):
        assert flags == (1, "two", None)
        return x if mask is None else x * mask


def test_none_and_scalar_arguments():
    check(Optional(), Call(normal(3), None), Call(normal(3), None))
    check(Optional(), Call(normal(3), mask=normal(3)), Call(normal(3), mask=normal(3)))
    check(Optional(), Call(normal(3), None, flags=(1, "two", None)))


def test_nested_arguments():
    def function(batch, *rest, options):
        images, (first, second) = batch["images"], batch["pair"]
        return images[0] + images[1] * first - second + rest[0][0] * options["gain"]["value"]

    def call():
        batch = {"images": [normal(2), normal(2)], "pair": (normal(2), normal(2)), "none": None}
        return Call(batch, [normal(2)], options={"gain": {"value": normal(2)}, "depth": 3})

    check(function, call(), call())


def test_dict_in_another_order():
    """The model may iterate over it."""

    def function(batch):
        return torch.cat(list(batch.values()))

    captured = capture(function, {"a": normal(2), "b": normal(2)})
    a, b = normal(2), normal(2)
    assert torch.equal(captured({"a": a, "b": b}), torch.cat([a, b]))
    with pytest.raises(offload.BindingError, match="order"):
        captured({"b": b, "a": a})


def reads_in_order(first, *, scale, **rest):
    return torch.cat([first * scale, *rest.values()])


@pytest.mark.parametrize("saved", [False, True])
def test_own_keywords_keep_their_order(saved, tmp_path):
    """The model sees the order of its own **kwargs; named parameters have no order."""
    captured = capture(reads_in_order, normal(2), scale=normal(2), a=normal(2), b=normal(2))
    if saved:
        captured.save(tmp_path / "own.offload")
        captured = offload.open(tmp_path / "own.offload")
    tensors = {"first": normal(2), "scale": normal(2), "a": normal(2), "b": normal(2)}
    expected = reads_in_order(**tensors)
    for order in (["first", "scale", "a", "b"], ["a", "scale", "b", "first"]):
        assert torch.equal(captured(**{name: tensors[name] for name in order}), expected)
    with pytest.raises(offload.BindingError, match=r"\['a', 'b'\]"):
        captured(**{name: tensors[name] for name in ("first", "scale", "b", "a")})


class Scale:
    def __init__(self, factor):
        self.factor = factor


class Shift(Scale):
    pass


def test_another_class_of_argument():
    def function(x, change):
        return x + change.factor if isinstance(change, Shift) else x * change.factor

    captured = capture(function, normal(2), Scale(normal(2)))
    with pytest.raises(offload.BindingError, match=r"args\[1\]: .*Scale.* got .*Shift"):
        captured(normal(2), Shift(normal(2)))


class Items(list):
    pass


def test_a_list_class_in_the_result():
    captured = capture(lambda x: Items([x * 2]), normal(2))
    assert type(captured(normal(2))) is Items


def test_an_argument_that_was_left_at_its_default():
    def function(x, scale=2.0, *, mask=None):
        return x * scale

    run = capture(function, normal(2))
    for call, name in (
        (Call(normal(2), 2.0), "scale"),
        (Call(normal(2), scale=2.0), "scale"),
        (Call(normal(2), mask=None), "mask"),
    ):
        with pytest.raises(offload.BindingError, match=f"{name}: .*leave it out"):
            call.on(run)
    run = capture(function, normal(2), 2.0, mask=None)
    with pytest.raises(offload.BindingError, match=r"mask is missing.*pass it"):
        run(normal(2), 2.0)
    with pytest.raises(offload.BindingError, match="scale is missing"):
        run(normal(2), mask=None)


@dataclasses.dataclass
class Batch:
    data: torch.Tensor
    label: str = "train"


def test_records_and_objects_as_arguments():
    def function(point, batch):
        return point.x * batch.data + point.y

    check(
        function,
        Call(Point(normal(2), normal(2)), Batch(normal(2))),
        Call(Point(normal(2), normal(2)), Batch(normal(2))),
    )


def test_input_requires_grad():
    x = normal(3).requires_grad_()
    with torch.no_grad():
        captured = capture(lambda x: (x * 2, x), normal(3).requires_grad_())
        doubled, same = captured(x)
    assert torch.equal(doubled, x.detach() * 2)
    assert not doubled.requires_grad
    assert same is x


def test_operators_are_chosen_as_for_the_argument_itself():
    """`matmul` folds a batch, or not, depending on whether an operand requires gradients."""
    x, weight = normal(5, 2, 8).transpose(0, 1), normal(8, 8)
    check(nn.functional.linear, Call(x, weight, normal(8)))
    with torch.no_grad():
        check(nn.functional.linear, Call(x, weight.requires_grad_(), normal(8)))
        lean, folded = (
            [launch.name for launch in capture(nn.functional.linear, x, one).program.launches]
            for one in (weight.detach(), weight)
        )
    assert lean != folded


KINDS = {
    "requires_grad": (lambda x: x.requires_grad, lambda: normal(3).requires_grad_()),
    "leaf": (lambda x: x.is_leaf, lambda: normal(3).requires_grad_()),
    "Parameter": (lambda x: isinstance(x, nn.Parameter), lambda: nn.Parameter(normal(3))),
    "frozen": (lambda x: x.requires_grad, lambda: nn.Parameter(normal(3), False)),
    "Buffer": (lambda x: isinstance(x, nn.Buffer), lambda: nn.Buffer(normal(3))),
    "plain": (lambda x: isinstance(x, nn.Parameter) or x.requires_grad, lambda: normal(3)),
    "integers": (lambda x: x.requires_grad, lambda: torch.arange(3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_branches_on_what_an_argument_is(kind):
    """The recorded call takes the branch that eager takes."""
    is_kind, make = KINDS[kind]

    def function(x):
        return x * 2 if is_kind(x) else x * 3

    x = make()
    with torch.no_grad(), offload.capture(function) as captured:
        recorded = captured(x)
        assert_same(recorded, function(x))
    with torch.no_grad():
        assert_same(captured(x), recorded)


@pytest.mark.parametrize(
    "make", [normal, lambda n: normal(n).requires_grad_(), lambda n: nn.Parameter(normal(n))]
)
def test_arguments_written_in_place_through_views(make):
    def function(x):
        return x[1:].mul_(2), x.data, x

    x, y = make(3), make(3)
    doubled = [one.detach() * torch.tensor([1.0, 2.0, 2.0]) for one in (x, y)]
    with torch.no_grad(), offload.capture(function) as captured:
        recorded = captured(x)
    with torch.no_grad():
        replayed = captured(y)
    for given, got, expected in ((x, recorded, doubled[0]), (y, replayed, doubled[1])):
        assert torch.equal(got[0], expected[1:])
        assert torch.equal(got[1], expected)
        assert got[2] is given
        assert torch.equal(given.detach(), expected)
        assert all(one.grad_fn is None and not one.requires_grad for one in got[:2])
        assert got[0].data_ptr() == given[1:].data_ptr()


def test_attributes_on_tensors():
    """A twin would lack them, and the next tensor may have others."""
    x = normal(2)
    x.scale = 5.0
    message = refusal(lambda x: x * getattr(x, "scale", 1.0), x)
    assert "args[0]" in message
    assert "scale" in message
    capture(lambda x: x * 2, x.detach())


@pytest.mark.parametrize(
    ("recorded", "other"),
    [
        (2.0, 3.0),
        (1, True),
        (0.0, -0.0),
        ("a", "b"),
        (None, 1.0),
        ([1, 2], [1, 3]),
        ([0.0], [-0.0]),
    ],
    ids=str,
)
def test_another_constant_is_refused(recorded, other):
    def function(x, constant):
        return x

    captured = capture(function, normal(2), recorded)
    captured(normal(2), recorded)
    with pytest.raises(offload.BindingError):
        captured(normal(2), other)


def test_nan_is_the_same_constant():
    captured = capture(lambda x, pad: x, normal(2), math.nan)
    captured(normal(2), float("nan"))


@dataclasses.dataclass(slots=True)
class Slotted:
    tensor: torch.Tensor


OPAQUE = {
    "deque": lambda x: collections.deque([x]),
    "set": lambda x: {x},
    "slots": Slotted,
    "iterator": lambda x: iter([x]),
    "closure": lambda x: lambda: x,
    "partial": lambda x: functools.partial(torch.add, x),
    "dict key": lambda x: {x: 1},
}


@pytest.mark.parametrize("kind", OPAQUE)
def test_tensors_hidden_in_results(kind):
    """A replay could only return the recorded tensor again."""
    message = refusal(lambda x: OPAQUE[kind](x * 2), torch.ones(2))
    assert "tensor" in message
    assert "result" in message


@pytest.mark.parametrize("kind", ["deque", "slots"])
def test_tensors_hidden_in_arguments(kind):
    """The same object may hold another tensor at the next call."""
    message = refusal(lambda x, holder: x * 2, torch.ones(2), OPAQUE[kind](torch.ones(2)))
    assert "holds a tensor" in message


def mutate_list(x, items):
    items.append(x * 2)
    return x


def mutate_dict(x, items):
    items["new"] = x * 2
    return x


def replace_in_dict(x, items):
    items["old"] = x * 2
    return x


def replace_attribute(x, batch):
    batch.data = batch.data + x
    return x


@pytest.mark.parametrize(
    ("function", "container"),
    [
        (mutate_list, list),
        (mutate_dict, dict),
        (replace_in_dict, lambda: {"old": torch.ones(2)}),
        (replace_attribute, lambda: Batch(torch.ones(2))),
    ],
)
def test_changed_containers_are_refused(function, container):
    """Changes of an argument in Python would not happen at a replay."""
    assert "argument" in refusal(function, normal(2), container()) or "args" in refusal(
        function, normal(2), container()
    )
