"""``Trainer(strategy=...)`` with an unmodified LightningModule."""

import pickle
from contextlib import nullcontext

import lightning.fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning_runs import fit, fresh, is_bare, quiet, trainer
from plain_modules import Net, PlainModule
from torch import nn

import gradfree
import gradfree.lightning

pytestmark = quiet


def exact():
    return gradfree.lightning.EngineStrategy("highway_bp", iterations=4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
        {"precision": "64-true"},
        {"precision": "bf16-mixed"},
    ],
)
def test_an_exact_engine_trains_like_lightning_without_an_engine(tmp_path, options):
    expected = fit(tmp_path, **options)
    tolerance = 0.02 if options.get("precision") == "bf16-mixed" else 1e-6
    for strategy in ("backprop", exact()):
        torch.testing.assert_close(fit(tmp_path, strategy, **options), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("precision", "fits"), [("64-true", True), ("bf16-true", False)])
def test_a_tolerance_is_checked_against_the_dtype_of_training(tmp_path, precision, fits):
    engine = gradfree.create_engine("shooting", tolerance=1e-12 if fits else 1e-5)
    run = trainer(tmp_path, engine, precision=precision)
    with nullcontext() if fits else pytest.raises(gradfree.ChainError, match="finest tolerance"):
        run.fit(fresh("time"))


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_every_engine_is_a_strategy_in_every_namespace(namespace):
    strategies = pytest.importorskip(f"{namespace}.strategies")
    names = strategies.StrategyRegistry.available_strategies()
    assert "auto" not in names  # It has another meaning in Lightning.
    engines = ["auto_engine" if name == "auto" else name for name in gradfree.list_engines()]
    assert {name + suffix for name in engines for suffix in ("", "_ddp")} <= set(names)


@pytest.mark.parametrize("by_name", [True, False])
def test_pytorch_lightning_trains_too(tmp_path, by_name):
    """The older name's Trainer and modules, which are other classes than lightning.pytorch's.

    Not DDP: in this process it would leave a process group and its environment to the tests that follow.
    """
    older = pytest.importorskip("pytorch_lightning")

    def __init__(self, kind):
        older.LightningModule.__init__(self)
        self.net = Net(kind)
        self.save_hyperparameters({"lr": 0.1, "batch_size": 8})

    ours = {name: vars(PlainModule)[name] for name in ("loss", "training_step", "configure_optimizers")}
    kind = type("Older", (older.LightningModule,), {"__init__": __init__, **ours})
    strategy = "highway_bp" if by_name else gradfree.lightning.EngineStrategy("highway_bp", iterations=1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    run = older.Trainer(strategy=strategy, devices=1, max_epochs=1, default_root_dir=tmp_path, **quiet)
    run.fit(fresh("blocks", kind), PlainModule("blocks").train_dataloader())
    assert run.strategy.handle.chains["net.middle"].solved
    assert isinstance(run.strategy, older.strategies.Strategy)
    assert by_name or run.strategy is strategy
    (saved,) = tmp_path.rglob("*.ckpt")
    assert "gradfree" in torch.load(saved, weights_only=False)


class Counting(pl.strategies.SingleDeviceStrategy):
    """A user's strategy."""

    def __init__(self, mark, **kwargs):
        super().__init__(**kwargs)
        self.mark, self.backwards = mark, 0

    def backward(self, *args, **kwargs):
        self.backwards += 1
        return super().backward(*args, **kwargs)


def test_an_engine_works_on_any_strategy_class(tmp_path):
    strategy = gradfree.lightning.engine_strategy("highway_bp", base=Counting, iterations=4, mark="mine")
    torch.testing.assert_close(fit(tmp_path, strategy), fit(tmp_path))
    assert isinstance(strategy, Counting)
    assert (strategy.mark, strategy.backwards) == ("mine", 16)
    assert strategy.engine == gradfree.create_engine("highway_bp", iterations=4)


def test_strategies_pickle():
    """Spawned processes get pickled strategies, although their classes are created at run time."""
    for strategy in (exact(), gradfree.lightning.EngineDDPStrategy("dsf", feedback=0.5, static_graph=True)):
        copied = pickle.loads(pickle.dumps(strategy))
        assert type(copied) is type(strategy)
        assert copied.engine == strategy.engine


def test_wrong_options_raise_and_list_the_known_ones():
    with pytest.raises(TypeError, match=r"argument 'iteration'. Options of 'highway_bp': iterations, tolerance, segm"):
        gradfree.lightning.EngineStrategy("highway_bp", iteration=4)
    with pytest.raises(TypeError, match=r"Did you mean 'iterations'\?"):
        gradfree.lightning.EngineStrategy("highway_bp", iteration=4)
    for kind in (gradfree.lightning.EngineDDPStrategy, gradfree.lightning.LayerParallelStrategy):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}: .*'iteration'.*Did you mean 'iterations'\?"):
            kind("highway_bp", iteration=4)
        with pytest.raises(TypeError, match=r"Did you mean 'static_graph'\?"):
            kind("highway_bp", static_graphs=True)
    with pytest.raises(ValueError, match="no engine is called 'highway'"):
        gradfree.lightning.EngineStrategy("highway")
    for base in (dict, lightning.fabric.strategies.SingleDeviceStrategy):
        with pytest.raises(TypeError, match=r"a strategy class of Lightning's Trainer.* before fabric.setup\(model\)"):
            gradfree.lightning.engine_strategy("highway_bp", base=base)


def test_validation_runs_without_an_engine_and_training_refuses_a_model_without_a_chain(tmp_path):
    module = fresh("layers")
    module.net.middle = nn.Linear(8, 8)
    trainer(tmp_path, strategy="highway_bp").validate(module, verbose=False)
    with pytest.raises(gradfree.ChainError, match="no chain that can be found"):
        trainer(tmp_path, strategy="highway_bp").fit(module)


def test_an_exception_in_training_leaves_the_module_detached(tmp_path):
    class Failing(PlainModule):
        def training_step(self, batch, index):
            raise ArithmeticError("on purpose")

    module = Failing("blocks")
    with pytest.raises(ArithmeticError):
        trainer(tmp_path, strategy="highway_bp").fit(module)
    assert is_bare(module)


def test_several_devices_or_nodes_are_refused(tmp_path):
    """Lightning alone would silently use one device for devices=2."""
    with pytest.raises(ValueError, match=r"on one device, but was given devices=2\. Use the strategy '<engine>_ddp'"):
        trainer(tmp_path, strategy="highway_bp", devices=2)
    with pytest.raises(ValueError, match=r"num_nodes=2"):
        trainer(tmp_path, strategy="highway_bp", num_nodes=2)


def test_chains_are_named_as_paths_of_the_lightning_module(tmp_path):
    strategy = gradfree.lightning.EngineStrategy("highway_bp", chains=["middle"])
    with pytest.raises(gradfree.ChainError, match=r"no module 'middle'. Did you mean 'net.middle'"):
        trainer(tmp_path, strategy=strategy).fit(fresh("blocks"))
    fit(tmp_path, gradfree.lightning.EngineStrategy("highway_bp", chains=["net.middle"]))
