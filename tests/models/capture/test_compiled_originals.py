"""What torch.compile has wrapped is recorded as its original code."""

import copy
import subprocess
import sys

import pytest
import torch
from checks import capture, normal
from compiled_models import Block, compiled_function, gelu_twice, hidden
from safetensors.torch import save_file
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import offload

pytestmark = pytest.mark.usefixtures("compiler_reset")


class Model(nn.Module):
    def __init__(self, wrap=lambda one: one):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = wrap(Block())
        self.blocks = nn.ModuleList([wrap(Block()), Block()])

    def forward(self, x):
        x = self.block(self.first(x))
        for block in self.blocks:
            x = block(x)
        return x


def in_place(model):
    model.compile(backend="aot_eager", fullgraph=True)
    return model


class Calling(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


class CallingGlobal(Calling):
    def forward(self, x):
        return compiled_function(self.linear(x))


def same_weights(model, other):
    other.load_state_dict(model.state_dict())
    return model.eval(), other.eval()


WRAPS = {
    "whole": lambda model: torch.compile(model, backend="aot_eager"),
    "whole graph": lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
    "in place": in_place,
    "inductor": torch.compile,
    "with graphs": lambda model: torch.compile(model, mode="reduce-overhead"),
    "for offload": lambda model: torch.compile(model, backend="offload"),
}


def launches_and_names(captured):
    program = captured.program
    return [(one.name, one.arguments) for one in program.launches], [v.name for v in program.values]


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_program_is_that_of_the_original(wrap):
    original = Model().eval()
    expected = launches_and_names(capture(original, normal(3, 8)))
    captured = capture(WRAPS[wrap](original), normal(3, 8))
    assert launches_and_names(captured) == expected
    assert "compiled by torch.compile, and recorded as the original" in captured.explain()
    x = normal(3, 8)
    with torch.no_grad():
        assert torch.equal(captured(x), Model.forward(original, x))


@pytest.mark.parametrize("wrap", ["whole", "in place"])
def test_parts_of_a_model(wrap):
    torch.manual_seed(0)
    original = Model().eval()
    torch.manual_seed(0)
    model = Model(WRAPS[wrap]).eval()
    captured = capture(model, normal(3, 8))
    expected = capture(original, normal(3, 8))
    assert launches_and_names(captured) == launches_and_names(expected)
    (note,) = captured.program.notes
    assert note.startswith("block, blocks.0: compiled by torch.compile")


@pytest.mark.parametrize("kind", [Calling, CallingGlobal])
def test_functions_that_a_forward_calls(kind):
    model, original = same_weights(kind(compiled_function), Calling(gelu_twice))
    captured = capture(model, normal(3, 8))
    assert launches_and_names(captured) == launches_and_names(capture(original, normal(3, 8)))
    assert "function: compiled by torch.compile" in captured.explain()


def test_a_function_by_itself():
    captured = capture(compiled_function, normal(3, 8))
    assert captured.program.notes[0].startswith("the function: compiled by torch.compile")
    x = normal(3, 8)
    assert torch.equal(captured(x), gelu_twice(x))


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Calling(compiled_function),
        lambda: torch.compile(Model(), backend="aot_eager", fullgraph=True),
    ],
    ids=["a function that it calls", "the model"],
)
def test_a_call_in_a_block_does_not_use_compiled_code(make, is_warm):
    """It is recorded as it would be without: torch may have compiled it for this very call."""
    model = make().eval()
    x = normal(3, 8)
    with torch.no_grad():
        before = model(x) if is_warm else None
        with offload.capture(model) as captured:
            recorded = model(x)
        assert torch.equal(captured(x), recorded)
        after = model(x)
        torch.testing.assert_close(recorded, after)
        assert before is None or torch.equal(after, before)  # compiled code goes on as before


@pytest.mark.slow
def test_results_are_those_of_inductor_up_to_rounding():
    model = torch.compile(Model().eval())
    with torch.no_grad():
        for fuse in (False, True):
            with capture(model, normal(3, 8)).load(fuse=fuse) as run:
                for _ in range(3):
                    x = normal(3, 8)
                    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention(is_compiled):
    attend = torch.compile(flex_attention, backend="aot_eager") if is_compiled else flex_attention

    def model(q, k, v):
        return attend(q, k, v, score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j)) * 2

    given = [normal(1, 2, 16, 8) for _ in range(3)]
    captured = capture(model, *given)
    assert "attend: compiled by torch.compile" in captured.explain()
    for _ in range(2):
        q, k, v = (normal(1, 2, 16, 8) for _ in range(3))
        at = torch.arange(16.0)
        bias = 0.1 * (at[:, None] - at[None, :])
        expected = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias) * 2
        torch.testing.assert_close(captured(q, k, v), expected)


def test_torch_compiles_as_before_after_a_capture():
    def broken(x):
        raise ValueError(compiled_function(x).shape)

    capture(compiled_function, normal(3, 8))
    with pytest.raises(ValueError, match="3, 8"):
        offload.capture(broken, normal(3, 8))
    with torch.no_grad():
        torch._dynamo.utils.counters.clear()
        compiled_function(normal(5, 8))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Counting(nn.Module):
    n = 0

    def forward(self, x):
        self.n += 1
        return x + 1


class CountingDecorated(Counting):
    forward = torch.compile(Counting.forward, backend="aot_eager")


@pytest.mark.parametrize(
    "make", [lambda: torch.compile(Counting(), backend="aot_eager"), CountingDecorated]
)
def test_state_of_the_original_is_watched(make):
    with pytest.raises(offload.CaptureError, match=r"n.* was added|n: 0 became 1"):
        offload.capture(make(), normal(3, 8))


def test_a_saved_program_of_a_compiled_model(tmp_path):
    model = torch.compile(Model().eval(), backend="aot_eager")
    captured = capture(model, normal(3, 8))
    captured.save(tmp_path / "model.offload")
    x = normal(3, 8)
    with torch.no_grad():
        assert torch.equal(offload.open(tmp_path / "model.offload")(x), captured(x))


def test_weights_in_files(tmp_path):
    """The file has the names of the original."""
    original = Model().eval()
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    for wrap in ("whole", "in place"):
        model = copy.deepcopy(original)
        model.block = WRAPS[wrap](model.block)
        captured = offload.capture(WRAPS[wrap](model), normal(3, 8), weights=tmp_path)
        x = normal(3, 8)
        with torch.no_grad():
            torch.testing.assert_close(captured(x), original(x))


def test_a_training_step_with_a_compiled_model():
    model = nn.Linear(8, 4)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(twin.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="aot_eager")

    def step(x):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def eager_step(x):
        other.zero_grad()
        loss = twin(x).square().mean()
        loss.backward()
        other.step()
        return loss.detach()

    x = normal(3, 8)
    captured = offload.capture(step, x, training=True)
    assert torch.allclose(captured.recorded_result, eager_step(x))
    for _ in range(3):
        x = normal(3, 8)
        assert torch.allclose(captured(x), eager_step(x))
    assert torch.allclose(model.weight, twin.weight)


@torch.compiler.disable
def scaled_eagerly(x):
    return x * 3


def test_a_function_that_the_compiler_leaves_alone_is_recorded_as_it_is():
    """`torch.compiler.disable` wraps a function as torch.compile does; transformers does that."""
    x = normal(4, 8)
    for model in (Calling(scaled_eagerly), scaled_eagerly):
        captured = capture(model, x)
        assert "compiled" not in captured.load().explain()
        assert torch.equal(captured.load()(x), model(x))


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def forward(self, x):
        return nn.functional.gelu(self.linear(x))


class Operators:
    @staticmethod
    @torch.compile(backend="aot_eager", fullgraph=True)
    def scaled(x):
        return x * 3


def of_a_class(x):
    return Operators.scaled(x)


def compiled_inside(x):
    return torch.compile(gelu_twice, backend="aot_eager", fullgraph=True)(x)


def behind_a_reference(x):
    return hidden()(x)


@pytest.mark.parametrize(
    ("function", "original", "name"),
    [
        (of_a_class, lambda x: x * 3, "Operators.scaled"),
        (compiled_inside, gelu_twice, "gelu_twice"),
        (behind_a_reference, gelu_twice, "gelu_twice"),
    ],
)
def test_compiled_functions_that_only_the_call_shows(function, original, name):
    captured = capture(function, normal(3, 8))
    (note,) = captured.program.notes
    assert note.startswith(f"{name}: compiled by torch.compile, and recorded as the original")
    x = normal(3, 8)
    assert torch.equal(captured(x), original(x))


def test_a_decorated_method():
    model = Decorated().eval()
    captured = capture(model, normal(3, 8))
    assert {"linear.weight", "linear.bias"} <= {one.name for one in captured.program.values}
    assert "Decorated.forward: compiled by torch.compile" in captured.explain()
    x = normal(3, 8)
    with torch.no_grad():
        assert torch.equal(captured(x), nn.functional.gelu(model.linear(x)))


def test_a_module_that_is_compiled_twice_keeps_the_names_of_its_weights():
    """The outer wrapper holds the inner's original: a forward of torch's, which torch wraps too."""
    original = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    model = torch.compile(torch.compile(original, backend="aot_eager"), backend="eager")
    captured = capture(model, normal(3, 8))
    assert launches_and_names(captured) == launches_and_names(capture(original, normal(3, 8)))


def test_a_branch_on_being_compiled_is_that_of_the_original():
    def branching(x):
        return x * 2 if torch.compiler.is_compiling() else x * 3

    captured = capture(torch.compile(branching, backend="aot_eager"), normal(3, 8))
    assert "torch.compiler.is_compiling() returned False in it" in captured.explain()
    x = normal(3, 8)
    assert torch.equal(captured(x), x * 3)


IN_A_FRESH_PROCESS = """
import sys, torch, offload
def model(x):
    return torch.compile(torch.relu, backend="eager", fullgraph=True)(x)
assert "torch._dynamo" not in sys.modules
x = torch.randn(3)
with offload.capture(model) as captured:
    captured(x)
assert "relu: compiled by torch.compile" in captured.explain()
assert torch.equal(captured(x), x.relu())
from torch._dynamo import eval_frame
assert eval_frame._stance.stance == "default"
assert not hasattr(eval_frame._callback_from_stance, "__wrapped__")
assert not hasattr(torch._TorchCompileWrapper.__init__, "__wrapped__")
"""


@pytest.mark.slow
def test_the_first_use_of_torch_compile_in_a_process():
    """Torch's compiler is not loaded before the call."""
    done = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
