"""What an execution refuses, before anything ran; and which memory it uses in place or by copy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload


class Layers(nn.Module):
    """Reads x and mask, writes the history in place; two fresh results and an alias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros(4))

    def forward(self, x, history, *, mask=None):
        hidden = torch.relu(self.first(x))
        history.add_(1)
        self.steps.add_(1)
        scores = self.second(hidden)
        return scores * mask, hidden.sum(-1), history[1:]


@pytest.fixture
def model() -> Layers:
    return Layers().eval()


@pytest.fixture
def run(model: Layers) -> Iterator[offload.Executable]:
    with torch.no_grad(), offload.capture(model) as captured:
        captured(torch.randn(2, 8), torch.zeros(5), mask=torch.ones(2, 4))
    with captured.load() as executable:
        yield executable


@pytest.fixture
def chain() -> Iterator[offload.Executable]:
    """One result, and activations in the feature map."""
    with offload.capture(lambda x: (x * 2 + 1).sin().exp()) as captured:
        captured(torch.randn(64))
    with captured.load() as executable:
        yield executable


def arena(run: offload.Executable, extra: int = 0) -> torch.Tensor:
    return torch.empty(run.feature_map_bytes + extra, dtype=torch.uint8)


def everything(*trees: Any) -> list[torch.Tensor]:
    """All tensors in arguments and buffers, for a comparison before and after."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, dict):
            found += everything(*tree.values())
        elif isinstance(tree, (list, tuple)):
            found += everything(*tree)
    return [one for one in found if one.layout is torch.strided and one.device.type == "cpu"]


@contextlib.contextmanager
def refused(run: offload.Executable, watched: list[torch.Tensor], *parts: str) -> Iterator[None]:
    """A BindingError whose message holds every part, and nothing has changed or run."""
    before = [one.detach().clone() for one in watched]
    versions = [one._version for one in watched]
    weights = [one for held in run.program.weights.values() for one in held]
    weights_before = [one.detach().clone() for one in weights]
    generator = torch.get_rng_state()
    n_executions = run.last_execution.n_executions
    with pytest.raises(offload.BindingError) as caught:
        yield
    message = str(caught.value)
    assert all(part in message for part in parts), message
    assert isinstance(caught.value, ValueError)
    for one, other in zip(watched, before, strict=True):
        assert torch.equal(one.detach(), other)
    for one, other in zip(weights, weights_before, strict=True):
        assert torch.equal(one.detach(), other)
    assert [one._version for one in watched] == versions
    assert torch.equal(torch.get_rng_state(), generator)
    assert run.last_execution.n_executions == n_executions


def calls_of(run: offload.Executable) -> list[Callable[..., Any]]:
    """The synchronous call and the submission check alike."""
    return [run, lambda *args, **kwargs: run.submit(*args, **kwargs).result()]


def good() -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    return (torch.randn(2, 8), torch.zeros(5)), {"mask": torch.ones(2, 4)}


def assert_still_works(model: Layers, run: offload.Executable) -> None:
    """A refused call leaves an executable that computes."""
    args, kwargs = good()
    scores, sums, history = run(*args, **kwargs)
    with torch.no_grad():
        hidden = torch.relu(model.first(args[0]))
        torch.testing.assert_close(scores, model.second(hidden), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(sums, hidden.sum(-1), rtol=1e-6, atol=1e-6)
    assert torch.equal(history, torch.ones(4))


# ---- inputs --------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


def wrapped() -> torch.Tensor:
    return torch.Tensor._make_wrapper_subclass(Subclass, (2, 8))


BAD_INPUTS = {
    "shape": (lambda: torch.randn(3, 8), ["args[0]", "[2, 8]", "[3, 8]"]),
    "dimensions": (lambda: torch.randn(2, 8, 1), ["args[0]", "[2, 8]", "[2, 8, 1]"]),
    "empty": (lambda: torch.randn(0, 8), ["args[0]", "[2, 8]", "[0, 8]"]),
    "dtype": (lambda: torch.randn(2, 8).double(), ["args[0]", "Float", "Double"]),
    "integer": (lambda: torch.zeros(2, 8, dtype=torch.int32), ["args[0]", "Float", "Int"]),
    "meta": (lambda: torch.empty(2, 8, device="meta"), ["args[0]", "cpu", "meta"]),
    "sparse": (lambda: torch.randn(2, 8).to_sparse(), ["args[0]", "strided", "sparse"]),
    "csr": (lambda: csr(torch.randn(2, 8)), ["args[0]", "strided"]),
    "subclass": (wrapped, ["args[0]", "subclass"]),
    "number": (lambda: 3.0, ["[0]", "expected a tensor", "3.0"]),
    "nothing": (lambda: None, ["[0]", "expected a tensor", "None"]),
    "list": (lambda: [torch.randn(2, 8)], ["[0]", "expected a tensor", "list"]),
}


def csr(tensor: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.to_sparse_csr()


@pytest.mark.parametrize("kind", BAD_INPUTS)
def test_inputs_of_another_kind(model, run, kind):
    make, parts = BAD_INPUTS[kind]
    for call in calls_of(run):
        args, kwargs = good()
        bad = make()
        with refused(run, everything(args, kwargs), *parts):
            call(bad, args[1], **kwargs)
    assert_still_works(model, run)


def test_keyword_inputs_are_named(model, run):
    args, kwargs = good()
    with refused(run, everything(args, kwargs), "kwargs['mask']", "[2, 4]", "[4]"):
        run(*args, mask=torch.ones(4))
    with refused(run, everything(args, kwargs), "mask"):
        run(*args, mask=None)
    assert_still_works(model, run)


OTHER_ARGUMENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "none": (lambda args, kwargs: ((), kwargs), "argument"),
    "one of two": (lambda args, kwargs: (args[:1], kwargs), "argument"),
    "one more": (lambda args, kwargs: ((*args, torch.zeros(1)), kwargs), "argument"),
    "one more that is None": (lambda args, kwargs: ((*args, None), kwargs), "argument"),
    "no keyword": (lambda args, kwargs: (args, {}), "argument"),
    "unknown keyword": (lambda args, kwargs: (args, {**kwargs, "other": args[0]}), "argument"),
    "misspelt keyword": (lambda args, kwargs: (args, {"masks": kwargs["mask"]}), "argument"),
    "nested": (lambda args, kwargs: ([args], kwargs), "argument"),
    "given twice": (lambda args, kwargs: (args, {**kwargs, "x": args[0]}), "x was given"),
    "given twice, one missing": (
        lambda args, kwargs: (args[:1], {**kwargs, "x": args[0]}),
        "x was given",
    ),
}


@pytest.mark.parametrize("kind", OTHER_ARGUMENTS)
def test_number_and_structure_of_arguments(model, run, kind):
    change, part = OTHER_ARGUMENTS[kind]
    for call in calls_of(run):
        args, kwargs = good()
        bad_args, bad_kwargs = change(args, kwargs)
        with refused(run, everything(args, kwargs), part):
            call(*bad_args, **bad_kwargs)
    assert_still_works(model, run)


def test_argument_given_by_position_and_keyword():
    """Recorded by keyword, `a` may come by position, but not both."""
    with offload.capture(lambda a, b: a * 2 + b) as captured:
        captured(a=torch.ones(2), b=torch.ones(2))
    run = captured.load()
    a, b = torch.randn(2), torch.randn(2)
    assert torch.equal(run(a, b), a * 2 + b)
    with refused(run, [a, b], "a was given"):
        run(a, b, a=a)
    with refused(run, [a, b], "a was given"):
        run(a, a=b, b=b)


def test_nested_structure():
    with offload.capture(lambda batch: batch["pair"][0] + batch["pair"][1]) as captured:
        captured({"pair": [torch.ones(2), torch.ones(2)]})
    run = captured.load()
    one = torch.ones(2)
    for bad, part in [
        ({"pair": [one]}, "list of 1"),
        ({"pair": (one, one)}, "tuple"),
        ({"pair": [one, one], "more": one}, "dict"),
        ({"pairs": [one, one]}, "dict"),
        ([one, one], "list"),
        ({"pair": [one, 1.0]}, "1.0"),
        ({"pair": [one, [one]]}, "list"),
    ]:
        with refused(run, [one], "argument", part):
            run(bad)


def test_structure_error_names_the_place():
    with offload.capture(lambda batch: batch["pair"][0] + batch["pair"][1]) as captured:
        captured({"pair": [torch.ones(2), torch.ones(2)]})
    with pytest.raises(offload.BindingError, match=r"\['pair'\]\[1\].*\[3\]"):
        captured({"pair": [torch.ones(2), torch.ones(3)]})


# ---- overlaps ------------------------------------------------------------------------------------


def shifted(tensor: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of this shape, the second so many elements after the first."""
    base = torch.randn(tensor.numel() + elements)
    return (
        base[: tensor.numel()].view(tensor.shape),
        base[elements : elements + tensor.numel()].view(tensor.shape),
    )


@pytest.fixture
def writer() -> offload.Executable:
    with offload.capture(lambda a, b: a.mul_(2).sum() + b) as captured:
        captured(torch.randn(4), torch.randn(4))
    return captured.load()


@pytest.fixture
def two_results() -> offload.Executable:
    with offload.capture(lambda a, b: (a + b, (a * b).sin())) as captured:
        captured(torch.randn(4), torch.randn(4))
    return captured.load()


@pytest.mark.parametrize("distance", [0, 1, 3])
def test_written_input_that_overlaps_another(writer, distance):
    a, b = shifted(torch.empty(4), distance)
    for call in calls_of(writer):
        with refused(writer, [a, b], "args[0]", "args[1]", "overlap"):
            call(a, b)
    a, b = shifted(torch.empty(4), 4)
    assert torch.equal(writer(a.clone(), b), (a * 2).sum() + b)
    writer(a, b)


def test_inputs_that_are_only_read_may_overlap(two_results):
    a, b = shifted(torch.empty(4), 1)
    assert torch.equal(two_results(a, b)[0], a + b)
    assert torch.equal(two_results(a, a)[1], (a * a).sin())


def test_written_input_that_overlaps_a_weight():
    weight = torch.randn(8)
    with offload.capture(lambda x: x.mul_(2) + weight[:4]) as captured:
        captured(torch.randn(4))
    run = captured.load()
    with refused(run, [weight], "args[0]", "overlap"):
        run(weight[2:6])


def test_input_that_overlaps_a_written_buffer(model, run):
    args, kwargs = good()
    x = model.steps.as_strided((2, 8), (0, 0))
    with refused(run, everything(args, kwargs), "args[0]", "steps", "overlap"):
        run(x, *args[1:], **kwargs)


OVERLAPPING_OUT: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, list[str]]]] = {
    "an input": lambda a, b: ((a, None), ["out[0]", "args[0]"]),
    "the other input": lambda a, b: ((None, b), ["out[1]", "args[1]"]),
    "a part of an input": lambda a, b: (
        (a.as_strided((4,), (0,), 1), None),
        ["out[0]"],
    ),
    "each other": lambda a, b: (shifted(a, 2), ["out[0]", "out[1]"]),
    "the same buffer": lambda a, b: ((torch.zeros(4),) * 2, ["out[0]", "out[1]"]),
    "itself": lambda a, b: ((torch.zeros(1).expand(4), None), ["out[0]"]),
}


@pytest.mark.parametrize("kind", OVERLAPPING_OUT)
def test_out_that_overlaps(two_results, kind):
    for call in calls_of(two_results):
        a, b = torch.randn(5)[1:], torch.randn(4)
        buffers, parts = OVERLAPPING_OUT[kind](a, b)
        with refused(two_results, everything(a, b, buffers), *parts):
            call(a, b, out=buffers)


def test_out_of_another_kind(two_results):
    a, b = torch.randn(4), torch.randn(4)
    fine = torch.zeros(4)
    for bad, parts in [
        ((torch.zeros(5), None), ["out[0]", "[4]", "[5]"]),
        ((None, torch.zeros(4, dtype=torch.float64)), ["out[1]", "Float", "Double"]),
        ((torch.zeros(4, device="meta"), None), ["out[0]", "meta"]),
        ((torch.zeros(4).to_sparse(), None), ["out[0]", "strided"]),
        ((fine,), ["out", "2"]),
        ((fine, fine.clone(), fine.clone()), ["out", "2"]),
        (fine, ["out", "Tensor"]),
        ((fine, 3), ["out[1]", "int"]),
        ({"a": fine}, ["out"]),
    ]:
        with refused(two_results, everything(a, b, bad), *parts):
            two_results(a, b, out=bad)
    got = two_results(a, b, out=(fine, None))
    assert torch.equal(fine, a + b)
    assert got[0] is fine


def test_out_for_a_result_that_is_an_alias(model, run):
    args, kwargs = good()
    buffer = torch.zeros(4)
    with refused(run, everything(args, kwargs, buffer), "out[2]", "args[1]"):
        run(*args, **kwargs, out=(None, None, buffer))
    with offload.capture(lambda x: (x * 1, model.steps)) as captured:
        captured(torch.randn(2))
    other = captured.load()
    x = torch.randn(2)
    with refused(other, [x, buffer], "out[1]"):
        other(x, out=(None, buffer))


def test_out_that_overlaps_a_weight(model, run):
    args, kwargs = good()
    out = (None, model.first.bias.detach()[:2], None)
    with refused(run, everything(args, kwargs), "out[1]", "first.bias"):
        run(*args, **kwargs, out=out)


# ---- the feature map -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda n: torch.empty(n - 1, dtype=torch.uint8), ["bytes", "feature_map_bytes"]),
        (lambda n: torch.empty(0, dtype=torch.uint8), ["bytes"]),
        (lambda n: torch.empty(n + 64, dtype=torch.uint8)[1:], ["align"]),
        (lambda n: torch.empty(n, dtype=torch.int8), ["uint8"]),
        (lambda n: torch.empty(n, dtype=torch.float32), ["uint8"]),
        (lambda n: torch.empty(2 * n, dtype=torch.uint8)[::2], ["contiguous"]),
        (lambda n: torch.empty(n, dtype=torch.uint8, device="meta"), ["meta"]),
        (lambda n: torch.empty(n, dtype=torch.uint8).to_sparse(), []),
    ],
    ids=["small", "empty", "misaligned", "int8", "float", "strided", "meta", "sparse"],
)
def test_unusable_feature_map(chain, make, parts):
    assert chain.feature_map_bytes
    x = torch.randn(64)
    for call in calls_of(chain):
        with refused(chain, [x], "feature_map", *parts):
            call(x, feature_map=make(chain.feature_map_bytes))


def test_feature_map_of_another_type(chain):
    with pytest.raises((offload.BindingError, TypeError)):
        chain(torch.randn(64), feature_map=bytearray(chain.feature_map_bytes))


def test_feature_map_that_overlaps(chain):
    memory = arena(chain, extra=512)
    as_floats = memory[: 64 * 4].view(torch.float32)
    as_floats.fill_(0.5)
    x = torch.randn(64)
    with refused(chain, [memory], "feature_map", "args[0]", "overlap"):
        chain(as_floats, feature_map=memory)
    with refused(chain, [memory, x], "feature_map", "out", "overlap"):
        chain(x, out=as_floats, feature_map=memory)


def test_feature_map_that_overlaps_a_weight():
    memory = torch.zeros(4096, dtype=torch.uint8)
    weight = memory[256 : 256 + 64].view(torch.float32)
    weight.fill_(3.0)
    with offload.capture(lambda x: ((x * 2).exp() + 1) * weight) as captured:
        captured(torch.ones(16))
    run = captured.load()
    for start in (0, 256):
        with refused(run, [memory], "feature_map", "overlap"):
            run(torch.ones(16), feature_map=memory[start:])


def test_feature_map_for_a_program_without_activations():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.ones(4))
    run = captured.load()
    assert run.feature_map_bytes == 0
    x = torch.randn(4)
    assert torch.equal(run(x, feature_map=torch.empty(0, dtype=torch.uint8)), x * 2)


# ---- memory used in place ------------------------------------------------------------------------


def test_new_addresses_every_time(model, run):
    """Inputs, outputs and feature map lie elsewhere at each execution and are used there."""
    for _ in range(4):
        args, kwargs = good()
        memory = arena(run)
        memory.fill_(255)
        out = (torch.full((2, 4), 9.0), torch.full((2,), 9.0), None)
        got = run(*args, **kwargs, out=out, feature_map=memory)
        assert got[0] is out[0]
        assert got[1] is out[1]
        assert run.last_execution.bytes_copied == 0
        with torch.no_grad():
            hidden = torch.relu(model.first(args[0]))
            torch.testing.assert_close(out[0], model.second(hidden), rtol=1e-6, atol=1e-6)
        assert run.feature_map_bytes == 0 or not torch.equal(memory, torch.full_like(memory, 255))
        assert got[2].data_ptr() == args[1].data_ptr() + 4


def test_old_memory_is_left_alone(chain):
    """What an earlier execution was given stays untouched by a later one."""
    x, out, memory = torch.randn(64), torch.empty(64), arena(chain)
    chain(x, out=out, feature_map=memory)
    poison = [torch.full_like(one, 77) for one in (x, out, memory)]
    for one, value in zip((x, out, memory), poison, strict=True):
        one.copy_(value)
    y = torch.randn(64)
    assert torch.equal(chain(y, out=torch.empty(64), feature_map=arena(chain)), eager_chain(y))
    assert torch.equal(chain(y), eager_chain(y))
    for one, value in zip((x, out, memory), poison, strict=True):
        assert torch.equal(one, value)


def eager_chain(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).sin().exp()


def test_feature_map_in_the_middle_of_memory(chain):
    """Only the bytes that the executable asked for are written."""
    memory = torch.full((chain.feature_map_bytes + 256,), 7, dtype=torch.uint8)
    inner = memory[128 : 128 + chain.feature_map_bytes]
    x = torch.randn(64)
    assert torch.equal(chain(x, feature_map=inner), eager_chain(x))
    assert bool((memory[:128] == 7).all())
    assert bool((memory[128 + chain.feature_map_bytes :] == 7).all())


def test_two_executables_share_a_feature_map(chain, two_results):
    size = max(chain.feature_map_bytes, two_results.feature_map_bytes)
    memory = torch.empty(size, dtype=torch.uint8)
    x, a, b = torch.randn(64), torch.randn(4), torch.randn(4)
    tickets = []
    for _ in range(20):
        tickets.append((chain.submit(x, feature_map=memory), eager_chain(x)))
        tickets.append((two_results.submit(a, b, feature_map=memory), (a + b, (a * b).sin())))
    for ticket, expected in tickets:
        torch.testing.assert_close(ticket.result(), expected, rtol=0, atol=0)


OUT_LAYOUTS = {
    "contiguous": lambda: torch.zeros(4, 6),
    "offset": lambda: torch.zeros(30)[5:29].view(4, 6),
    "transposed": lambda: torch.zeros(6, 4).t(),
    "columns": lambda: torch.zeros(4, 12)[:, ::2],
    "rows": lambda: torch.zeros(8, 6)[::2],
}


@pytest.mark.parametrize("layout", OUT_LAYOUTS)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * 2 + 1,
        lambda x: (x * 2 + 1).t().contiguous().t(),
        lambda x: torch.cat([x, x], 1)[:, ::2] * 1,
        lambda x: (torch.cat([x, x], 1) * 2)[:, :6],
        lambda x: (torch.cat([x, x], 0) * 2)[::2],
        lambda x: (torch.cat([x, x], 1) * 2)[:, ::2],
        lambda x: torch.stack([x, x], -1).exp()[..., 1],
        lambda x: x.sort(dim=1)[0],
        lambda x: x.sum(1, keepdim=True).expand(4, 6),
        lambda x: x.clone(),
    ],
    ids=[
        "whole",
        "transposed",
        "copied",
        "first columns",
        "every other row",
        "every other column",
        "interleaved",
        "of several",
        "expanded",
        "clone",
    ],
)
def test_out_writes_exactly_its_own_elements(function, layout):
    """In place or by copy, whatever the strides of result and buffer; the gaps keep their bytes."""
    with offload.capture(function) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    for _ in range(2):
        x = torch.randn(4, 6)
        out = OUT_LAYOUTS[layout]()
        everything_there = torch.empty(0).set_(out.untyped_storage())
        everything_there.fill_(99.0)
        expected_there = everything_there.clone()
        torch.as_strided(expected_there, out.shape, out.stride(), out.storage_offset()).copy_(
            function(x)
        )
        got = run(x, out=out)
        assert got is out
        assert torch.equal(everything_there, expected_there)
        copied = run.last_execution.bytes_copied
        assert copied in (0, out.numel() * 4)


def test_out_is_used_in_place():
    with offload.capture(lambda x: x * 2 + 1) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    x, out = torch.randn(4, 6), torch.empty(4, 6)
    assert run(x, out=out).data_ptr() == out.data_ptr()
    assert run.last_execution.bytes_copied == 0
    transposed = torch.empty(6, 4).t()
    assert torch.equal(run(x, out=transposed), x * 2 + 1)
    assert run.last_execution.bytes_copied == x.numel() * 4


def test_out_of_an_operator_that_allocates():
    """A result that only its operator can allocate is copied into the buffer, and counted."""
    with offload.capture(torch.nonzero_static) as captured:
        captured(torch.ones(4), size=4)
    run = captured.load()
    x, out = torch.tensor([0.0, 1.0, 1.0, 0.0]), torch.zeros(4, 1, dtype=torch.int64)
    got = run(x, size=4, out=out)
    assert torch.equal(out, torch.nonzero_static(x, size=4))
    assert got is out


def test_out_changes_the_version():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.randn(4))
    out = torch.empty(4)
    version = out._version
    captured.load()(torch.randn(4), out=out)
    assert out._version > version


def test_nested_out():
    with offload.capture(lambda x: {"a": x * 2, "b": [x + 1, None, (x - 1,)]}) as captured:
        captured(torch.randn(4))
    run = captured.load()
    x = torch.randn(4)
    a, deep = torch.empty(4), torch.empty(4)
    got = run(x, out={"a": a, "b": [None, None, (deep,)]})
    assert got["a"] is a
    assert got["b"][2][0] is deep
    assert torch.equal(a, x * 2)
    assert torch.equal(deep, x - 1)
    assert torch.equal(got["b"][0], x + 1)
    assert got["b"][1] is None
    only_a = run(x, out={"a": a})
    assert only_a["a"] is a


def test_same_tensor_twice_with_out():
    def function(x):
        y = x * 2
        return y, y, y[1:]

    with offload.capture(function) as captured:
        captured(torch.randn(4))
    run = captured.load()
    x, out, other = torch.randn(4), torch.empty(4), torch.empty(4)
    got = run(x, out=(out, out, None))
    assert got[0] is out
    assert got[1] is out
    assert torch.equal(out, x * 2)
    assert torch.equal(got[2], x[1:] * 2)
    with pytest.raises(offload.BindingError, match="two buffers"):
        run(x, out=(out, other, None))


# ---- strided inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("written", [False, True])
def test_inputs_with_other_strides(written):
    """Copied and counted; a written one is copied back. Nothing else is copied."""

    def function(x, y):
        return (x.mul_(2) if written else x * 2) + y

    with offload.capture(function) as captured:
        captured(torch.randn(4, 6), torch.randn(4, 6))
    run = captured.load()
    layouts: list[Callable[[], torch.Tensor]] = [
        lambda: torch.randn(6, 4).t(),
        lambda: torch.randn(8, 6)[::2],
        lambda: torch.randn(4, 12)[:, 1::2],
        lambda: torch.randn(4, 6, 2)[..., 1],
    ]
    for make in layouts:
        x, y = make(), torch.randn(4, 6)
        theirs = x.clone()
        expected = function(theirs, y)
        assert torch.equal(run(x, y), expected)
        assert torch.equal(x, theirs)
        assert run.last_execution.bytes_copied == x.numel() * 4 * (2 if written else 1)
        theirs = y.clone()
        assert torch.equal(run(y, x), function(theirs, x))
        assert torch.equal(y, theirs)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    run(x, y)
    assert run.last_execution.bytes_copied == 0


def test_expanded_input_is_copied():
    with offload.capture(lambda x: x + 1) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    x = torch.randn(6).expand(4, 6)
    assert torch.equal(run(x), x + 1)
    assert run.last_execution.bytes_copied == 4 * 6 * 4


def test_expanded_input_that_is_written_is_refused():
    """Its elements share memory, so the copy cannot go back to where it came from."""
    with offload.capture(lambda x: x.add_(torch.arange(4.0))) as captured:
        captured(torch.randn(4))
    run = captured.load()
    x = torch.zeros(1).expand(4)
    with refused(run, [x], "args[0]"):
        run(x)


def test_sizes_of_one_may_have_any_stride():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.randn(1, 6))
    run = captured.load()
    x = torch.randn(6, 5).t()[2:3]
    assert torch.equal(run(x), x * 2)
    x = torch.randn(1, 6).as_strided((1, 6), (999, 1))
    assert torch.equal(run(x), x * 2)
    assert run.last_execution.bytes_copied == 0


def test_view_of_an_input_needs_the_recorded_strides():
    with offload.capture(lambda x: (x * 2, x[1:])) as captured:
        captured(torch.randn(4, 6))
    run = captured.load()
    x = torch.randn(6, 4).t()
    with refused(run, [x], "args[0]", "strides"):
        run(x)


def test_conjugate_input_for_a_plain_one():
    with offload.capture(lambda x: x * 2) as captured:
        captured(torch.randn(4, dtype=torch.complex64))
    run = captured.load()
    x = torch.randn(4, dtype=torch.complex64).conj()
    assert torch.equal(run(x), x * 2)
    assert run.last_execution.bytes_copied == 32
    y = torch.randn(4, dtype=torch.complex64)
    with offload.capture(lambda x: x * 2) as captured:
        captured(y.conj())
    assert torch.equal(captured(y), y * 2)


def test_unaligned_inputs():
    """Any address that the dtype allows: vector kernels must not expect more."""
    with offload.capture(lambda x, y: torch.relu(x @ y) + x.sum()) as captured:
        captured(torch.randn(16, 16), torch.randn(16, 16))
    run = captured.load()
    for shift in (1, 3, 7):
        x = torch.randn(16 * 16 + shift)[shift:].view(16, 16)
        y = torch.randn(16 * 16 + shift)[shift:].view(16, 16)
        torch.testing.assert_close(run(x, y), torch.relu(x @ y) + x.sum(), rtol=1e-5, atol=1e-5)
        assert run.last_execution.bytes_copied == 0


# ---- closed --------------------------------------------------------------------------------------


def test_closed_executable(model, run):
    run.close()
    run.close()
    assert run.closed
    args, kwargs = good()
    with pytest.raises(offload.ExecutionError, match="closed"):
        run(*args, **kwargs)
    with pytest.raises(offload.ExecutionError, match="closed"):
        run.submit(*args, **kwargs)
    assert torch.equal(args[1], torch.zeros(5))
    assert torch.equal(model.steps, torch.ones(4))


def test_errors_are_of_the_family():
    for error in (offload.BindingError, offload.CaptureError, offload.ExecutionError):
        assert issubclass(error, offload.OffloadError)
    assert issubclass(offload.BindingError, ValueError)


def test_unknown_device():
    with offload.capture(torch.sin) as captured:
        captured(torch.randn(2))
    with pytest.raises(offload.BackendUnavailable, match="toaster"):
        captured.load(device="toaster")


def test_program_of_another_device():
    with pytest.raises(offload.CaptureError, match="meta"), offload.capture(torch.sin) as captured:
        captured(torch.empty(2, device="meta"))
