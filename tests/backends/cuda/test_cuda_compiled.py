"""Models wrapped by torch.compile, on the simulated driver: one opaque launch, or the original."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import offload

pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings reads captured graphs")
from hidden_models import N_REPLAYS, assert_same_state, is_opaque, rows
from opaque_capturing import compiler
from simulated_backend import SimulatedBackend, install


@pytest.fixture
def backend(simulator, monkeypatch) -> SimulatedBackend:
    """Recordings on the CPU are for the simulated device."""
    return install(simulator, monkeypatch, records=True)


@pytest.fixture(autouse=True)
def compiled_code() -> Iterator[None]:
    """Reset compiled code for each test: torch compiles one function only so often."""
    yield
    if module := sys.modules.get("torch._dynamo"):
        module.reset()


# ---- wrapped by torch.compile --------------------------------------------------------------------


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.linear(x) * self.count


def in_place(model):
    model.compile(backend=compiler)
    return model


COMPILED = {
    "module": lambda model: torch.compile(model, backend=compiler),
    "inside": lambda model: nn.Sequential(torch.compile(model, backend=compiler)),
    "in place": in_place,
    "function": lambda model: torch.compile(lambda x: model(x * 1), backend=compiler),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPILED)
def test_compiled_callables(backend, kind):
    """Its own counter, written in place, shows how often it ran."""
    inner = Counter().eval()
    twin, model = copy.deepcopy(inner), COMPILED[kind](inner)
    with torch.no_grad():
        captured = offload.capture(model, rows())
        twin(rows())
    assert is_opaque(captured)
    assert "is compiled by torch.compile" in captured.program.opaque.reason
    assert torch.equal(inner.count, torch.ones(()))
    run = captured.load()
    assert torch.equal(inner.count, torch.ones(()))
    for _ in range(N_REPLAYS):
        x = rows()
        with torch.no_grad():
            assert torch.equal(run(x), twin(x))
        assert_same_state(inner, twin)


def test_a_compiled_module_called_by_itself(backend):
    model = torch.compile(Counter(), backend=compiler)
    twin = copy.deepcopy(model._orig_mod)
    with torch.no_grad():
        with offload.capture(model) as captured:
            recorded = model(torch.ones(2, 8))
        assert torch.equal(recorded, twin(torch.ones(2, 8)))
        x = rows()[:2]
        assert torch.equal(captured(x), twin(x))
    assert is_opaque(captured)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "options", [{}, {"mode": "reduce-overhead"}, {"backend": "cudagraphs"}, {"fullgraph": True}]
)
def test_what_torchs_compilers_compile_is_recorded_as_its_original(backend, options):
    """Without graphs of its own, and without code that nothing sees."""
    inner = nn.Linear(8, 8).eval()
    for model in (torch.compile(inner, **options), nn.Sequential(torch.compile(inner, **options))):
        with torch.no_grad():
            captured = offload.capture(model, rows())
        assert not is_opaque(captured)
        assert [one.name for one in captured.program.launches] == ["aten::addmm"]
        with torch.no_grad(), captured.load() as run:
            for _ in range(N_REPLAYS):
                x = rows()
                torch.testing.assert_close(run(x), inner(x))


def negated(graph: torch.fx.Graph) -> None:
    """Change what is computed, as a pass of a user's may."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.addmm.default:
            with graph.inserting_after(node):
                negative = graph.call_function(torch.ops.aten.neg.default, (node,))
            node.replace_all_uses_with(negative)
            negative.args = (node,)


def test_a_users_pass_in_inductor_makes_one_launch(backend):
    """The original computes something else than the compiled code."""
    inner, x = nn.Linear(8, 8), rows()
    with torch._inductor.config.patch(post_grad_custom_pre_pass=negated), torch.no_grad():
        captured = offload.capture(torch.compile(inner), x)
    assert is_opaque(captured)
    assert "config.post_grad_custom_pre_pass may change" in captured.program.opaque.reason
    torch.testing.assert_close(captured.recorded_result, -inner(x))


def test_what_only_the_call_shows_is_refused_with_advice(backend):
    def model(x):
        return torch.compile(lambda y: y * 2, backend=lambda graph, _: graph)(x)

    with pytest.raises(offload.CaptureError, match=r"own .*attribute or global .* one launch"):
        offload.capture(model, rows())


def test_a_generator_that_has_moved_makes_the_launch_random(backend):
    model = torch.compile(lambda x: x + torch.rand_like(x), backend=compiler)
    torch.manual_seed(3)
    captured = offload.capture(model, rows())
    state = torch.get_rng_state()
    torch.manual_seed(3)
    torch.rand(3, 8), rows()
    assert captured.program.launches[0].random
    assert "draws random numbers" in captured.program.unchecked
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(offload.CaptureError, match="draws random numbers"):
        captured.load()


@pytest.mark.parametrize("enabled", [False, True])
def test_the_callers_autocast_state_is_that_of_every_call(backend, enabled):
    """The capture and its thread have no such state of their own."""
    model = torch.compile(nn.Linear(8, 8), backend=compiler)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled):
        captured = offload.capture(model, rows())
        expected = model(torch.ones(3, 8))
        assert torch.equal(captured(torch.ones(3, 8)), expected)
    assert expected.dtype == (torch.bfloat16 if enabled else torch.float32)


def test_state_in_python_is_refused(backend):
    class Counting(nn.Module):
        n = 0

        def forward(self, x):
            self.n += 1
            return x + 1

    model = torch.compile(Counting(), backend=compiler)
    with pytest.raises(offload.CaptureError, match=r"n.* was added|n: 0 became 1"):
        offload.capture(model, rows())


def test_seeding_is_refused(backend):
    generator = torch.Generator()

    def draw(x):
        generator.manual_seed(7)
        return x + torch.rand(3, 8, generator=generator)

    model = torch.compile(draw, backend=compiler)
    draw(rows())
    with pytest.raises(offload.CaptureError, match="seeds or restores a random generator"):
        offload.capture(model, rows())
