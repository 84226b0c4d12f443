"""Whether a batch of modules takes less time than one after the other."""

from __future__ import annotations

# In seconds, roughly those of one core and of any GPU of today. What counts is that they are the same in every run: a
# choice by the clock would make two runs of one training differ in their last digits.
_NODE = {"cpu": 15e-6}
_NUMBER = {"cpu": 1e-9}


def pays(device: str, nodes: int, parameters: int, activations: int) -> bool:
    """Tell whether modules that are alike are sooner done in a batch.

    One after the other, each of the nodes of a module's graph costs a call. In a batch nothing does, but parameters
    are copied side by side, and what a small module kept in the cache goes through memory.

    Args:
        device: its type.
        nodes: of one module's graph.
        parameters: how many numbers one module has.
        activations: how many numbers one module keeps.
    """
    return nodes * _NODE.get(device, 20e-6) > (parameters + activations) * _NUMBER.get(device, 1e-11)
