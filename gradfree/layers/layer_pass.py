"""Recording a forward pass through known layers, which an engine runs and transposes itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from gradfree.chains.solving import Attachment
from gradfree.depth.depth_pass import DepthPass
from gradfree.depth.depth_site import Blocks
from gradfree.depth.link import Link
from gradfree.depth.recorder import BlockRecorder, RecordedChain
from gradfree.errors import ChainError
from gradfree.layers.layer_chain import ACTIVATION, LayerChain, without_graph, without_values
from gradfree.layers.roles import Role, keeps_state, role_of
from gradfree.torchside.private import global_hooks, version
from gradfree.torchside.random_state import RandomState
from gradfree.torchside.sharding import is_torchs_own

_CHANGED = "{path} was changed after the engine was attached. Change it first, then attach."


class RecordedLayers(RecordedChain):
    """A chain of layers of a model with an engine attached; all layers are recorded in one pass."""

    skips = False

    def __init__(self, attachment: Attachment, site: Blocks):
        super().__init__(attachment, site)
        self._site = site

    def begin(self, state: Tensor, inputs: Sequence[Tensor]) -> LayeredPass:
        """Return a new pass that starts from ``state``.

        Raises:
            ChainError: a layer was added, replaced or removed.
        """
        present = self._site.present_blocks()
        for path in present | self.blocks if present else ():
            if present.get(path) is not self.blocks.get(path):
                raise ChainError(_CHANGED.format(path=path))
        return LayeredPass(self, self.trained(), state, inputs)

    def split(self, path: str, reason: str) -> None:
        """Raise: an engine for layers needs the error at the end of the whole chain."""
        raise ChainError(
            f"{path} does not continue the chain: {reason}. What is computed between two layers, such as an "
            "activation, must be a layer of the chain, too. Otherwise leave the layers from there on out of it, "
            "chains=[...]."
        )


class LayeredPass(DepthPass):
    """A pass through a chain of layers; its activations are not stored if the engine streams.

    Args:
        chain: the chain that the pass runs through.
        trained: the trainable parameters of each layer, by its path.
        state: the chain's input.
        inputs: the first layer's other inputs that need a gradient.
    """

    chain: RecordedLayers

    def __init__(
        self,
        chain: RecordedLayers,
        trained: Mapping[str, Sequence[Tensor]],
        state: Tensor,
        inputs: Sequence[Tensor],
    ):
        super().__init__(chain, trained, inputs)
        self.initial, self.input_requires_grad = state.detach(), state.requires_grad
        self._entered = [(tensor, version(tensor)) for tensor in (self.initial, *self.parameters)]
        # Aliases of the parameters' memory, to notice if ``p.data`` is replaced between the passes.
        self._data = [p.detach() for p in self.parameters]
        self._random: dict[str, tuple[RandomState, bool]] = {}
        self._streamed = 0
        self._streams = chain.attachment.engine.streams
        self.roles: list[Role] = []
        self._paths: set[str] = set()
        self.first = next(iter(chain.blocks))
        kind = state.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def before_block(self, path: str, block: nn.Module, state: Tensor) -> None:
        """Check the layer and its input, and store the random state before a dropout layer if the engine streams.

        Raises:
            ChainError: the layer runs twice, has changed, or gets a state that is not floating-point or was changed.
        """
        role = _checked_role(path, block)
        if path in self._paths:
            raise ChainError(
                f"{path} runs twice in one forward pass. To apply a layer several times, give each use a separate "
                "module (they may share parameters)."
            )
        if not state.is_floating_point():
            raise ChainError(
                f"{path} got an input of {state.dtype}, but a chain of layers needs a floating-point input. Convert "
                "it with x.float(), or begin the chain after the layer that embeds it."
            )
        if self.links and self.links[-1].has_changed:
            raise ChainError(
                f"the output of {self.links[-1].path} was changed in place before {path} got it. Compute a new tensor "
                "in a separate layer, or leave the layers from there on out of the chain."
            )
        if self._streams and role is Role.DROPOUT:
            self._random[path] = RandomState(self.initial.device), block.training

    def may_keep_inside(self, path: str) -> bool:
        """Return whether hooks besides the recorder's see the layer's input, or it is none of torch's own."""
        block = self.chain.blocks[path]
        hooked = len(block._forward_hooks) > 1 or len(global_hooks()) > 0
        return hooked or not is_torchs_own(block)

    def leave(self, link: Link, before: Tensor) -> Sequence[Tensor]:
        """Record ``link``, and free what is not needed any more.

        This frees states between a layer and its activation; autograd keeps what derivatives need. If the engine
        streams, it also frees the states and graphs of all layers before the last one with weights.

        Raises:
            ChainError: a layer registered as without weights has used parameters, which would get no gradient.
        """
        role = _checked_role(link.path, link.block)
        if role is not Role.WEIGHTS and link.parameters:
            raise ChainError(
                f"{link.path} is a {type(link.block).__name__}, registered as without weights, but trains parameters, "
                "which would get no gradient. Freeze them, requires_grad_(False), or leave it out of the chain."
            )
        outputs = super().leave(link, before)
        self.roles.append(role)
        self._paths.add(link.path)
        index = len(self.links) - 1
        if self._streams and role is Role.WEIGHTS:
            for i in range(self._streamed, index):
                self._drop_values(i, without_graph(self.links[i]))
            self._streamed = index
        elif role in ACTIVATION and index and not keeps_state(self.links[index - 1].block):
            self._drop_values(index - 1, without_values(self.links[index - 1]))
        return outputs

    def _drop_values(self, index: int, link: Link) -> None:
        """Replace link ``index`` by ``link``, which has no values, and free the next layer's detached input."""
        self.links[index], self.links[index + 1].given = link, None

    def linearise(self, links: list[Link], keep_graph: bool) -> LayerChain:
        """Return the chain that the engine solves."""
        return LayerChain(self, links, keep_graph)

    def check_unchanged(self) -> None:
        """Raise if the parameters, their values or the chain's input have changed since the forward pass."""
        once = {id(p): p for own in self.chain.trained().values() for p in own}
        if any(p is not trained for p, trained in zip_longest(once.values(), self.parameters)):
            raise ChainError(
                f"the layers from {self.first} on have other trainable parameters in the backward pass than in "
                "the forward pass (torch.func.functional_call gives them back before), but this engine reads their "
                "weights in both. Load the parameters into the model, or use an engine for any blocks."
            )
        replaced = any(p.data_ptr() != data.data_ptr() for p, data in zip(self.parameters, self._data, strict=True))
        if replaced or any(version(tensor) != before for tensor, before in self._entered):
            raise ChainError(
                f"a weight of the chain from {self.first}, or its input, was changed in place between the "
                "forward and the backward pass, or its data replaced. Step the optimizer after the backward pass, or "
                "copy the input."
            )

    def run_again(self, link: Link, x: Tensor) -> Link:
        """Run the layer of ``link`` again on ``x``, with the pass's dropout mask; return the link with a new graph.

        Raises:
            ChainError: dropout was switched on or off since the forward pass.
        """
        state, training = self._random.get(link.path, (None, link.block.training))
        if link.block.training is not training:
            raise ChainError(
                f"{link.path} was switched between training and evaluation before the backward pass, which runs it "
                "again. Switch after the backward pass, or use streaming=False."
            )
        with torch.enable_grad(), nullcontext() if state is None else state.restored(), torch.autocast(*self._autocast):
            local = x.detach().requires_grad_(x.is_floating_point())
            out = link.block.forward(local.clone() if link.in_place else local)
        graph = link.graph._replace(state=get_gradient_edge(local))
        return link.with_fields(out=out, end=None, graph=graph)


def _checked_role(path: str, layer: nn.Module) -> Role:
    """Return the layer's role.

    Raises:
        ChainError: the layer's call no longer runs only its class's ``forward`` between the recorder's two hooks.
    """
    role = role_of(layer)
    if role is None:
        raise ChainError(_CHANGED.format(path=path))
    *_, innermost = layer._forward_pre_hooks.values()
    for hook in (innermost, next(iter(layer._forward_hooks.values()))):
        if not isinstance(getattr(hook, "__self__", None), BlockRecorder):
            raise ChainError(
                f"{path} has got a forward hook or pre-hook after the engine was attached. It runs between the layer "
                "and the engine's hook, and may change the layer's input or output. Register it first, then attach."
            )
    return role
