"""Layer parallelism as a strategy of Lightning's Trainer: consecutive blocks of one model on each device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer
from torchmetrics import Metric

from gradfree.chains.handle import Handle
from gradfree.engines.discovery import Chains
from gradfree.engines.engine import Engine
from gradfree.errors import ChainError
from gradfree.lightning.strategies import split_options
from gradfree.ranks.stage import Stage, layer_parallel, stage_of
from gradfree.registry import resolve_engine


class LayerParallelStrategy(DDPStrategy):
    """Trains one model on several devices, each with consecutive blocks, by :func:`gradfree.layer_parallel`.

    With more devices than ``stages``, several copies of the model train by DDP, each on its share of the data. All
    devices of a copy get the same batches. A checkpoint contains the whole model, as if from one device, and can be
    resumed on any number of devices. In memory each device has only its part of the module.

    Args:
        engine: "highway_bp", "fixed_point" or "backprop", or such an engine.
        stages: the number of devices that share one model; by default all.
        model: the path, in the LightningModule, of the module that has the blocks and is called on batches. By default
            the only child with weights, or the LightningModule itself if it has several children and a ``forward``.
        chains: as in :func:`gradfree.layer_parallel`, with paths in that module.
        costs: of each block, as in :func:`gradfree.layer_parallel`.
        residual: as in :meth:`gradfree.Engine.attach`.
        **options: the engine's, if it is given by name, and those of ``DDPStrategy``.

    Raises:
        TypeError: an option that neither of them has.
        ValueError: ``stages`` is not a number of devices.

    Attributes:
        stage: this device's part of the model, once the Trainer has set it up.
    """

    def __init__(
        self,
        engine: str | Engine = "highway_bp",
        *,
        stages: int | None = None,
        model: str | None = None,
        chains: Chains | None = None,
        costs: Sequence[float] | None = None,
        residual: float | None = None,
        **options: Any,
    ):
        if stages is not None and (isinstance(stages, bool) or not isinstance(stages, int) or stages < 1):
            raise ValueError(f"LayerParallelStrategy: stages must be a number of devices, not {stages!r}.")
        own, others = split_options(type(self).__name__, DDPStrategy, engine, options)
        self.engine = resolve_engine(engine, own)
        self.stages, self._path = stages, model
        self._placed: dict[str, Any] = {"chains": chains, "costs": costs, "residual": residual}
        super().__init__(**others)

    stage: Stage | None = None
    _mesh: DeviceMesh | None = None

    @property
    def handle(self) -> Handle:
        """The handle of the engine on this device's blocks."""
        return Handle() if self.stage is None else self.stage.handle

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The share of the data for this device: that of its copy of the model."""
        return {"num_replicas": self._data.size(), "rank": self._data.rank()}

    def setup_environment(self) -> None:
        """Set up as usual, with the groups of devices that share a copy."""
        super().setup_environment()
        stages = self.world_size if self.stages is None else self.stages
        if self.world_size % stages:
            raise ValueError(
                f"LayerParallelStrategy: stages={stages}, but the Trainer has {self.world_size} devices. Give it a "
                f"multiple: Trainer(devices={stages})."
            )
        if self._mesh is None:
            shape = self.world_size // stages, stages
            self._mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("data", "blocks"))
        self._ddp_kwargs["process_group"] = self._data

    def setup(self, trainer: Any) -> None:
        """Reduce the model to this device's part, and set up as usual."""
        if self._layer_sync is not None:
            raise ValueError(
                "LayerParallelStrategy: sync_batchnorm=True would make the BatchNorms of different blocks wait for "
                "each other. Leave it out."
            )
        of_whole_models = {"WeightAveraging", "StochasticWeightAveraging", "ModelPruning"}
        for callback in trainer.callbacks:
            if of_whole_models & {kind.__name__ for kind in type(callback).__mro__}:
                raise ValueError(
                    f"LayerParallelStrategy: {type(callback).__name__} needs the whole model, and each device has a "
                    "part. Leave it out."
                )
        assert self.accelerator is not None
        assert self._mesh is not None
        # First, since placeholders for other devices' weights copy the present dtype and device.
        self.precision_plugin.convert_module(self._module)
        self.model_to_device()
        path, target = self._target()
        if outside := [n for n, _ in self._module.named_parameters() if not _within(n, path)]:
            raise ChainError(
                f"{outside[0]!r} is a weight outside of {path!r}, so its copies on different devices would differ. "
                "Move it there, or name the module that is called on batches and has all weights: "
                "LayerParallelStrategy(model=...)."
            )
        self.stage = stage_of(target) or layer_parallel(target, self.engine, mesh=self._mesh["blocks"], **self._placed)
        for metric in self._metrics():
            metric.process_group = self._data
        if trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
            if any(isinstance(each, torch.optim.LBFGS) for each in self.optimizers):
                raise ValueError(
                    "LayerParallelStrategy: LBFGS computes one step from all weights, and each device has a part of "
                    "them. Use an optimizer that computes each weight's step from its own gradient."
                )
            return
        self.accelerator.setup(trainer)
        self.setup_precision_plugin()

    def configure_ddp(self) -> None:
        """Wrap the module in DDP if there are several copies of the model."""
        if self._data.size() > 1:
            super().configure_ddp()

    def setup_precision_plugin(self) -> None:
        """Set up as usual; clipping and skipped steps depend on the gradients of all devices of a copy."""
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            assert self._mesh is not None
            state = plugin.scaler.state_dict()
            plugin.scaler = ShardedGradScaler(self.root_device.type, process_group=self._mesh["blocks"].get_group())
            plugin.scaler.load_state_dict(state)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as usual, by default over the copies of the model, since devices of one copy have the same values."""
        return super().reduce(tensor, self._data if group is None else group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all devices, or any of them, have decided ``True``."""
        count = super().reduce(torch.tensor(int(decision), device=self.root_device), None, "sum")
        return bool(count == self.world_size) if all else bool(count)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the whole module, on the first device; nothing on the others."""
        path, prefix = self._target()[0], self._prefix
        assert self.stage is not None
        whole = {prefix + key: value for key, value in self.stage.state_dict().items()}
        if not self.is_global_zero:
            return {}
        own = self._module.state_dict()
        return {key: value for key, value in own.items() if not _within(key, path)} | whole

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the state of a whole module, or this device's part of it."""
        path, target = self._target()
        stage = stage_of(target)
        if stage is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        state = checkpoint["state_dict"]
        stage.load_state_dict({key.removeprefix(self._prefix): state[key] for key in state if _within(key, path)})
        rest = {key: value for key, value in state.items() if not _within(key, path)}
        self._module.load_state_dict(rest, strict=False)

    def optimizer_state(self, optimizer: Optimizer | LightningOptimizer) -> dict[str, Any]:
        """Return the state of an optimizer of the whole module, on the first device; nothing on the others."""
        assert self.stage is not None
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self.stage.optimizer_state_dict(inner)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this device's part of the states of the whole module's optimizers."""
        assert self.stage is not None
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            self.stage.load_optimizer_state_dict(optimizer, state)

    def teardown(self) -> None:
        """Clean up as usual."""
        vars(self.precision_plugin).pop("clip_grad_by_norm", None)
        for metric in self._metrics():
            metric.process_group = None
        super().teardown()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _data(self) -> Any:
        """The group of the devices that hold the same part of different copies."""
        assert self._mesh is not None
        return self._mesh["data"].get_group()

    @property
    def _prefix(self) -> str:
        path, _ = self._target()
        return f"{path}." if path else ""

    def _target(self) -> tuple[str, nn.Module]:
        """Return the path of the module whose blocks are placed on devices, and the module.

        Raises:
            ChainError: there is no such module, or it is ambiguous.
        """
        module = self._module
        names = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
        if self._path is not None:
            return self._path, module.get_submodule(self._path)
        if len(names) == 1:
            return names[0], module.get_submodule(names[0])
        if type(module).forward is LightningModule.forward:
            raise ChainError(
                f"{type(module).__name__} has {names or 'no modules with weights'} and no forward: name the module "
                "that is called on batches and has the blocks, LayerParallelStrategy(model=...)."
            )
        return "", module

    def _metrics(self) -> Iterator[Metric]:
        yield from (module for module in self._module.modules() if isinstance(module, Metric))

    def _clip(self, optimizer: Optimizer, clip_val: float) -> None:
        assert self.stage is not None
        self.stage.clip_grad_norm_(clip_val, parameters=self.precision_plugin.main_params(optimizer))


def _within(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")
