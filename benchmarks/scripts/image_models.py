"""Architectures of timm and torchvision."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch
from architecture import Architecture, images, loss_of
from torch import Tensor, nn

_SHIM: list[torch.library.Library] = []


def torchvision() -> Any:
    """Import torchvision, even if its compiled part does not fit the installed torch: no model needs that part."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _SHIM.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            _SHIM[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.import_module("torchvision")


def _timm() -> Any:
    """Import timm; if torchvision is missing, with empty stand-ins, since the models use nothing of it."""
    try:
        torchvision()
    except ModuleNotFoundError:
        stand_ins = {name: _StandIn(name) for name in _IMPORTED}
        sys.modules.update(stand_ins)
        try:
            return importlib.import_module("timm")
        finally:
            for name in stand_ins:
                del sys.modules[name]
    return importlib.import_module("timm")


_IMPORTED = ("torchvision", *(f"torchvision.{n}" for n in ("datasets", "ops", "ops.misc", "transforms")))
_IMPORTED += ("torchvision.transforms.functional",)


class _Named(type):
    """Metaclass: any attribute of its classes is the attribute's name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A package whose attributes are empty classes or other stand-ins."""

    def __init__(self, name: str):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return sys.modules.get(f"{self.__name__}.{name}") or _Named(name, (), {})


def _architecture(library: str, name: str, build: Callable[[], nn.Module], size: int, **own: Any) -> Architecture:
    def loss(model: nn.Module) -> Tensor:
        return loss_of(model(images(size)))

    return Architecture(name, library, build, loss, **own)


_VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_classes": 5}
_SWIN: dict[str, Any] = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "num_classes": 5, "window_size": 4}
_ISOTROPIC: dict[str, Any] = _VIT | {"depth": 4, "num_heads": 4}
_DEPTHS: dict[str, Any] = {"depths": (2, 2, 3, 2), "dims": (8, 16, 24, 32), "num_classes": 5}
_TIMM: dict[str, tuple[str, str, dict[str, Any]]] = {
    "VisionTransformer": ("vision_transformer", "VisionTransformer", _ISOTROPIC | {"drop_path_rate": 0.2}),
    "VisionTransformer, layer scale": ("vision_transformer", "VisionTransformer", _ISOTROPIC | {"init_values": 0.1}),
    "SwinTransformer": ("swin_transformer", "SwinTransformer", _SWIN | {"depths": (2, 2, 2), "num_heads": (2, 2, 4)}),
    "SwinTransformerV2": ("swin_transformer_v2", "SwinTransformerV2", _SWIN | {"depths": (2, 2), "num_heads": (2, 4)}),
    "ConvNeXt": ("convnext", "ConvNeXt", _DEPTHS),
    "MetaFormer": ("metaformer", "MetaFormer", _DEPTHS),
    "MlpMixer": ("mlp_mixer", "MlpMixer", _VIT | {"num_blocks": 4}),
    "Cait": ("cait", "Cait", _ISOTROPIC),
    "Xcit": ("xcit", "Xcit", _ISOTROPIC),
    "Beit": ("beit", "Beit", _ISOTROPIC),
}
_TIMM_QUICK = ("SwinTransformer", "ConvNeXt", "MlpMixer")
_TIMM_NAMES = {
    "resnet18": 64,
    "resnetv2_50": 64,
    "res2net50_26w_4s": 64,
    "skresnet18": 64,
    "resnext26ts": 64,
    "efficientnet_b0": 64,
    "mobilenetv3_small_050": 64,
    "ghostnet_050": 64,
    "repvgg_a0": 64,
    "hrnet_w18_small": 64,
    "mobileone_s0": 64,
    "levit_128s": 224,
    "pit_ti_224": 224,
}
_TORCHVISION: dict[str, Sequence[str] | None] = {
    "resnet18": None,
    "resnet50": None,
    "squeezenet1_1": ["features"],
    "alexnet": ["features"],
    "mobilenet_v2": ["features"],
    "mobilenet_v3_small": ["features"],
    "efficientnet_b0": None,
    "shufflenet_v2_x0_5": None,
    "regnet_y_400mf": None,
    "mnasnet0_5": None,
    "densenet121": None,
    "googlenet": None,
    "convnext_tiny": None,
}


def timm_models() -> list[Architecture]:
    """Return the architectures of timm."""
    timm = _timm()
    models = timm.models

    def made(name: str, checkpoints: bool) -> nn.Module:
        module, kind, options = _TIMM[name]
        model: nn.Module = getattr(getattr(models, module), kind)(**options)
        if checkpoints:
            model.set_grad_checkpointing(True)  # type: ignore[operator]
        return model

    return [
        *(_architecture("timm", n, partial(made, n, False), 32, quick=n in _TIMM_QUICK) for n in _TIMM),
        _architecture(
            "timm", "VisionTransformer, checkpoints", partial(made, "VisionTransformer", True), 32, quick=True
        ),
        *(
            _architecture("timm", name, partial(timm.create_model, name, num_classes=5), size)
            for name, size in _TIMM_NAMES.items()
        ),
    ]


def torchvision_models() -> list[Architecture]:
    """Return the architectures of torchvision."""
    models = torchvision().models
    sizes = {"alexnet": 96}
    extra = {"googlenet": {"aux_logits": False, "init_weights": False}}

    def made(name: str) -> nn.Module:
        model: nn.Module = getattr(models, name)(num_classes=5, **extra.get(name, {}))
        return model

    vit = {"image_size": 32, "patch_size": 8, "num_layers": 4, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    return [
        *(
            _architecture("torchvision", n, partial(made, n), sizes.get(n, 64), chains=c, quick=n == "resnet18")
            for n, c in _TORCHVISION.items()
        ),
        _architecture("torchvision", "VisionTransformer", lambda: models.VisionTransformer(**vit, num_classes=5), 32),
    ]
