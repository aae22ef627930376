"""State that the forward changes in Python is found wherever the forward reaches, and named."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import types

import pytest
import torch
from checks import assert_same, capture, check, normal, normals, refusal
from torch import nn

import offload
from offload.program import Role


@dataclasses.dataclass
class Cache:
    keys: torch.Tensor
    n_calls: int = 0


@dataclasses.dataclass(slots=True)
class Slotted:
    n_calls: int = 0


class Stateful(nn.Module):
    """Holds state of many kinds, and changes some of it in its forward."""

    n_of_class = 0

    def __init__(self, change):
        super().__init__()
        self.change = change
        self.step, self.label, self.scale = 0, "", None
        self.history, self.sizes, self.names = [], (1, 2), {"a"}
        self.queue = collections.deque(maxlen=2)
        self.cache = Cache(torch.zeros(2))
        self.slotted = Slotted()
        self.space = types.SimpleNamespace(inner=types.SimpleNamespace(value=1))
        self.layers = {"first": {"keys": torch.zeros(2)}, "second": None}
        self.outside = [nn.Linear(2, 2)]
        self.inside = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def forward(self, x):
        self.change(self, x)
        return x + self.step


def setter(path):
    """A change that assigns to a path of attributes."""
    *owners, name = path.split(".")

    def change(model, x):
        setattr(functools.reduce(getattr, owners, model), name, 5)

    return change


def count_in_class(model, x):
    type(model).n_of_class += 1


CHANGES = {
    "step": (setter("step"), "self.step: 0 became 5"),
    "string": (lambda model, x: setattr(model, "label", "b"), "self.label: '' became 'b'"),
    "none": (lambda model, x: setattr(model, "scale", 1.0), "self.scale: None became 1.0"),
    "new": (setter("fresh"), "self.fresh was added"),
    "deleted": (lambda model, x: delattr(model, "scale"), "self.scale was removed"),
    "list": (lambda model, x: model.history.append(1), "self.history: 0 items became 1"),
    "queue": (lambda model, x: model.queue.append(1), "self.queue: 0 items became 1"),
    "set": (lambda model, x: model.names.add("b"), "self.names"),
    "tuple": (lambda model, x: setattr(model, "sizes", (1, 3)), "self.sizes: a tuple became"),
    "object": (setter("cache.n_calls"), "self.cache.n_calls: 0 became 5"),
    "tensor of an object": (
        lambda model, x: setattr(model.cache, "keys", x * 2),
        "self.cache.keys: a tensor became another",
    ),
    "slots": (setter("slotted.n_calls"), "self.slotted.n_calls: 0 became 5"),
    "object in an object": (setter("space.inner.value"), "self.space.inner.value: 1 became 5"),
    "dict in a dict": (
        lambda model, x: model.layers["first"].update(keys=x * 2),
        "self.layers['first']['keys']: a tensor became another",
    ),
    "dict order": (
        lambda model, x: model.layers.update(first=model.layers.pop("first")),
        "self.layers: its keys changed order",
    ),
    "reshaped": (lambda model, x: model.cache.keys.resize_(1), "cache.keys"),
    "module in a list": (setter("outside"), "self.outside"),
    "attribute of a module in a list": (
        lambda model, x: setattr(model.outside[0], "in_features", 5),
        "self.outside[0].in_features: 2 became 5",
    ),
    "submodule": (
        lambda model, x: setattr(model.inside[1], "inplace", True),
        "self.inside.1.inplace: False became True",
    ),
    "submodule replaced": (
        lambda model, x: setattr(model, "inside", nn.Identity()),
        "self.inside: a Sequential became a Identity",
    ),
    "training": (lambda model, x: model.train(), "self.training: False became True"),
    "class": (count_in_class, "Stateful.n_of_class: 0 became 1"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_attributes(kind):
    change, message = CHANGES[kind]
    try:
        assert message in refusal(Stateful(change).eval(), normal(2))
    finally:
        Stateful.n_of_class = 0


def test_what_grows_with_its_input():
    """As rotary embeddings do: refused at the call that grows it, and recorded after that."""

    class Grows(nn.Module):
        n_cached = 0

        def forward(self, x):
            if x.shape[0] > self.n_cached:
                self.n_cached = x.shape[0]
            return x * self.n_cached

    model = Grows()
    assert "n_cached" in refusal(model, normal(3))
    check(model, *normals(2, 3))


# ---- functions and objects -----------------------------------------------------------------------

total = torch.zeros(2)
n_calls = 0


def test_closed_over_object():
    cache = Cache(torch.zeros(2))

    def function(x):
        cache.keys = cache.keys * 0.5 + x
        return cache.keys * 1

    assert "cache.keys: a tensor became another" in refusal(function, normal(2))


def test_closed_over_variable():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return x * count

    assert "count: 0 became 1" in refusal(function, normal(2))


def assigns_global_inside(x):
    def inner():
        global total  # noqa: PLW0603
        total = total * 0.5 + x
        return total * 1

    return inner()


def counts_in_global(x):
    global n_calls  # noqa: PLW0603
    n_calls += 1
    return x * n_calls


class CallsHelper(nn.Module):
    def forward(self, x):
        return self.helper(x)

    def helper(self, x):
        return counts_in_global(x)


class CallsItself:
    def __init__(self):
        self.weight = torch.ones(2)

    def __call__(self, x):
        self.weight = self.weight + 1
        return x * self.weight

    def method(self, x):
        return self(x)


def counts_in_itself(x):
    counts_in_itself.n_calls += 1
    return x * counts_in_itself.n_calls


counts_in_itself.n_calls = 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: assigns_global_inside, "total: a tensor became another"),
        (lambda: counts_in_global, "n_calls: "),
        (CallsHelper, "n_calls: "),
        (CallsItself, "self.weight: a tensor became another"),
        (lambda: CallsItself().method, "self.weight: a tensor became another"),
        (lambda: counts_in_itself, "n_calls: 0 became 1"),
        (lambda: functools.partial(CallsItself()), "self.weight: a tensor became another"),
        (
            lambda: functools.partial(lambda one, x: one(x), CallsItself()),
            "partial.args[0].weight: a tensor became another",
        ),
    ],
)
def test_functions_and_objects(make, message):
    assert message in refusal(make(), normal(2))


def test_own_generator_seeded_in_the_forward():
    generator = torch.Generator().manual_seed(4)

    def function(x):
        generator.manual_seed(3)
        return x + torch.rand(2, generator=generator)

    assert "generator" in refusal(function, normal(2))


# ---- allowed changes -----------------------------------------------------------------------------

logger = logging.getLogger("offload.tests")


class Ordinary(nn.Module):
    """Assigns unchanged values, fills Python's own caches, and uses containers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.seen_shape, self.options = (1, 2), {"gain": 2.0, "sizes": [1, 2]}

    @functools.cached_property
    def width(self):
        return self.linear.out_features

    @staticmethod
    @functools.lru_cache
    def factor(width):
        return width * 0.5

    def forward(self, x):
        self.seen_shape = tuple(x.shape)
        self.options = {"gain": 1.0 + 1.0, "sizes": list(x.shape)}
        logger.debug("called")
        parts = []
        for part in x.split(1, dim=1):
            parts.append(part * self.options["gain"] * self.factor(self.width))
        return self.linear(torch.cat(parts, dim=1))


def test_ordinary_python_is_recorded():
    check(Ordinary(), *normals(3, 1, 2))


def test_weights_of_held_objects_are_seen_when_they_change():
    """They are held by reference, as parameters are, and have a name."""

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = Cache(torch.ones(2))

        def forward(self, x):
            return x * self.cache.keys

    model, x = Holder(), normal(2)
    captured = capture(model, x)
    assert [value.name for value in captured.program.of_role(Role.WEIGHT)] == ["cache.keys"]
    model.cache.keys.mul_(3)
    assert_same(captured(x), model(x))
    model.cache.keys.data = torch.zeros(2)
    with pytest.raises(offload.BindingError, match=r"cache\.keys"):
        captured(x)
