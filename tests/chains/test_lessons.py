"""Lessons: targets and losses that engines get, tensors of their own that learn, and passes that run again."""

from dataclasses import dataclass, replace
from typing import ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradfree
from gradfree.benchmarks.records.case import Row
from gradfree.benchmarks.tasks.catalogue import DIGITS
from gradfree.benchmarks.training.comparison import Trial
from gradfree.testing.cases.models import plain_model

SEEN = []


@dataclass(frozen=True, kw_only=True)
class Curious(gradfree.Engine):
    """Exact gradients; notes the lessons that it gets."""

    needs: ClassVar = ("targets",)

    def gradients(self, chain, direct):
        SEEN.append(chain.lesson)
        return chain.backpropagate(direct)


@dataclass(frozen=True, kw_only=True)
class Wanting(Curious):
    needs: ClassVar = ("loss", "targets")


@dataclass(frozen=True, kw_only=True)
class Counting(gradfree.Engine):
    """Exact gradients times the number of times that it has learnt."""

    def learn(self, chain, memory):
        own = memory.of("counting")
        own[chain.path] = own.get(chain.path, torch.zeros(())) + 1

    def gradients(self, chain, direct):
        exact = chain.backpropagate(direct)
        count = chain.memory.of("counting").get(chain.path, torch.zeros(()))
        return exact._replace(parameters=[None if g is None else g * count for g in exact.parameters])


@pytest.fixture(autouse=True)
def _nothing_seen():
    SEEN.clear()


def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


def test_an_engine_gets_the_targets_and_the_loss_inside_the_with_only():
    model, x, y = net(), torch.randn(4, 6), torch.randint(6, (4,))

    def loss():
        return cross_entropy(model(x), y)

    with Wanting().attach(model) as handle:
        with handle.lesson(targets=y, loss=loss):
            loss().backward()
        assert SEEN[0].targets is y
        assert SEEN[0].evaluate(x.device) == loss()
        with pytest.raises(gradfree.ChainError, match=r"the loss of the batch.*handle.lesson\(loss=f\)"):
            loss().backward()
        with handle.lesson(loss=loss), pytest.raises(gradfree.ChainError, match=r"lesson\(targets=y\)"):
            loss().backward()
        with handle.exactly():
            loss().backward()
    assert len(SEEN) == 1


def test_the_loss_is_evaluated_with_the_same_masks_and_leaves_no_trace():
    model = nn.Sequential(net(), nn.Dropout(0.5), nn.BatchNorm1d(6))
    x = torch.randn(8, 6)
    with Wanting().attach(model) as handle, handle.lesson(0, lambda: model(x).pow(3).sum()):
        loss = model(x).pow(3).sum()
        buffers, random = [b.clone() for b in model.buffers()], torch.get_rng_state()
        loss.backward()
        first, second = (SEEN[0].evaluate(x.device) for _ in range(2))
    assert first == second
    assert not first.requires_grad
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(buffers, model.buffers(), strict=True))
    with Wanting().attach(model) as handle, handle.lesson(0, lambda: model(x)):
        model(x).sum().backward()
        with pytest.raises(gradfree.ChainError, match="must return one number"):
            SEEN[-1].evaluate(x.device)


def test_fidelity_gives_the_targets_and_the_loss():
    batch = torch.randn(4, 6), torch.randint(6, (4,))
    fidelity = gradfree.gradient_fidelity(Wanting(), net(), cross_entropy, batch)
    assert fidelity.total.relative_error < 1e-12
    assert SEEN[0].targets is batch[1]
    assert SEEN[0].loss().requires_grad


def test_the_bench_gives_the_targets_and_the_loss(monkeypatch):
    task = replace(DIGITS, steps=1, dtype="float64")
    monkeypatch.setattr(Row, "create_engine", lambda self: Wanting())
    Trial(task=task, row=Row("wanting", "wanting", {}), device="cpu").run()
    lesson = SEEN[-1]
    assert lesson.targets.shape == (task.batch_size,)
    assert torch.isfinite(lesson.loss())


class Training(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()

    def training_step(self, batch, batch_idx):
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore")
def test_a_strategy_gives_the_targets_of_a_batch(tmp_path):
    strategy = gradfree.lightning.EngineStrategy(Curious())
    trainer = pl.Trainer(
        strategy=strategy,
        max_steps=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    data = TensorDataset(torch.randn(8, 6), torch.arange(8) % 6)
    trainer.fit(Training().double(), DataLoader(data, batch_size=4))
    assert [lesson.targets.tolist() for lesson in SEEN] == [[0, 1, 2, 3], [4, 5, 0, 1]]


def test_an_engine_learns_once_each_step_of_the_optimizer():
    model, x = net(), torch.randn(4, 6)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)

    def pass_():
        model.zero_grad()
        model(x).sum().backward()
        return model[0][0].weight.grad.clone()

    with Counting().attach(model) as handle:
        once = pass_()
        assert torch.equal(pass_(), once)  # No step in between.
        optimizer.step()
        torch.testing.assert_close(pass_(), 2 * once)
        with handle.frozen():
            optimizer.step()
            torch.testing.assert_close(pass_(), 2 * once)
        torch.testing.assert_close(pass_(), 3 * once)
        kept = handle.state_dict()
    with Counting().attach(model) as handle:
        handle.load_state_dict(kept)
        torch.testing.assert_close(pass_(), 4 * once)


def test_a_comparison_of_gradients_does_not_make_an_engine_learn():
    model, x = net(), torch.randn(4, 6)
    with Counting().attach(model) as handle:
        gradfree.fidelity.loss_fidelity(model(x).sum(), model, handle)
        assert handle.state_dict() == {}
        model(x).sum().backward()
        assert handle.state_dict() != {}


class Rerunning(gradfree.Engine):
    def gradients(self, chain, direct):
        SEEN.append(chain.run())
        SEEN.append(chain.run(parameters=[2 * p.detach() for p in chain.parameters]))
        SEEN.append(chain.run(initial=torch.zeros_like(chain.run()[0])))
        return chain.backpropagate(direct)


@pytest.mark.parametrize("batched", [False, True])
def test_a_chain_of_blocks_runs_again(batched):
    model, x = net(), torch.randn(4, 6)
    engine = type("Sweeping", (Rerunning, gradfree.SweepEngine), {"sweeps": 0, "split": lambda self, chain: None})()
    with engine.attach(model, [""], batched=batched):
        model(x).sum().backward()
    again, doubled, from_zero = SEEN
    states, others, zeros = [x], [x], [torch.zeros(4, 6)]
    for block in model:
        states.append(block(states[-1]))
        others.append(torch.func.functional_call(block, {n: 2 * p for n, p in block.named_parameters()}, others[-1]))
        zeros.append(block(zeros[-1]))
    for found, expected in ((again, states), (doubled, others), (from_zero, zeros)):
        assert not any(h.requires_grad for h in found)
        torch.testing.assert_close(found, expected[1:])


def test_blocks_leave_buffers_and_random_states_when_they_run_again():
    model = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)) for _ in range(2))
    h = torch.randn(4, 6)
    with Rerunning().attach(model, [""]):
        for block in model:
            h = block(h)
        before, random = [b.clone() for b in model.buffers()], torch.get_rng_state()
        h.sum().backward()
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


def test_blocks_with_other_arguments_cannot_run_again():
    model = plain_model()
    with Rerunning().attach(model), pytest.raises(gradfree.ChainError, match="called with other arguments"):
        model(torch.randn(4, 6), torch.ones(6)).sum().backward()


def test_a_chain_of_layers_runs_again_with_its_dropout_masks():
    from gradfree.engines.layered import LayerEngine

    class Layers(LayerEngine):
        def layer_gradients(self, chain, error):
            SEEN.extend([chain.run(), [link.out for link in chain.links], chain.run(initial=chain.recording.initial)])
            SEEN.append(chain.run(parameters=[p.detach() for p in chain.parameters]))
            return chain.backpropagate([None] * (len(chain) - 1) + [error])

    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))
    with Layers().attach(model):
        model(torch.randn(5, 6)).sum().backward()
    again, outs, from_input, other_masks = SEEN
    for states in (again, from_input):
        for found, out in zip(states, outs, strict=True):
            if not out.is_meta:
                torch.testing.assert_close(found, out.detach())
    assert not torch.equal(other_masks[-1], outs[-1])
