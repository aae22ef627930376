"""Recurrent layers over lengths that vary: one launch each, with the bits of eager."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import offload
from offload.backends import CpuBackend
from offload.backends.dispatched import DispatchBackend

N = Dim("n", min=2, max=70)
SIZES = (2, 3, 8, 13, 33, 70)

STEPS = r"test_family_layers.*torch\.(gru|lstm) launches each of its steps"

LAYERS = {
    "gru": lambda: nn.GRU(8, 6, batch_first=True),
    "gru_of_two_layers": lambda: nn.GRU(8, 6, 2, batch_first=True, bidirectional=True),
    "gru_without_biases": lambda: nn.GRU(8, 6, bias=False, batch_first=True),
    "gru_of_doubles": lambda: nn.GRU(8, 6, batch_first=True, dtype=torch.float64),
    "gru_of_bfloat16": lambda: nn.GRU(8, 6, batch_first=True, dtype=torch.bfloat16),
    "gru_with_dropout_in_evaluation": lambda: nn.GRU(8, 6, 2, batch_first=True, dropout=0.5),
    "rnn": lambda: nn.RNN(8, 6, batch_first=True),
    "rnn_of_two_layers": lambda: nn.RNN(8, 6, 2, batch_first=True, bidirectional=True),
    "rnn_relu": lambda: nn.RNN(8, 6, batch_first=True, nonlinearity="relu"),
    "lstm": lambda: nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True),
    "lstm_of_doubles": lambda: nn.LSTM(8, 6, 2, batch_first=True, dtype=torch.float64),
    "lstm_of_bfloat16": lambda: nn.LSTM(8, 6, batch_first=True, dtype=torch.bfloat16),
    "projected_lstm": lambda: nn.LSTM(8, 6, 2, proj_size=4, batch_first=True, bidirectional=True),
}


def request(layer, n, n_rows=2):
    return torch.randn(n_rows, n, 8, dtype=next(layer.parameters()).dtype)


def same(got, expected):
    own, theirs = torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected)
    return len(own) == len(theirs) and all(map(torch.equal, own, theirs))


def names_of(captured):
    return [one.name for one in captured.program.launches]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers_over_a_length_have_eagers_bits(name, requires_grad):
    torch.manual_seed(0)
    layer = LAYERS[name]().eval().requires_grad_(requires_grad)
    captured = offload.capture(layer, request(layer, 7), dynamic_shapes=({1: N},))
    assert len(names_of(captured)) == len(set(names_of(captured)))
    run = captured.load(sizes=offload.Sizes())
    for n in (*SIZES, 3):
        x = request(layer, n)
        expected = layer(x)
        assert same(run(x), expected), n
        assert run(x)[0].stride() == expected[0].stride()


@torch.no_grad()
def test_states_and_the_batch_may_vary_too():
    layer = nn.GRU(8, 6, 2)
    batch = Dim("batch", min=1, max=9)
    shapes = ({0: N, 1: batch}, {1: batch})

    def request(n, n_rows):
        return torch.randn(n, n_rows, 8), torch.randn(2, n_rows, 6)

    captured = offload.capture(layer, *request(7, 3), dynamic_shapes=shapes)
    run = captured.load(sizes=offload.Sizes())
    for n, n_rows in ((2, 2), (5, 9), (33, 4), (70, 2), (12, 5), (5, 9)):
        given = request(n, n_rows)
        assert same(run(*given), layer(*given)), (n, n_rows)
    x, _ = request(5, 4)
    with pytest.raises(offload.BindingError, match="expected"):
        run(x, torch.randn(2, 3, 6))


@torch.no_grad()
def test_states_of_another_batch_are_guarded():
    layer = nn.RNN(8, 6)
    shapes = ({0: N, 1: Dim("b", min=2, max=9)}, {1: Dim("c", min=2, max=9)})
    captured = offload.capture(
        layer, torch.randn(7, 3, 8), torch.randn(1, 3, 6), dynamic_shapes=shapes
    )
    x, state = torch.randn(9, 5, 8), torch.randn(1, 5, 6)
    assert same(captured(x, state), layer(x, state))
    with pytest.raises(offload.BindingError, match=r"b = 5.*test_family_layers"):
        captured(x, state[:, :4].contiguous())


@torch.no_grad()
def test_the_batch_alone_may_vary():
    layer = nn.GRU(8, 6, batch_first=True)
    captured = offload.capture(layer, torch.randn(3, 7, 8), dynamic_shapes=({0: N},))
    assert names_of(captured) == ["aten::gru.input"]
    for n_rows in SIZES:
        x = torch.randn(n_rows, 7, 8)
        assert same(captured(x), layer(x)), n_rows


class Both(nn.Module):
    """A layer over a length that varies, and one over rows of four."""

    def __init__(self):
        super().__init__()
        self.rows, self.all = nn.GRU(2, 4, batch_first=True), nn.GRU(4, 3, batch_first=True)

    def forward(self, x):
        rows = self.rows(x.reshape(-1, 4, 2))[0][:, -1]
        return self.all(rows.view(1, -1, 4))[0]


@torch.no_grad()
def test_layers_whose_steps_or_rows_vary_in_one_model():
    model = Both()
    captured = offload.capture(model, torch.randn(7, 8), dynamic_shapes=({0: N},))
    names = names_of(captured)
    assert names.count("aten::gru.input") == 2
    for n in SIZES:
        x = torch.randn(n, 8)
        assert torch.equal(captured(x), model(x)), n


@torch.no_grad()
def test_layers_called_as_functions_and_states_that_are_used():
    weights = [one.detach() for one in nn.GRU(8, 8).parameters()]

    def decode(x, state):
        output, last = torch.gru(x, state, weights, True, 1, 0.0, False, False, True)
        again, last = torch.gru(output * 2, last, weights, True, 1, 0.0, False, False, True)
        return again + x, last.sum(0)

    shapes = ({1: N}, None)
    state = torch.randn(1, 2, 8)
    captured = offload.capture(decode, torch.randn(2, 7, 8), state, dynamic_shapes=shapes)
    assert names_of(captured).count("aten::gru.input") == 2
    for n in SIZES:
        x = torch.randn(2, n, 8)
        assert same(captured(x, state), decode(x, state)), n


@torch.no_grad()
def test_a_length_that_is_computed():
    class Recognizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolve = nn.Conv1d(8, 8, 3, stride=2, padding=1)
            self.read = nn.GRU(8, 5, batch_first=True, bidirectional=True)

        def forward(self, x):
            return self.read(self.convolve(x).transpose(1, 2))[0].log_softmax(-1)

    model = Recognizer().eval()
    captured = offload.capture(model, torch.randn(2, 8, 9), dynamic_shapes=({2: N},))
    for n in (3, 4, 8, 13, 33, 70):  # of 2 frames one is left, which takes a path of its own
        x = torch.randn(2, 8, n)
        assert torch.equal(captured(x), model(x)), n


@pytest.mark.parametrize("requires_grad", [True, False])
@torch.no_grad()
def test_launches_that_the_host_delivers_have_eagers_bits(requires_grad):
    layer = nn.GRU(8, 6, 2, batch_first=True).eval().requires_grad_(requires_grad)
    captured = offload.capture(layer, request(layer, 7), dynamic_shapes=({1: N},))
    dispatching = DispatchBackend("dispatched", CpuBackend().machine, "cpu")
    run = captured.load(dispatching, sizes=offload.Sizes())
    assert {one.mode for one in run.launch_reports()} == {"dispatched"}
    for n in (*SIZES, 3):
        x = request(layer, n)
        assert same(run(x), layer(x)), n


@pytest.mark.parametrize("requires_grad", [True, False])
@torch.no_grad()
def test_files_promotion_and_memory(tmp_path, requires_grad):
    layer = nn.GRU(8, 6, 2, batch_first=True).eval().requires_grad_(requires_grad)
    captured = offload.capture(layer, request(layer, 7), dynamic_shapes=({1: N},))
    captured.save(tmp_path / "layer.offload")
    opened = offload.open(tmp_path / "layer.offload")
    run = opened.load(sizes=offload.Sizes())
    one = captured.load()
    one(request(layer, 7))
    assert one.memory_report().outside_bytes > 0
    for n in SIZES:
        x = request(layer, n)
        assert same(run(x), layer(x)), n
    with captured.load(sizes=offload.Sizes(promoted="64MiB"), fuse=True) as promoted:
        for n in (5, 9, 5):
            x = request(layer, n)
            assert same(promoted(x), layer(x))


@pytest.mark.parametrize(
    ("layer", "is_training"),
    [(nn.GRU(8, 8, 2, dropout=0.5), True), (nn.LSTM(8, 8, 2, dropout=0.5), True)],
)
def test_dropout_between_layers_is_refused(layer, is_training):
    layer.train(is_training)
    with (
        torch.no_grad(),
        pytest.raises(offload.CaptureError, match=STEPS),
    ):
        offload.capture(layer, torch.randn(7, 2, 8), dynamic_shapes=({0: N},))


@pytest.mark.parametrize("layer", [nn.GRU(8, 8), nn.LSTM(8, 8, dtype=torch.float64)])
def test_layers_whose_gradients_are_needed_are_refused(layer):
    def gradients(x):
        with torch.enable_grad():
            output = layer(x)[0].sum()
            return torch.autograd.grad(output, layer.weight_hh_l0)[0]

    x = torch.randn(7, 2, 8, dtype=next(layer.parameters()).dtype)
    with pytest.raises(offload.CaptureError, match=STEPS):
        offload.capture(gradients, x, dynamic_shapes=({0: N},))


def test_layers_under_autocast_are_refused():
    layer = nn.GRU(8, 8)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(offload.CaptureError, match=STEPS),
    ):
        offload.capture(layer, torch.randn(7, 2, 8), dynamic_shapes=({0: N},))


def test_packed_sequences_and_cells_are_refused():
    layer, cell = nn.GRU(8, 8, batch_first=True), nn.GRUCell(8, 8)

    def packed(x, lengths):
        return layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data

    def by_cells(x):
        state = torch.zeros(x.shape[1], 8)
        for one in x:
            state = cell(one, state)
        return state

    x = torch.randn(2, 7, 8)
    with torch.no_grad():
        with pytest.raises(offload.CaptureError, match="host"):
            offload.capture(packed, x, torch.tensor([7, 4]), dynamic_shapes=({1: N}, None))
        with pytest.raises(offload.CaptureError, match=r"may not vary.*test_family_layers"):
            offload.capture(by_cells, x, dynamic_shapes=({0: N},))


def test_a_layer_of_no_steps_is_refused_as_eager_refuses_it():
    layer = nn.GRU(8, 8)
    with torch.no_grad():
        captured = offload.capture(
            layer, torch.randn(7, 2, 8), dynamic_shapes=({0: Dim("n", min=0, max=9)},)
        )
        with pytest.raises(offload.BindingError, match="n = 0: expected"):
            captured(torch.randn(0, 2, 8))
        assert same(captured(x := torch.randn(1, 2, 8)), layer(x))


def test_a_capture_outside_of_no_grad_records_no_gradients():
    layer = nn.GRU(8, 6, batch_first=True)
    captured = offload.capture(layer, torch.randn(2, 7, 8), dynamic_shapes=({1: N},))
    for n in SIZES:
        x = torch.randn(2, n, 8)
        got = captured(x)
        with torch.no_grad():
            expected = layer(x)
        assert same(got, expected), n
        assert not got[0].requires_grad


@pytest.mark.parametrize("is_made_so", [True, False])
@pytest.mark.parametrize("is_captured_so", [True, False])
@pytest.mark.parametrize("is_loaded_so", [True, False])
def test_inference_mode_changes_no_bits(is_made_so, is_captured_so, is_loaded_so):
    """Neither of who makes the weights, nor of who captures, or loads."""
    with torch.inference_mode(is_made_so):
        layer = nn.GRU(8, 6, batch_first=True).eval()
    with torch.inference_mode(is_captured_so), torch.no_grad():
        captured = offload.capture(layer, request(layer, 9), dynamic_shapes=({1: N},))
    with torch.inference_mode(is_loaded_so), torch.no_grad():
        run = captured.load(sizes=offload.Sizes())
    for n in (9, 33, 2):
        x = request(layer, n)
        with torch.no_grad():
            assert same(run(x), layer(x)), n
        with torch.inference_mode():
            assert same(run(x), layer(x)), n


class Headed(nn.Module):
    """A recurrent layer before a linear layer."""

    def __init__(self, kind: type[nn.Module], *, batch_first: bool, copies: bool) -> None:
        super().__init__()
        self.layer, self.head = kind(8, 6, batch_first=batch_first), nn.Linear(6, 4)
        self.copies = copies

    def forward(self, x, state):
        y, _ = self.layer(x, (state, state) if isinstance(self.layer, nn.LSTM) else state)
        if self.copies:
            y = y.clone(memory_format=torch.contiguous_format)
        return self.head(y)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_first", "copies"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@torch.no_grad()
def test_one_step_of_a_layer_with_a_given_state_before_a_linear_layer(kind, batch_first, copies):
    """With the batch first torch copies the linear layer's input, except at one step."""
    model = Headed(kind, batch_first=batch_first, copies=copies).eval()

    def given(n):
        x, state = torch.randn(n, 2, 8), torch.randn(1, 2, 6)
        return x.transpose(0, 1).contiguous() if batch_first else x, state

    shapes = {"x": {int(batch_first): Dim("n", min=1, max=64)}, "state": None}
    captured = offload.capture(model, *given(7), dynamic_shapes=shapes)
    for n in (2, 33, 64):
        args = given(n)
        assert torch.equal(captured(*args), model(*args))
    args = given(1)
    if batch_first and not copies:
        with pytest.raises(offload.BindingError, match=r"n = 1: expected n != 1"):
            captured(*args)
        names = [
            [launch.name for launch in offload.capture(model, *given(n)).program.launches]
            for n in (7, 1)
        ]
        assert "aten::clone" in names[0]
        assert "aten::clone" not in names[1]  # other launches: the refusal is right
    else:
        assert torch.equal(captured(*args), model(*args))
