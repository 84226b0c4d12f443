"""Chains of single known layers, as a model has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from gradfree.chains.site import Removable
from gradfree.chains.solving import Attachment
from gradfree.depth.depth_site import Blocks, Container
from gradfree.layers.layer_pass import RecordedLayers
from gradfree.layers.roles import Role, known_layers, role_of

LOG_TEMPERATURE, ASKED = "log temperature", "asked of the temperature"
"""The means that a temperature behind the layers is kept as, where it is learnt."""


class Layered(Container):
    """The layers of an ``nn.Sequential`` or ``nn.ModuleList``, those of nested ones included."""

    of_layers = True
    several = False
    looks_like = "an nn.Sequential of known layers, two of them or more with weights"

    @classmethod
    def is_evident(cls, module: nn.Module) -> bool:
        """Return whether it is a Sequential of known layers alone, two or more of them with weights."""
        roles = [role_of(leaf) for _, leaf in _leaves("", module)]
        return isinstance(module, nn.Sequential) and None not in roles and roles.count(Role.WEIGHTS) > 1

    @classmethod
    def blocks_of(cls, module: nn.Module) -> Mapping[str, nn.Module]:
        """Return what is no container itself."""
        return dict(_leaves("", module))

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with the layers."""
        yield from super().problems()
        first: dict[nn.Module, str] = {}
        for path, layer in self.blocks.items():
            if first.setdefault(layer, path) != path:
                yield (
                    f"{first[layer]} and {path} are the same module: this engine runs each layer once. Give each its "
                    "own module; they may share parameters."
                )
        for path, layer in self.blocks.items():
            if role_of(layer) is None:
                yield (
                    f"{path} is a {type(layer).__name__}, which this engine cannot split into linear maps and "
                    f"functions of single elements. It knows, in their plain forms: {known_layers()}. Make a "
                    "layer of yours known by gradfree.register_layer."
                )

    def means(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what ranks average: of the residual path, and of a temperature that is learnt."""
        return {**super().means(), LOG_TEMPERATURE: (), ASKED: (2,)}

    def record(self, attachment: Attachment) -> list[Removable]:
        """Put the recording hooks on the layers."""
        return RecordedLayers(attachment, self).record()

    def __str__(self) -> str:
        weighted = sum(role_of(layer) is Role.WEIGHTS for layer in self.blocks.values())
        return f"{len(self.blocks)} layers, {weighted} of them with weights"


class KnownLayers(Layered):
    """The same for engines that take other blocks as a whole: known layers alone."""

    @classmethod
    def accepts(cls, module: nn.Module) -> bool:
        """Tell whether it is a container of known layers, one or more of them with weights."""
        return super().accepts(module) and cls.of_row(cls.blocks_of(module)) is not None

    @classmethod
    def of_row(cls, modules: Mapping[str, nn.Module]) -> Blocks | None:  # type: ignore[override]
        """Return the chain of ``modules`` if they are known layers, one or more of them with weights."""
        roles = set(map(role_of, modules.values()))
        return None if None in roles or Role.WEIGHTS not in roles else super().of_row(modules)


def _leaves(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.Sequential | nn.ModuleList):
            yield from _leaves(where, child)
        elif child is not None:
            yield where, child
