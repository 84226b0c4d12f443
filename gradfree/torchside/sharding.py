"""Models whose parameters are sharded by FSDP, ``torch.distributed.fsdp``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from gradfree.errors import SHARDED


def is_dtensor(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each process has a shard, as FSDP's parameters outside a pass."""
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor; if it is a DTensor, all processes must call this."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


@torch.no_grad()
def assign(tensor: Tensor, value: Tensor) -> None:
    """Set a tensor or DTensor to ``value``, which every process has completely."""
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor, Replicate

        mesh = tensor.device_mesh  # type: ignore[attr-defined]
        everywhere = DTensor.from_local(value.to(tensor.dtype), mesh, [Replicate()] * mesh.ndim, run_check=False)
        value = everywhere.redistribute(placements=tensor.placements)  # type: ignore[attr-defined]
    tensor.copy_(value)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before ``fully_shard`` replaced it by a subclass."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    # FSDPLinear, FSDPModule, Linear.
    return type(module).__mro__[2] if fsdp and isinstance(module, fsdp.FSDPModule) else type(module)


def is_torchs_own(module: nn.Module) -> bool:
    """Return whether a module is one of torch's own layers or containers."""
    return own_class(module).__module__.startswith("torch.nn.")


def problems_of_shards(inside: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield a problem for each of the modules ``inside`` a chain, by path, that is sharded by itself.

    FSDP gathers parameters and reduces gradients around autograd's own pass through the module. In an engine's pass
    the gradients would be zero.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for path, module in inside.items():
        if isinstance(module, kinds):
            yield SHARDED.message(path=path)
