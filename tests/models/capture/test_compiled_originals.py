"""What torch.compile has wrapped is recorded as its original code."""

import copy
import functools
import subprocess
import sys
import weakref

import pytest
import torch
from checks import capture, normal
from safetensors.torch import save_file
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import pattern_matcher
from torch.nn.attention.flex_attention import flex_attention

import offload

pytestmark = [
    pytest.mark.usefixtures("compiler_reset"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's, by Inductor
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return nn.functional.gelu(self.linear(x)) + x


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


def gelu_twice(x):
    return nn.functional.gelu(x) * 2 + 1


compiled_function = torch.compile(gelu_twice, backend="aot_eager", fullgraph=True)


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


def test_code_that_was_compiled_before_is_not_used():
    """It is recorded as it would be without: torch has compiled it for this very call."""
    model = Calling(compiled_function).eval()
    x = normal(3, 8)
    with torch.no_grad():
        before = model(x)
        with offload.capture(model) as captured:
            recorded = model(x)
        torch.testing.assert_close(recorded, before)
        torch.testing.assert_close(captured(x), before)
        assert torch.equal(model(x), before)  # and compiled code goes on as before


@pytest.mark.slow
def test_results_are_those_of_inductor_up_to_rounding():
    model = torch.compile(Model().eval())
    with torch.no_grad():
        for fuse in (False, True):
            with capture(model, normal(3, 8)).load(fuse=fuse) as run:
                for _ in range(3):
                    x = normal(3, 8)
                    torch.testing.assert_close(run(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_compiled_module_called_by_itself():
    model = torch.compile(Model().eval(), backend="aot_eager", fullgraph=True)
    with torch.no_grad(), offload.capture(model) as captured:
        model(normal(3, 8))
    x = normal(3, 8)
    with torch.no_grad():
        torch.testing.assert_close(captured(x), model(x))


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


def test_what_a_users_compiler_makes_is_refused():
    """It may compute anything."""

    def doubled(graph, _):
        return lambda *given: [one * 2 for one in graph(*given)]

    model = torch.compile(Block(), backend=doubled)
    with pytest.raises(offload.CaptureError, match=r"the model is compiled by .*_orig_mod"):
        offload.capture(model, normal(3, 8))


def eager(graph, _):  # the name of one of torch's compilers
    return lambda *given: [one * 2 for one in graph(*given)]


def test_a_users_compiler_with_the_name_of_one_of_torchs():
    with pytest.raises(offload.CaptureError, match=r"is compiled by torch\.compile"):
        offload.capture(torch.compile(gelu_twice, backend=eager), normal(3, 8))


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


def test_state_of_the_original_is_watched():
    class Counting(nn.Module):
        n = 0

        def forward(self, x):
            self.n += 1
            return x + 1

    model = torch.compile(Counting(), backend="aot_eager")
    with pytest.raises(offload.CaptureError, match=r"n.* was added|n: 0 became 1"):
        offload.capture(model, normal(3, 8))


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


hidden = weakref.ref(compiled_function)  # which no walk over Python's objects enters


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


def test_state_of_a_decorated_method_is_watched():
    class Counting(nn.Module):
        n = 0

        @torch.compile(backend="aot_eager")
        def forward(self, x):
            self.n += 1
            return x + 1

    with pytest.raises(offload.CaptureError, match=r"n.* was added|n: 0 became 1"):
        offload.capture(Counting(), normal(3, 8))


def test_a_module_that_is_compiled_twice_keeps_the_names_of_its_weights():
    """The outer wrapper holds the inner's original: a forward of torch's, which torch wraps too."""
    original = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()
    model = torch.compile(torch.compile(original, backend="aot_eager"), backend="eager")
    captured = capture(model, normal(3, 8))
    assert launches_and_names(captured) == launches_and_names(capture(original, normal(3, 8)))


def doubled(graph, _):
    return lambda *given: [one * 2 for one in graph(*given)]


doubling = torch.compile(gelu_twice, backend=doubled)
hidden_doubling = weakref.ref(doubling)


def doubled_behind_a_reference(x):
    return hidden_doubling()(x)


def doubled_inside(x):
    return torch.compile(gelu_twice, backend=doubled)(x)


@pytest.mark.parametrize("function", [doubled_behind_a_reference, doubled_inside])
@pytest.mark.parametrize("is_warm", [False, True])
def test_a_users_compiler_that_only_the_call_shows_is_refused(function, is_warm):
    if is_warm:
        assert torch.equal(function(normal(3, 8) * 0), torch.full((3, 8), 2.0))
    with pytest.raises(
        offload.CaptureError, match=r"gelu_twice is compiled by a function of your own"
    ):
        offload.capture(function, normal(3, 8))


def test_a_users_compiler_that_is_registered_by_name_is_refused():
    """torch lists it beside its own."""
    if "doubled_by_offload_tests" not in torch._dynamo.list_backends(exclude_tags=None):
        torch._dynamo.register_backend(doubled, name="doubled_by_offload_tests")
    with pytest.raises(offload.CaptureError, match=r"is compiled by torch\.compile"):
        offload.capture(torch.compile(gelu_twice, backend="doubled_by_offload_tests"), normal(3, 8))


def test_a_users_part_of_a_compiler_of_torchs_is_refused():
    backend = aot_autograd(fw_compiler=doubled)
    with pytest.raises(offload.CaptureError, match=r"is compiled by torch\.compile"):
        offload.capture(torch.compile(gelu_twice, backend=backend), normal(3, 8))


PASSES = [
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "pre_grad_custom_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
]


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("is_global", [False, True])
def test_a_users_pass_in_inductor_is_refused(name, is_global):
    """It may change what is computed."""
    expected = rf"config\.{name} may change what it computes: .*capture the original"
    if is_global:
        compiled = torch.compile(gelu_twice)
        with (
            torch._inductor.config.patch({name: doubled}),
            pytest.raises(offload.CaptureError, match=expected),
        ):
            offload.capture(compiled, normal(3, 8))
    else:
        compiled = torch.compile(gelu_twice, options={name: doubled})
        with pytest.raises(offload.CaptureError, match=expected):
            offload.capture(compiled, normal(3, 8))


def differences(graph):
    for node in graph.nodes:
        if node.target is torch.ops.aten.add.Tensor:
            node.target = torch.ops.aten.sub.Tensor


def test_a_pass_does_change_what_is_computed():
    """The reason for the refusals above; without the pass the same model is its original."""

    def model(x):
        return x + 1

    x = normal(3, 8)
    compiled = torch.compile(model)
    with torch._inductor.config.patch(post_grad_custom_pre_pass=[differences]):
        assert torch.equal(compiled(x), x - 1)
        with pytest.raises(offload.CaptureError, match="post_grad_custom_pre_pass"):
            offload.capture(compiled, x)
        with torch._inductor.config.patch(post_grad_custom_pre_pass=None):
            assert torch.equal(capture(compiled, x)(x), x + 1)
        options = {"post_grad_custom_pre_pass": None}  # which take precedence
        assert torch.equal(capture(torch.compile(model, options=options), x)(x), x + 1)
        others = torch.compile(model, backend="aot_eager")  # without passes of Inductor
        assert torch.equal(capture(others, x)(x), others(x))


@pytest.mark.parametrize("wrap", [lambda function: function, functools.partial, lambda f: [f]])
def test_patterns_of_the_users_in_a_pass_of_torchs_class_are_refused(wrap):
    patterns = pattern_matcher.PatternMatcherPass()

    @pattern_matcher.register_graph_pattern(
        pattern_matcher.CallFunction(torch.ops.aten.sin.default, pattern_matcher.Arg()),
        pass_dict=patterns,
    )
    def cosine(match, _):
        match.output_node().target = torch.ops.aten.cos.default

    compiled, x = torch.compile(lambda x: x.sin()), normal(3, 8)
    with torch._inductor.config.patch(post_grad_custom_post_pass=wrap(patterns.apply)):
        assert torch.allclose(compiled(x), x.cos())
        with pytest.raises(offload.CaptureError, match="post_grad_custom_post_pass"):
            offload.capture(compiled, x)
    assert torch.equal(capture(compiled, x)(x), x.sin())


def lowered(x):
    return torch._inductor.lowering.lowerings[torch.ops.aten.cos.default](x)


def register_a_lowering(operator, monkeypatch):
    from torch._inductor.lowering import lowerings, register_lowering

    made = {}
    register_lowering(operator, lowering_dict=made)(lowered)
    for overload, function in made.items():
        monkeypatch.setitem(lowerings, overload, function)


def register_a_pattern(operator, monkeypatch):
    from torch._inductor.fx_passes import post_grad

    (first, *_) = post_grad.pass_patterns
    monkeypatch.setattr(first, "patterns", first.patterns.copy())
    first.patterns["call_function", operator] = []

    @pattern_matcher.register_graph_pattern(
        pattern_matcher.CallFunction(operator, pattern_matcher.Arg()), pass_dict=first
    )
    def cosine(match, _):
        match.output_node().target = torch.ops.aten.cos.default


def register_a_replacement(operator, monkeypatch):
    from torch._inductor.fx_passes import joint_graph

    def search(x):
        return operator(x)

    given = joint_graph.patterns
    monkeypatch.setattr(given, "patterns", given.patterns.copy())
    given.patterns["call_function", operator] = []
    pattern_matcher.register_replacement(
        search, lambda x: x.cos(), [torch.ones(3)], pattern_matcher.fwd_only, given
    )


@pytest.mark.parametrize(
    ("register", "name"),
    [
        (register_a_lowering, "lowering.lowerings"),
        (register_a_pattern, "post_grad.pass_patterns"),
        (register_a_replacement, "joint_graph.patterns"),
    ],
)
def test_what_the_user_registers_in_tables_of_inductor_is_noticed(register, name, monkeypatch):
    """It holds for all compilations of the process, and may change what they compute."""
    compiled, x = torch.compile(torch.nn.Hardshrink()), normal(3, 8)
    assert torch.equal(capture(compiled, x)(x), torch.nn.functional.hardshrink(x))
    with monkeypatch.context() as patch:
        register(torch.ops.aten.hardshrink.default, patch)
        expected = rf"functions of your own in torch\._inductor\..*{name}.* may change"
        with pytest.raises(offload.CaptureError, match=expected):
            offload.capture(compiled, x)
        others = torch.compile(torch.nn.Hardshrink(), backend="aot_eager")
        assert torch.equal(capture(others, x)(x), torch.nn.functional.hardshrink(x))
    assert torch.equal(capture(compiled, x)(x), torch.nn.functional.hardshrink(x))


def test_lowerings_of_the_users_own_operators_are_his(monkeypatch):
    @torch.library.custom_op("offload_tests::halved", mutates_args=())
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x / 2

    register_a_lowering(torch.ops.offload_tests.halved.default, monkeypatch)
    x = normal(3, 8)
    assert torch.equal(capture(torch.compile(lambda x: halved(x) + 1), x)(x), x / 2 + 1)


def compiled_by_inductor_inside(x):
    return torch.compile(gelu_twice)(x)


def test_a_pass_in_a_compiler_that_only_the_call_shows():
    with (
        torch._inductor.config.patch(post_grad_custom_pre_pass=differences),
        pytest.raises(offload.CaptureError, match=r"gelu_twice is compiled by .*custom_pre_pass"),
    ):
        offload.capture(compiled_by_inductor_inside, normal(3, 8))


def test_a_pass_over_the_graphs_of_all_compilers_is_refused():
    compilers = ("aot_eager", "inductor")
    with torch._functorch.config.patch(joint_custom_pass=lambda graph, inputs: graph):
        for backend in compilers:
            with pytest.raises(offload.CaptureError, match=r"_functorch.config.joint_custom_pass"):
                offload.capture(torch.compile(gelu_twice, backend=backend), normal(3, 8))
        x = normal(3, 8)
        captured = capture(torch.compile(gelu_twice, backend="eager"), x)
        assert torch.equal(captured(x), gelu_twice(x))


def test_functions_of_the_user_that_change_no_result_are_no_passes():
    for options in ({"epilogue_fusion": False}, {"trace.upload_tar": print}):
        compiled = torch.compile(gelu_twice, options=options)
        assert (
            "compiled by torch.compile, and recorded" in capture(compiled, normal(3, 8)).explain()
        )


def test_a_users_compiler_in_place_of_all_is_refused():
    with (
        torch.compiler.set_stance(force_backend=doubled),
        pytest.raises(offload.CaptureError, match="is compiled by a function of your own"),
    ):
        offload.capture(compiled_function, normal(3, 8))


@pytest.mark.parametrize("function", [doubling, doubled_behind_a_reference])
def test_originals_that_the_user_has_torch_call_are_recorded(function):
    """Whatever would compile them."""
    x = normal(3, 8)
    with torch.compiler.set_stance("force_eager"):
        captured = capture(function, x)
        assert torch.equal(captured(x), function(x))
    assert torch.equal(captured(x), gelu_twice(x))


def test_a_compiler_of_torchs_given_as_a_function():
    from torch._dynamo.backends.debugging import aot_eager

    captured = capture(torch.compile(gelu_twice, backend=aot_eager), normal(3, 8))
    x = normal(3, 8)
    assert torch.equal(captured(x), gelu_twice(x))


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
