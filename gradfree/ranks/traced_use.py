"""Which weights a model uses before its blocks and which behind them, from a symbolic trace of its ``forward``."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from gradfree.torchside.structure import structure_of
from gradfree.torchside.tracing import ThreadTracer


class _Tracer(ThreadTracer):
    def __init__(self, blocks: Collection[str]):
        super().__init__()
        self.blocks = blocks

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Do not trace the blocks."""
        return module_qualified_name in self.blocks or super().is_leaf_module(m, module_qualified_name)


def traced_use(model: nn.Module, blocks: Collection[str]) -> tuple[set[str], set[str]]:
    """Return the paths of modules and tensors that run before the first of ``blocks``, and behind the last.

    Nothing is computed: a copy of the model on the meta device is traced. If this fails, as it does where values decide
    what runs, both sets are empty.
    """
    try:
        nodes = list(_Tracer(blocks).trace(structure_of(model, own_settings=True)).nodes)
    except Exception:  # The copy of a user's attribute and the user's forward may raise anything.
        return set(), set()
    at = [n for n, node in enumerate(nodes) if node.op == "call_module" and node.target in blocks]
    if not at:
        return set(), set()
    return _used_by(nodes[: at[0]]), _used_by(nodes[at[-1] + 1 :])


def _used_by(nodes: Collection[fx.Node]) -> set[str]:
    tensors = {str(used.target) for node in nodes for used in node.all_input_nodes if used.op == "get_attr"}
    return tensors | {str(node.target) for node in nodes if node.op == "call_module"}
