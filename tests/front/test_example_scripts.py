"""Training scripts as pytorch/examples has them: one line added, and losses and saved models stay what they were.

``word_language_model`` (five models, plain updates of ``p.data`` behind clipping, the whole model saved at each epoch)
and ``mnist_rnn`` (an LSTM over the rows of images, BatchNorm, Adadelta).
"""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradfree

WORDS, WIDTH, STRETCH, COLUMNS = 30, 8, 7, 4


class WordRNN(nn.Module):
    """Embedding, dropout, two recurrent layers, dropout, and the embedding again where weights are tied."""

    def __init__(self, kind, tied):
        super().__init__()
        self.kind, self.drop, self.encoder = kind, nn.Dropout(0.2), nn.Embedding(WORDS, WIDTH)
        layer = nn.RNN if kind.startswith("RNN") else getattr(nn, kind)
        own = {"nonlinearity": kind.removeprefix("RNN_").lower()} if kind.startswith("RNN") else {}
        self.rnn = layer(WIDTH, WIDTH, 2, dropout=0.2, **own)
        self.decoder = nn.Linear(WIDTH, WORDS)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, words, state):
        out, state = self.rnn(self.drop(self.encoder(words)), state)
        return F.log_softmax(self.decoder(self.drop(out)).flatten(0, 1), -1), state

    def first(self, columns):
        zeros = next(self.parameters()).new_zeros(2, columns, WIDTH)
        return (zeros, zeros.clone()) if self.kind == "LSTM" else zeros


class WordTransformer(nn.Transformer):
    """An ``nn.Transformer`` of which the encoder alone is used; its mask and its positions are its own."""

    def __init__(self):
        super().__init__(d_model=WIDTH, nhead=2, dim_feedforward=16, num_encoder_layers=3, dropout=0.2)
        self.embedding, self.decoder, self.mask = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS), None
        self.register_buffer("positions", torch.linspace(0, 9, 50 * WIDTH).sin().reshape(50, 1, WIDTH))

    def forward(self, words, state):
        if self.mask is None or len(self.mask) != len(words):
            self.mask = torch.log(torch.tril(torch.ones(len(words), len(words))))
        x = self.embedding(words) * math.sqrt(WIDTH) + self.positions[: len(words)]
        return F.log_softmax(self.decoder(self.encoder(x, mask=self.mask)).flatten(0, 1), -1), state

    def first(self, columns):
        return None


def build(kind, tied=False):
    torch.manual_seed(1111)
    return WordTransformer() if kind == "Transformer" else WordRNN(kind, tied)


def stretches(columns):
    words = (torch.arange(31 * columns) * 7 % WORDS).reshape(columns, 31).t()
    for start in range(0, 30, STRETCH):
        length = min(STRETCH, 30 - start)
        yield words[start : start + length], words[start + 1 : start + 1 + length].flatten()


def detached(state):
    return tuple(map(detached, state)) if isinstance(state, tuple) else None if state is None else state.detach()


def evaluate(model):
    model.eval()
    total, state = 0.0, model.first(2)
    with torch.no_grad():
        for words, targets in stretches(2):
            out, state = model(words, state)
            total += F.nll_loss(out, targets).item()
    return total


def run(model, file, optimizer=None):
    """Train for two epochs, saving the whole model behind each; return all losses, and the one of the model loaded."""
    losses = []
    for _ in range(2):
        model.train()
        state = model.first(COLUMNS)
        for words, targets in stretches(COLUMNS):
            model.zero_grad()
            state = detached(state)
            out, state = model(words, state)
            loss = F.nll_loss(out, targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            if optimizer:
                optimizer.step()
            else:
                for p in model.parameters():
                    if p.grad is not None:
                        p.data.add_(p.grad, alpha=-2.0)
            losses.append(loss.item())
        losses.append(evaluate(model))
        torch.save(model, file)
    with torch.serialization.safe_globals(OWN):
        loaded = torch.load(file)
    if isinstance(loaded, WordRNN):
        loaded.rnn.flatten_parameters()
    return [*losses, evaluate(loaded)]


OWN = [
    WordRNN,
    WordTransformer,
    F.relu,
    nn.Dropout,
    nn.Embedding,
    nn.GRU,
    nn.LayerNorm,
    nn.Linear,
    nn.LSTM,
    nn.ModuleList,
    nn.MultiheadAttention,
    nn.RNN,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
    nn.modules.linear.NonDynamicallyQuantizableLinear,
]
KINDS = ["RNN_TANH", "RNN_RELU", "LSTM", "GRU", "Transformer"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["backprop", "backprop, link by link", "fixed_point"])
def test_the_word_language_model_trains_to_the_same_losses(kind, engine, tmp_path):
    """And what it has saved loads with the classes of its own alone, and goes on as well."""
    expected = run(build(kind, tied=True), tmp_path / "plain.pt")
    model = build(kind, tied=True)
    options = {"backprop, link by link": {"plain": False}, "fixed_point": {"iterations": 50}}.get(engine, {})
    gradfree.create_engine(engine.partition(",")[0], **options).attach(model)  # The one line.
    torch.testing.assert_close(run(model, tmp_path / "attached.pt"), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_word_language_model_with_an_optimizer_trains_to_the_same_losses(kind, tmp_path):
    model = build(kind)
    expected = run(model, tmp_path / "plain.pt", torch.optim.AdamW(model.parameters(), lr=0.01))
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = gradfree.EngineOptimizer(optimizer, model, engine="backprop")  # The one line.
    torch.testing.assert_close(run(model, tmp_path / "attached.pt", optimizer), expected, rtol=1e-6, atol=1e-6)


class RowLSTM(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.norm = nn.LSTM(12, 16, batch_first=True), nn.BatchNorm1d(16)
        self.drop, self.hidden, self.out = nn.Dropout(0.25), nn.Linear(16, 8), nn.Linear(8, 10)

    def forward(self, images):
        rows, _ = self.rnn(images.reshape(-1, 12, 12))
        return F.log_softmax(self.out(F.relu(self.hidden(self.drop(self.norm(rows[:, -1]))))), -1)


def classify(engine):
    torch.manual_seed(1)
    model = RowLSTM()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=0.1)
    if engine:
        optimizer = gradfree.EngineOptimizer(optimizer, model, engine=engine)  # The one line.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    images, labels = torch.rand(40, 1, 12, 12), torch.arange(40) % 10
    losses = []
    for _ in range(3):
        model.train()
        for part in range(0, 40, 8):
            optimizer.zero_grad()
            loss = F.nll_loss(model(images[part : part + 8]), labels[part : part + 8])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(F.nll_loss(model(images), labels).item())
        scheduler.step()
    return losses, model.state_dict()


def test_the_lstm_over_the_rows_of_images_trains_to_the_same_losses():
    expected, plain = classify(None)
    losses, state = classify("backprop")
    torch.testing.assert_close(losses, expected, rtol=1e-8, atol=1e-8)
    assert state.keys() == plain.keys()
