"""Passes, patterns and lowerings of the user in torch's compilers are refused."""

import functools

import pytest
import torch
from checks import capture, normal
from compiled_models import doubled, gelu_twice
from torch._inductor import pattern_matcher

import offload

pytestmark = pytest.mark.usefixtures("compiler_reset")


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
    with torch._inductor.config.patch(post_grad_custom_pre_pass=differences):
        assert torch.equal(compiled(x), x - 1)
        with pytest.raises(offload.CaptureError, match="post_grad_custom_pre_pass"):
            offload.capture(compiled, x)
        with torch._inductor.config.patch(post_grad_custom_pre_pass=None):
            assert torch.equal(capture(compiled, x)(x), x + 1)
        options = {"post_grad_custom_pre_pass": None}  # which take precedence
        assert torch.equal(capture(torch.compile(model, options=options), x)(x), x + 1)
        others = torch.compile(model, backend="aot_eager")  # without passes of Inductor
        assert torch.equal(capture(others, x)(x), others(x))


def in_a_list(function):
    return [function]


NEEDS_LISTS = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="Inductor takes lists of passes from torch 2.13 on"
)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda function: function,
        functools.partial,
        pytest.param(in_a_list, marks=NEEDS_LISTS),
    ],
)
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
