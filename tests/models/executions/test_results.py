"""Results of a captured call: nested, aliases of arguments, weights and each other, or fresh."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from checks import Call, Point, Weights, capture, check, normal, normals


def test_nested_results():
    def function(x):
        doubled = x * 2
        return {"a": [doubled, None, 3], "b": (Point(x.sin(), x.cos()), "text")}

    check(function, *normals(2, 3))


def test_named_results_of_torch():
    check(lambda x: x.max(dim=0), *normals(2, 3, 4))
    check(torch.linalg.slogdet, *normals(2, 3, 3))


def test_no_tensor_in_the_result():
    check(lambda x: None, *normals(2, 3))
    check(lambda x: {"n": x.shape[0]}, *normals(2, 3))


def whole_and_parts(x):
    return x, x[0], x[1:]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x,
        lambda x, y: y,
        lambda x, y: (y, x, y),
        lambda x, y: (x, x * 1),
        lambda x, y: x[1:],
        lambda x, y: (x.t(), x.view(-1), y[0]),
        lambda x, y: x.detach(),
        lambda x, y: x.view_as(x),
        lambda x, y: x.expand(2, 3, 4),
        lambda x, y: (x + y).t(),
        lambda x, y: [(x + y)] * 3,
        lambda x, y: whole_and_parts(x + y),
        lambda x, y: whole_and_parts(x + y)[1:],
    ],
    ids=lambda function: None,
)
def test_results_that_alias(function):
    check(function, Call(normal(3, 4), normal(3, 4)), Call(normal(3, 4), normal(3, 4)))


def test_results_that_are_weights():
    model = Weights()
    run = check(model, *normals(2, 2))
    _, weight, transposed, steps, all_steps = run(normal(2))
    assert weight.data_ptr() == transposed.data_ptr() == model.weight.data_ptr()
    assert steps.data_ptr() == model.steps.data_ptr() + 4
    assert all_steps.data_ptr() == model.steps.data_ptr()
    assert not weight.requires_grad


def test_same_tensor_twice_is_one_object():
    def function(x):
        y = x * 2
        return [y, y, {"y": y}]

    run = check(function, *normals(2, 3))
    one, other, named = run(normal(3))
    assert one is other
    assert named["y"] is one


def test_each_replay_has_its_own_results():
    captured = capture(lambda x: (x * 2).sin(), normal(64))
    inputs = [normal(64) for _ in range(4)]
    results = [captured(one) for one in inputs]
    assert all(torch.equal(got, (one * 2).sin()) for got, one in zip(results, inputs, strict=True))


def test_results_can_be_used_like_any_tensor():
    captured = capture(lambda x: x * 2, normal(3))
    result = captured(normal(3))
    weight = normal(3).requires_grad_()
    (result * weight).sum().backward()
    assert torch.equal(weight.grad, result)
    result.resize_(5)
    assert result.is_leaf


def test_model_output():
    transformers = pytest.importorskip("transformers", reason="ModelOutput is its class")

    @dataclasses.dataclass
    class Output(transformers.utils.ModelOutput):
        logits: torch.Tensor | None = None
        hidden: tuple | None = None
        loss: torch.Tensor | None = None

    def function(x):
        return Output(logits=x * 2, hidden=(x, x + 1))

    run = check(function, *normals(2, 3))
    output = run(normal(3))
    assert output.loss is None
    assert output[0] is output.logits is output["logits"]


def test_caches_flattened_into_tensors():
    """A static cache among the arguments is written in place; each replay may have another."""
    transformers = pytest.importorskip("transformers", reason="the caches are its classes")
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, use_cache=True
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = [torch.randint(0, 32, (1, 6)) for _ in range(3)]
    check(model, *(Call(one) for one in tokens), tolerance=1e-5, shares=False)
