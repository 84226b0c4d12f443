"""Running the blocks of a recorded pass again, on another state or with other parameters, without a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradfree.depth.ports import port_of
from gradfree.errors import ChainError
from gradfree.torchside.random_state import RandomState
from gradfree.torchside.restoring import restored_tensors


def run_again(blocks: Sequence[tuple[str, nn.Module]], state: Tensor, replaced: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the states after ``blocks``, which begin at ``state``; buffers and random states are left as they were.

    Args:
        blocks: by path, in the order in which they run.
        state: h_0.
        replaced: tensors to use in place of parameters, by the parameter's id.

    Raises:
        ChainError: a block returns no state.
    """
    buffers = [module._buffers for _, block in blocks for module in block.modules() if module._buffers]
    states: list[Tensor] = []
    with torch.no_grad(), RandomState(state.device).restored(), restored_tensors(buffers):
        for path, block in blocks:
            own = {name: replaced[id(p)] for name, p in block.named_parameters() if id(p) in replaced}
            found, _ = port_of(block).split(functional_call(block, own, (state,)))
            if found is None:
                raise ChainError(f"{path} returned no state when it ran again.")
            state = found
            states.append(state)
    return states
