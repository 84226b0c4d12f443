"""Random feedback matrices in place of transposed weights."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod, sqrt

import torch
from torch import Tensor, distributed

from gradfree.chains.chain import Chain
from gradfree.chains.memory import Memory
from gradfree.engines.engine import Engine
from gradfree.engines.layered import LayerEngine
from gradfree.engines.options import check_count
from gradfree.errors import ChainError
from gradfree.layers.layer_chain import LayerChain


@dataclass(frozen=True, kw_only=True)
class RandomEngine(Engine):
    """An engine with random matrices B, which are drawn once and kept in checkpoints.

    Each B is Kaiming-uniform (He et al. 2015, arXiv 1502.01852) with the gain of a linear map, U(±√(3/fan_in)), which
    roughly keeps the norm of a vector that is multiplied by B. B depends only on ``seed``, the layer's path and the
    shape, not on torch's random state, the device or the rank. Checkpoints name it "feedback: path (shape)".

    Args:
        seed: of the random matrices.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_count(self, "seed", least=0)

    def generator(self, name: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Return a new generator, seeded by ``seed`` and ``name``; its numbers depend on the type of device."""
        return torch.Generator(device).manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def matrix(
        self, memory: Memory, path: str, shape: Sequence[int], like: Tensor, fan_in: float | None = None
    ) -> Tensor:
        """Return B for the layer at ``path``.

        Args:
            memory: the chain's memory, which keeps B.
            path: the layer's.
            shape: (outputs, inputs...).
            like: a tensor with the device and the dtype for B; the dtype is float32 at least.
            fan_in: how many inputs each output sums; the product of ``inputs`` if left out.
        """
        kept, key = memory.of("feedback"), self._key(path, shape)
        matrix = kept.get(key)
        if matrix is None:
            bound = sqrt(3.0 / (fan_in or prod(shape[1:])))
            matrix = torch.empty(*shape, dtype=torch.float32, device="cpu")
            matrix.uniform_(-bound, bound, generator=self.generator(key))
        kept[key] = matrix = matrix.to(like.device, torch.promote_types(like.dtype, torch.float32))
        return matrix

    def replace(self, memory: Memory, path: str, matrix: Tensor) -> None:
        """Store another B of this shape for the layer at ``path``."""
        memory.of("feedback")[self._key(path, matrix.shape)] = matrix

    @staticmethod
    def _key(path: str, shape: Sequence[int]) -> str:
        return f"{path} {tuple(shape)}"


@dataclass(frozen=True, kw_only=True)
class FeedbackEngine(RandomEngine, LayerEngine):
    """An engine for single layers that sends the error back through random matrices."""

    def random_projection(self, chain: LayerChain, error: Tensor, index: int) -> Tensor:
        """Return the error times one random matrix.

        Args:
            chain: the chain.
            error: (N, classes), at the chain's last layer with weights.
            index: of the link that gets the result.

        Returns:
            (N, ...), the shape of that link's input.

        Raises:
            ChainError: the error has another shape.
        """
        self.refuse_unless_classes(chain, error)
        shape = (error.shape[1], *chain.shape(index)[1:])
        matrix = self.matrix(chain.memory, chain.links[index].path, shape, error)
        return torch.einsum("nc,c...->n...", error.to(matrix.dtype), matrix)

    def refuse_unless_classes(self, chain: LayerChain, error: Tensor) -> None:
        """Raise if the chain's outputs, and so the error, are not (samples, classes)."""
        if error.dim() != 2:
            raise ChainError(
                f"{type(self).__name__} sends the error through matrices with a row for each class, so it takes "
                f"outputs (samples, classes), but {chain.links[chain.last].path!r} returns {tuple(error.shape)}. "
                "Flatten before it, or use the engine 'fa'."
            )


@dataclass(frozen=True, kw_only=True)
class LearnedFeedbackEngine(FeedbackEngine):
    """An engine for single layers whose matrices learn from layers that run again, once each optimizer step."""

    @property
    def runs_again(self) -> bool:
        """True."""
        return True

    def learn(self, chain: Chain, memory: Memory) -> None:
        """Take one step of learning; computes without autocast.

        Raises:
            ChainError: there are several ranks.
        """
        assert isinstance(chain, LayerChain)
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            name = type(self).__name__
            raise ChainError(f"{name} learns its matrices on one rank only: each would learn other ones.")
        with torch.no_grad(), torch.autocast(chain.recording.initial.device.type, enabled=False):
            self.learn_layers(chain)

    @abstractmethod
    def learn_layers(self, chain: LayerChain) -> None:
        """Let the matrices learn from a pass, by :meth:`replace`."""
