"""Random operators: a replay draws eager's numbers, and advances generators equally."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same, capture, check, normal, normals, refusal
from torch import manual_seed, nn

import offload

two_layers = nn.LSTM(1, 2, 2, dropout=0.5).train()

RANDOM = {
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "binomial": lambda x: torch.binomial(torch.full((16,), 5.0), x.sigmoid()),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "dirichlet": lambda x: torch._sample_dirichlet(x.abs()),
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of nothing": lambda x: F.dropout(x[:0], 0.5),
    "dropout2d": lambda x: F.dropout2d(x.view(1, 4, 2, 2), 0.5),
    "exponential_": lambda x: x.clone().exponential_(),
    "fractional_max_pool": lambda x: F.fractional_max_pool2d(
        x.view(1, 1, 4, 4), 2, output_size=(2, 2)
    ),
    "gamma": lambda x: torch._standard_gamma(x.abs()),
    "geometric_": lambda x: x.clone().geometric_(0.5),
    "gumbel_softmax": F.gumbel_softmax,
    "log_normal_": lambda x: x.clone().log_normal_(),
    "lstm": lambda x: two_layers(x.view(-1, 1, 1))[0],
    "multinomial": lambda x: torch.multinomial(x.abs(), 5),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: torch.empty(16).normal_(),
    "poisson": lambda x: torch.poisson(x.abs()),
    "rand": lambda x: torch.rand(5),
    "rand out": lambda x: torch.rand(5, out=torch.empty(5)),
    "rand_like": torch.rand_like,
    "randint": lambda x: torch.randint(0, 9, (5,)),
    "randint_like": lambda x: torch.randint_like(x, 9),
    "randn": lambda x: torch.randn(64),
    "randn bfloat16": lambda x: torch.randn(5, dtype=torch.bfloat16),
    "randn complex": lambda x: torch.randn(5, dtype=torch.complex64),
    "randperm": lambda x: torch.randperm(7),
    "random_": lambda x: x.clone().random_(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        x.view(1, 1, 4, 4), x.view(1, 1, 4, 4), x.view(1, 1, 4, 4), dropout_p=0.5
    ),
    "svd_lowrank": lambda x: torch.svd_lowrank(x.view(4, 4), q=2)[1],
    "uniform_": lambda x: x.clone().uniform_(),
    "xavier": lambda x: nn.init.xavier_uniform_(torch.empty(3, 3)),
}


@pytest.mark.parametrize("kind", RANDOM)
def test_random_operators(kind):
    """From the same seed eager's numbers, also after a launch whose result is dead."""
    draw = RANDOM[kind]
    check(lambda x: (draw(x), torch.rand(2)), *normals(2, 16))

    def dead(x):
        draw(x)
        return torch.rand(2)

    check(dead, *normals(2, 16))


def test_fresh_numbers_at_every_replay():
    captured = capture(lambda x: x + torch.randn(8), torch.zeros(8))
    first, second = captured(torch.zeros(8)), captured(torch.zeros(8))
    assert not torch.equal(first, second)


def test_own_generator():
    generator = torch.Generator()

    def function(x):
        return x + torch.randn(4, generator=generator)

    captured = capture(function, torch.zeros(4))
    generator.manual_seed(5)
    replayed = [captured(torch.zeros(4)) for _ in range(2)]
    generator.manual_seed(5)
    expected = [function(torch.zeros(4)) for _ in range(2)]
    assert_same(replayed, expected)


def test_own_generator_drawn_from_twice():
    generator = torch.Generator()

    def function(x):
        return x + torch.randn(2, generator=generator) - torch.rand(2, generator=generator)

    captured = capture(function, torch.zeros(2))
    generator.manual_seed(5)
    got = captured(torch.zeros(2))
    generator.manual_seed(5)
    assert torch.equal(got, function(torch.zeros(2)))


def draws_from(x, generator):
    return x + torch.rand(2, generator=generator)


@pytest.mark.parametrize("how", ["position", "keyword", "object"])
def test_generator_as_an_argument(how):
    """Executions draw from the recorded generator, in its current state."""
    generator, other = torch.Generator(), torch.Generator()

    def call(function, one):
        if how == "object":
            return function(torch.zeros(2), {"generator": one})
        if how == "keyword":
            return function(torch.zeros(2), generator=one)
        return function(torch.zeros(2), one)

    def function(x, generator):
        return draws_from(x, generator["generator"] if how == "object" else generator)

    with torch.no_grad(), offload.capture(function) as captured:
        call(captured, generator)
    generator.manual_seed(5)
    got = [call(captured, generator) for _ in range(2)]
    generator.manual_seed(5)
    assert_same(got, [call(function, generator) for _ in range(2)])
    other.manual_seed(5)
    before = other.get_state(), generator.get_state()
    with pytest.raises(offload.BindingError, match="pass that one"):
        call(captured, other)
    assert_same((other.get_state(), generator.get_state()), before)


def test_generator_as_an_argument_in_a_file(tmp_path):
    captured = capture(draws_from, torch.zeros(2), torch.Generator())
    with pytest.raises(offload.FileError, match="generator of its own"):
        captured.save(tmp_path / "m.offload")


def test_generator_as_an_argument_that_the_forward_seeds():
    def function(x, generator):
        generator.manual_seed(3)
        return draws_from(x, generator)

    assert "generator" in refusal(function, normal(2), torch.Generator())


def seeded_in_the_forward(x):
    torch.manual_seed(3)
    return x + 1


def drawn_in_a_fork(x):
    with torch.random.fork_rng():
        return x + torch.randn(2)


def reseeded(x):
    torch.seed()
    return x + torch.randn(2)


def restored(x):
    torch.set_rng_state(torch.get_rng_state())
    return x + torch.randn(2)


def seeded_by_an_imported_name(x):
    manual_seed(0)
    return x + torch.randn(2)


@pytest.mark.parametrize(
    "function",
    [seeded_in_the_forward, drawn_in_a_fork, reseeded, restored, seeded_by_an_imported_name],
)
def test_seeding_is_refused_where_it_stands(function):
    """Also if the generator happens to be in that state already."""
    for seed in (0, 3):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        message = refusal(function, normal(2))
        assert "test_random_numbers.py:" in message
        assert "seeds or restores" in message
        torch.manual_seed(seed)
        assert torch.equal(torch.get_rng_state(), before)


def set_forward_by_hand(x, generator):
    generator.set_state(torch.Generator().manual_seed(8).get_state())
    return draws_from(x, generator)


def set_back_by_hand(x, generator):
    before = generator.get_state()
    drawn = draws_from(x, generator)
    generator.set_state(before)
    return drawn + torch.rand(2)


def set_back_after_much(x, generator):
    before = generator.get_state()
    drawn = x + torch.rand(5000, generator=generator)[:2]
    generator.set_state(before)
    return drawn


@pytest.mark.parametrize("function", [set_forward_by_hand, set_back_by_hand, set_back_after_much])
@pytest.mark.parametrize("n_drawn", [0, 5, 623, 1000])
def test_own_generators_that_are_restored_are_refused(function, n_drawn):
    generator = torch.Generator().manual_seed(4)
    torch.rand(n_drawn, generator=generator)
    assert "seeds or restores" in refusal(function, normal(2), generator)


def test_an_operator_that_does_not_say_that_it_draws():
    library = torch.library.Library("draws_unsaid", "FRAGMENT")
    library.define("noise(Tensor x) -> Tensor")
    library.define("noise_(Tensor(a!) x) -> ()")
    library.impl("noise", lambda x: x + torch.rand_like(x), "CPU")

    def noise_(x):
        x.uniform_()

    library.impl("noise_", noise_, "CPU")
    operators = torch.ops.draws_unsaid

    def function(x):
        made = operators.noise(x) * 2
        operators.noise_(made[:4])
        return made

    check(function, *normals(2, 16))


def test_memory_that_nobody_wrote_is_found_before_a_random_launch():
    """Also where the launch's own numbers are equal."""
    assert "uninitialised memory" in refusal(
        lambda x: x + torch.normal(torch.empty(8), 1.0), normal(8)
    )


def test_other_threads_may_seed():
    def function(x):
        thread = threading.Thread(target=torch.manual_seed, args=(7,))
        thread.start()
        thread.join()
        return x * 2

    generator, x = torch.random.default_generator, normal(2)
    torch.manual_seed(7)  # so that the state is the same before and after
    capture(function, x)
    assert torch.random.default_generator is generator


def own_seeded_generator(x):
    return x + torch.randn(2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "function",
    [
        seeded_in_the_forward,
        drawn_in_a_fork,
        own_seeded_generator,
    ],
)
def test_generators_moved_by_hand(function):
    """A forward that seeds or restores a generator itself."""
    assert "generator" in refusal(function, normal(2))


def test_dropout_module_in_training():
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.1, True))
    check(model, *normals(3, 4, 8), tolerance=1e-6)


def attention(x, dropout):
    heads = x.view(1, 1, 4, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=dropout)


def recurrent(x, *, train):
    """A recurrent layer with dropout between two layers only in training."""
    return torch._VF.lstm(
        x.view(4, 1, 4), [torch.zeros(2, 1, 3)] * 2, lstm_weights, True, 2, 0.5, train, False, False
    )[0]


lstm_weights = [one.detach() for one in nn.LSTM(4, 3, 2).parameters()]


@pytest.mark.parametrize(
    ("call", "draws"),
    [
        (lambda x: attention(x, 0.5), True),
        (lambda x: attention(x, 0.0), False),
        (lambda x: F.rrelu(x, training=True), True),
        (lambda x: torch.ops.aten.rrelu_with_noise(x, torch.empty_like(x), 0.1, 0.3, False), False),
        (lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0], True),
        (lambda x: torch.ops.aten.native_dropout(x, 0.5, None)[0], True),
        (lambda x: torch.ops.aten.native_dropout(x, 0.5, False)[0], False),
        (lambda x: recurrent(x, train=True), True),
        (lambda x: recurrent(x, train=False), False),
    ],
)
def test_what_drops_nothing_draws_nothing(call, draws):
    """torch tags fused attention and the like as random for any arguments."""
    x = torch.randn(16)
    with torch.no_grad(), offload.capture(call) as captured:
        captured(x)
        before = torch.get_rng_state()
        call(x)
    assert any(one.random for one in captured.program.launches) == draws
    assert torch.equal(before, torch.get_rng_state()) != draws


@pytest.mark.parametrize(
    ("parameter", "argument"),
    [
        ("bool training", False),
        ("bool train", False),
        ("float dropout_p", 0.0),
        ("Tensor dropout", torch.ones(3)),
    ],
)
def test_operators_of_others_draw_whatever_they_are_given(parameter, argument):
    """Their parameters may mean something else."""
    name = "noise_" + parameter.lower().replace(" ", "_")
    library = torch.library.Library("draws_test", "FRAGMENT")
    library.define(
        f"{name}(Tensor x, {parameter}) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
    )
    library.impl(name, lambda x, _: x + torch.rand_like(x), "CPU")
    library.impl(name, lambda x, _: torch.empty_like(x), "Meta")
    operator = getattr(torch.ops.draws_test, name)
    x = torch.randn(16)
    with torch.no_grad(), offload.capture(lambda x: operator(x, argument)) as captured:
        captured(x)
        run = captured.load("cpu")
        torch.manual_seed(1)
        expected = operator(x, argument)
        torch.manual_seed(1)
        assert torch.equal(run(x), expected)
    assert any(one.random for one in captured.program.launches)
