"""Places of chains of single known layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from gradfree.chains.site import Removable
from gradfree.chains.solving import Attachment
from gradfree.depth.depth_site import Blocks, Container
from gradfree.layers.layer_pass import RecordedLayers
from gradfree.layers.roles import Role, known_layers, role_of

LOG_TEMPERATURE, OUTPUT_SUMS = "log temperature", "asked of the temperature"
"""Names, in checkpoints too, of the running means of a learnt temperature after the layers."""


class Layered(Container):
    """The layers of an ``nn.Sequential`` or ``nn.ModuleList``, including those of nested ones."""

    of_layers = True
    several = False
    looks_like = "an nn.Sequential of known layers, two of them or more with weights"
    remedy = (
        "Put the layers and what is computed between them into one, as modules: nn.Sequential(fc1, nn.ReLU(), fc2)."
    )

    @classmethod
    def is_evident(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is an ``nn.Sequential`` of known layers, two or more of them with weights."""
        roles = [role_of(leaf) for _, leaf in _leaves("", module)]
        return isinstance(module, nn.Sequential) and None not in roles and roles.count(Role.WEIGHTS) > 1

    @classmethod
    def blocks_of(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return the layers: all children, also of nested containers, that are no containers."""
        return dict(_leaves("", module))

    def problems(self) -> Iterator[str]:
        """Yield why no engine can be attached to the layers."""
        yield from super().problems()
        first: dict[nn.Module, str] = {}
        for path, layer in self.blocks.items():
            if first.setdefault(layer, path) != path:
                yield (
                    f"{first[layer]} and {path} are the same module: this engine runs each layer once. Use separate "
                    "modules; they may share parameters."
                )
        for path, layer in self.blocks.items():
            if role_of(layer) is None:
                yield (
                    f"{path} is a {type(layer).__name__}, which this engine cannot split into linear maps and "
                    f"functions of single elements. It knows, in their plain forms: {known_layers()}. Make a "
                    "layer of yours known by gradfree.register_layer."
                )

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the running means: of the residual path and of a learnt temperature."""
        return {**super().means(), LOG_TEMPERATURE: (), OUTPUT_SUMS: (2,)}

    def record(self, attachment: Attachment) -> list[Removable]:
        """Put the recording hooks on the layers."""
        return RecordedLayers(attachment, self).record()

    def __str__(self) -> str:
        weighted = sum(role_of(layer) is Role.WEIGHTS for layer in self.blocks.values())
        return f"{len(self.blocks)} layers, {weighted} of them with weights"


class KnownLayers(Layered):
    """Chains of known layers only, for engines that also solve chains of other blocks, block by block."""

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Return whether ``module`` is a container of known layers, one or more of them with weights."""
        return super().accepts(module) and cls.of_list(cls.blocks_of(module)) is not None

    @classmethod
    def of_list(cls, modules: Mapping[str, nn.Module]) -> Blocks | None:  # type: ignore[override]
        """Return the chain of ``modules`` if they are known layers, one or more of them with weights."""
        roles = set(map(role_of, modules.values()))
        return None if None in roles or Role.WEIGHTS not in roles else super().of_list(modules)


def _leaves(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _leaves(where, child)
        elif child is not None:
            yield where, child
