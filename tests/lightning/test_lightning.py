"""``Trainer(strategy=...)`` with an unmodified LightningModule."""

import pickle

import lightning.pytorch as pl
import pytest
import torch
from classifier_runs import ResidualClassifier, fit, loader, trainer
from forked_scripts import Script
from lightning_runs import is_bare
from torch import nn

import gradfree
import gradfree.lightning

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"
    )
]


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
def test_an_exact_engine_trains_as_plain_lightning_does(tmp_path, options):
    expected = fit(tmp_path, "auto", **options)
    tolerance = 0.02 if options.get("precision") == "bf16-mixed" else 1e-6
    for strategy in ("backprop", gradfree.lightning.EngineStrategy("backprop", plain=False), exact()):
        torch.testing.assert_close(fit(tmp_path, strategy, **options), expected, rtol=tolerance, atol=tolerance)


def test_the_name_means_the_engine_with_its_default_options(tmp_path):
    by_name = fit(tmp_path, "truncated")
    by_instance = fit(tmp_path, gradfree.lightning.EngineStrategy(gradfree.create_engine("truncated")))
    assert torch.equal(by_name, by_instance)
    assert not torch.allclose(by_name, fit(tmp_path, "auto"))


REGISTRIES = {
    "lightning.pytorch": "StrategyRegistry",
    "pytorch_lightning": "StrategyRegistry",
    "lightning.fabric": "STRATEGY_REGISTRY",
    "lightning_fabric": "STRATEGY_REGISTRY",
}


@pytest.mark.parametrize("namespace", REGISTRIES)
def test_every_engine_is_a_strategy_in_every_namespace(namespace):
    strategies = pytest.importorskip(f"{namespace}.strategies")
    names = getattr(strategies, REGISTRIES[namespace]).available_strategies()
    # Lightning's own "auto" is another thing.
    engines = ["auto_engine" if name == "auto" else name for name in gradfree.list_engines()]
    assert {name + suffix for name in engines for suffix in ("", "_ddp")} <= set(names)


@pytest.mark.parametrize(
    "make",
    [
        lambda: "highway_bp",
        lambda: gradfree.lightning.EngineStrategy("highway_bp", iterations=1),
        lambda: gradfree.lightning.EngineDDPStrategy("highway_bp", iterations=1, process_group_backend="gloo"),
    ],
    ids=["by name", "with options", "with options, DDP"],
)
def test_pytorch_lightning_trains_too(tmp_path, make):
    """The older name's Trainer and modules, which are other classes than lightning.pytorch's."""
    older = pytest.importorskip("pytorch_lightning")
    members = {name: ResidualClassifier.__dict__[name] for name in ("training_step", "configure_optimizers")}

    def __init__(self):
        older.LightningModule.__init__(self)
        self.net = ResidualClassifier().net
        self.attached = []

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    module = type("Older", (older.LightningModule,), {"__init__": __init__, **members})()
    strategy = make()
    trainer = older.Trainer(strategy=strategy, devices=1, max_epochs=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(module, loader())
    assert module.attached
    assert all(module.attached)
    assert isinstance(trainer.strategy, older.strategies.Strategy)
    if not isinstance(strategy, str):
        assert trainer.strategy is strategy
        assert strategy.engine == gradfree.create_engine("highway_bp", iterations=1)
    (saved,) = tmp_path.rglob("*.ckpt")
    assert "gradfree" in torch.load(saved, weights_only=False)


class Counting(pl.strategies.SingleDeviceStrategy):
    """Somebody's own strategy."""

    def __init__(self, mark, **kwargs):
        super().__init__(**kwargs)
        self.mark, self.backwards = mark, 0

    def backward(self, *args, **kwargs):
        self.backwards += 1
        return super().backward(*args, **kwargs)


def test_an_engine_rides_on_any_strategy(tmp_path):
    strategy = gradfree.lightning.engine_strategy("highway_bp", base=Counting, iterations=4, mark="mine")
    torch.testing.assert_close(fit(tmp_path, strategy), fit(tmp_path, "auto"))
    assert isinstance(strategy, Counting)
    assert (strategy.mark, strategy.backwards) == ("mine", 8)
    assert strategy.engine == gradfree.create_engine("highway_bp", iterations=4)


def test_strategies_pickle():
    """Spawned processes get them that way, though their classes are made at run time."""
    for strategy in (exact(), gradfree.lightning.EngineDDPStrategy("dsf", feedback=0.5, static_graph=True)):
        copied = pickle.loads(pickle.dumps(strategy))
        assert type(copied) is type(strategy)
        assert copied.engine == strategy.engine


def test_wrong_options_name_the_right_ones():
    with pytest.raises(
        TypeError, match=r"neither 'highway_bp' nor SingleDeviceStrategy has an option 'iteration'; the e"
    ):
        gradfree.lightning.EngineStrategy("highway_bp", iteration=4)
    with pytest.raises(ValueError, match="no engine is called 'highway'"):
        gradfree.lightning.EngineStrategy("highway")
    with pytest.raises(TypeError, match="base must be a strategy class of Lightning or Fabric"):
        gradfree.lightning.engine_strategy("highway_bp", base=dict)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--trainer.strategy=highway_bp"],
        ["--trainer.strategy.class_path=gradfree.lightning.EngineStrategy", "--trainer.strategy.init_args.engine=dsf"],
        [
            "--trainer.strategy.class_path=gradfree.lightning.EngineStrategy",
            "--trainer.strategy.init_args.engine=highway_bp",
            "--trainer.strategy.dict_kwargs.iterations=4",
        ],
    ],
)
def test_lightning_cli_takes_engines(tmp_path, arguments):
    from lightning.pytorch.cli import LightningCLI

    cli = LightningCLI(
        ResidualClassifier, run=False, save_config_callback=None, args=[*arguments, "--trainer.accelerator=cpu"]
    )
    assert cli.trainer.strategy.engine == gradfree.create_engine(
        "dsf" if "dsf" in arguments[-1] else "highway_bp", **({"iterations": 4} if len(arguments) == 3 else {})
    )


@pytest.mark.processes
@pytest.mark.slow
def test_it_may_be_imported_before_lightning(tmp_path):
    """All other tests import Lightning first."""
    (tmp_path / "first.py").write_text(
        "import sys\n"
        "assert not {'lightning', 'pytorch_lightning', 'gradfree.lightning'} & sys.modules.keys()\n"
        "import gradfree.lightning, lightning\n"
        "lightning.Trainer(strategy='highway_bp', accelerator='cpu', logger=False)\n"
    )
    status, said = Script(tmp_path / "first.py").ended()
    assert status == 0, said


def test_checkpoints_are_those_of_an_ordinary_run(tmp_path):
    torch.manual_seed(0)
    model = ResidualClassifier()
    run = trainer(tmp_path, strategy="highway_bp", enable_checkpointing=True)
    run.fit(model, loader())
    checkpoint = torch.load(run.checkpoint_callback.best_model_path, weights_only=True)
    ResidualClassifier().load_state_dict(checkpoint["state_dict"])


class Recurrent(ResidualClassifier):
    """Takes its images as sequences, so that DSF has a gate to remember."""

    def __init__(self):
        super().__init__()
        rnn = nn.GRU(1, 16, batch_first=True)
        self.net = nn.ModuleDict({"rnn": rnn, "head": nn.Linear(16, 3)})

    def training_step(self, batch, index):
        out = self.net["rnn"](batch[0].unsqueeze(-1))[0][:, -1]
        return nn.functional.cross_entropy(self.net["head"](out), batch[1])

    def validation_step(self, batch, index):
        pass


def test_what_an_engine_remembers_is_in_the_checkpoint(tmp_path):
    def strategy():
        return gradfree.lightning.EngineStrategy("dsf", feedback="gate")

    def weights(model):
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    torch.manual_seed(0)
    whole = Recurrent()
    trainer(tmp_path, strategy=strategy(), max_epochs=2).fit(whole, loader())
    torch.manual_seed(0)
    half = Recurrent()
    run = trainer(tmp_path, strategy=strategy(), max_epochs=1, enable_checkpointing=True)
    run.fit(half, loader())
    path = run.checkpoint_callback.best_model_path
    assert torch.load(path, weights_only=True)["gradfree"]["net.rnn"]["mean of 0.0.0"].shape == (16,)
    resumed = Recurrent()
    trainer(tmp_path, strategy=strategy(), max_epochs=2).fit(resumed, loader(), ckpt_path=path)
    assert torch.equal(weights(resumed), weights(whole))


def test_validation_and_prediction_need_no_chain(tmp_path):
    class NoChain(ResidualClassifier):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 3)

    trainer(tmp_path, strategy="highway_bp").validate(NoChain(), loader(), verbose=False)
    with pytest.raises(gradfree.ChainError, match="no chain that can be found"):
        trainer(tmp_path, strategy="highway_bp").fit(NoChain(), loader())


def test_an_exception_in_training_leaves_the_module_detached(tmp_path):
    class Failing(ResidualClassifier):
        def training_step(self, batch, index):
            raise ArithmeticError("on purpose")

    model = Failing()
    with pytest.raises(ArithmeticError):
        trainer(tmp_path, strategy="highway_bp").fit(model, loader())
    assert is_bare(model)


@pytest.mark.parametrize("name", ["backprop", "highway_bp"])
def test_several_devices_or_nodes_are_refused(tmp_path, name):
    """Lightning would take devices=2 for one without a word."""
    with pytest.raises(ValueError, match=r"on one device, but was given devices=2\. Use the strategy '<engine>_ddp'"):
        trainer(tmp_path, strategy=name, devices=2)
    with pytest.raises(ValueError, match=r"num_nodes=2"):
        trainer(tmp_path, strategy=name, num_nodes=2)


def test_the_strategy_takes_the_trainers_device(monkeypatch):
    strategy = gradfree.lightning.EngineStrategy("highway_bp")
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 1)


def test_chains_are_named_as_paths_of_the_lightning_module(tmp_path):
    strategy = gradfree.lightning.EngineStrategy("highway_bp", chains=["blocks"])
    with pytest.raises(gradfree.ChainError, match=r"no module 'blocks'. Did you mean 'net.blocks'"):
        trainer(tmp_path, strategy=strategy).fit(ResidualClassifier(), loader())
    fit(tmp_path, gradfree.lightning.EngineStrategy("highway_bp", chains=["net.blocks"]))
