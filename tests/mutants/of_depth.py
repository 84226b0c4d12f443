"""Mutants of the recorder of blocks and of the solver of chains in depth."""

from mutant import mutant

DEPTH = "gradfree/depth/*.py"
PROGRAMS = "depth/programs/test_random_programs.py"
EXACT = "depth/test_exactness.py"

MUTANTS = (
    mutant(
        "direct cotangents of states but the last are dropped",
        PROGRAMS,
        (
            DEPTH,
            "self._direct[index] = plus(self._direct[index], _copied(cotangent))",
            "self._direct[index] = _copied(cotangent) if index == len(self.links) - 1 else None",
        ),
    ),
    mutant(
        "a direct cotangent is not copied",
        EXACT,
        (DEPTH, "return cotangent.clone()", "return cotangent"),
    ),
    mutant(
        "a second backward pass adds to the direct cotangents of the first",
        PROGRAMS,
        (
            DEPTH,
            "self._direct[index] = plus(self._direct[index], _copied(cotangent))",
            "self._earlier = getattr(self, '_earlier', {})\n"
            "                    self._direct[index] = self._earlier[index] = cotangent + self._earlier.get(index, 0)",
        ),
    ),
    mutant(
        "graphs are freed though the loss's graph is retained",
        PROGRAMS,
        (DEPTH, "self._gradients(keeps_graph())", "self._gradients(False)"),
    ),
    mutant(
        "a pass whose graphs are freed is solved again without a word",
        PROGRAMS,
        (
            DEPTH,
            "        if self._freed:\n            raise ChainError(",
            "        if self._freed:\n            print(",
        ),
    ),
    mutant(
        "the gradient of a state inside a chain is its direct cotangent, without a word",
        PROGRAMS,
        (DEPTH, "if start is None or not will_run(start):", "if start is None:"),
    ),
    mutant(
        "a hook that comes too late on a state is not refused",
        PROGRAMS,
        (DEPTH, "if link.is_hooked and (link.extra", "if False and (link.extra"),
    ),
    mutant(
        "a state with a hook does not end its chain",
        PROGRAMS,
        (DEPTH, "        if has_hooks(state):\n", "        if False:\n"),
    ),
    mutant(
        "a block that uses what it was not given is not noticed",
        PROGRAMS,
        (
            DEPTH,
            "        self._refuse_foreign(graph, parameters, call)\n",
            "        parameters = [n for n in parameters if n >= 0]\n"
            "        self._refuse_foreign(graph, parameters, call)\n",
        ),
    ),
    mutant(
        "what is computed from an older state and comes by a closure is not noticed",
        PROGRAMS,
        (
            DEPTH,
            "elif any(node is not call.entry for node, _ in graph.stops) or not graph.kinds.isdisjoint(BORDERS):",
            "elif False:",
        ),
    ),
    mutant(
        "an input that no block before had goes on in the same chain",
        PROGRAMS,
        (DEPTH, "if recording.number(tensor) is None:", "if False:"),
    ),
    mutant(
        "blocks that branch are one chain",
        PROGRAMS,
        (DEPTH, "        if node.index != len(recording.links) - 1:\n", "        if False:\n"),
    ),
    mutant(
        "the gradient of the initial state is dropped",
        PROGRAMS,
        (DEPTH, "return gradients.initial, *gradients.inputs", "return None, *gradients.inputs"),
    ),
    mutant(
        "of a parameter of several blocks one block's gradient counts",
        PROGRAMS,
        (DEPTH, "total.parameters[n] = plus(total.parameters[n], gradient)", "total.parameters[n] = gradient"),
    ),
    mutant(
        "of an input of several blocks one block's gradient counts",
        PROGRAMS,
        (
            "gradfree/depth/*chain.py",
            "total.inputs[n] = plus(total.inputs[n], next(grads))",
            "total.inputs[n] = next(grads)",
        ),
    ),
    mutant(
        "blocks get the cotangents of other blocks for their parameters",
        "depth/test_exactness.py",
        (
            DEPTH,
            "[link.writable(d) for link, d in zip(links, delta, strict=True)],\n                    retain_graph=keep",
            "[link.writable(d) for link, d in zip(links, reversed(delta), strict=True)],\n"
            "                    retain_graph=keep",
        ),
    ),
    mutant(
        "K is added where it is to be subtracted from F",
        EXACT,
        (DEPTH, "plus(v, None if known is None else -known)", "plus(v, known)"),
    ),
    mutant(
        "an iteration forgets direct cotangents",
        EXACT,
        ("gradfree/depth/*chain.py", "result = list(direct)", "result = [*[None] * (len(direct) - 1), direct[-1]]"),
    ),
    mutant(
        "what a loss inside a block sends to the state before it is lost",
        PROGRAMS,
        (DEPTH, "direct[index - 1] = plus(direct[index - 1], cotangent)", "pass"),
    ),
    mutant(
        "what a loss on extra outputs sends to parameters is lost",
        PROGRAMS,
        ("gradfree/depth/link.py", "total.parameters[n] = plus(total.parameters[n], next(grads))", "next(grads)"),
    ),
    mutant(
        "a state that its block has changed in place is not noticed",
        PROGRAMS,
        (
            DEPTH,
            "if versions == call.versions:",
            "if True:",
        ),
    ),
    mutant(
        "a state that a block changes in place may be used elsewhere",
        PROGRAMS,
        (DEPTH, "if link.in_place and i and (", "if False and ("),
    ),
    mutant(
        "states that the model changes in place are not noticed",
        PROGRAMS,
        (DEPTH, "if link.root is not None and link.has_changed and (", "if False and ("),
    ),
    mutant(
        "a function that writes to its cotangent gets that which others read",
        EXACT,
        ("gradfree/depth/link.py", "return delta.clone() if self.writes else delta", "return delta"),
    ),
    mutant(
        "hooks on parameters see each block's own gradient, too",
        "depth/attaching/test_attaching.py",
        (
            "gradfree/depth/*chain.py",
            "with local_backward(span(links), delta), without_hooks(leaves):",
            "with local_backward(span(links), delta):",
        ),
    ),
    mutant(
        "a block in a checkpoint is recorded twice",
        PROGRAMS,
        (
            DEPTH,
            "if not torch.is_grad_enabled() or recomputed():",
            "if not torch.is_grad_enabled():",
        ),
    ),
    mutant(
        "threads share the call that is running",
        "depth/test_threads.py",
        (
            DEPTH,
            "call = self._calls.pop(get_ident(), None)",
            "call = self._calls.popitem()[1] if self._calls else None",
        ),
    ),
    mutant(
        "full backward hooks that come later are not noticed",
        "depth/test_refusals.py",
        (DEPTH, "if any(self._hooks) else ()", "if False else ()"),
    ),
    mutant(
        "the residual path of a ReLU is the identity",
        "torchside/test_residual.py",
        ("gradfree/torchside/residual.py", "return [node._saved_result > 0]", "return [1.0]"),
    ),
    mutant(
        "the residual path of a gate is the other share",
        "torchside/test_residual.py",
        ("gradfree/torchside/residual.py", "return [1.0 - weight, weight]", "return [weight, 1.0 - weight]"),
    ),
    mutant(
        "the residual path of a layer norm is without its weight",
        "torchside/test_residual.py",
        (
            "gradfree/torchside/residual.py",
            "scale, weight = node._saved_result2, node._saved_weight\n"
            "    return [scale if weight is None else scale * weight.detach()]",
            "return [node._saved_result2]",
        ),
    ),
    mutant(
        "dense Jacobians lie one link too late",
        "algorithms/parallel/test_deeppcr.py",
        (
            "gradfree/depth/block_jacobians.py",
            "result[i - 1, ..., : vjp.shape[-1]]",
            "result[-i, ..., : vjp.shape[-1]]",
        ),
    ),
    mutant(
        "blocks that mix samples have dense Jacobians",
        "algorithms/parallel/test_deeppcr.py",
        ("gradfree/depth/block_jacobians.py", "            if mixes:\n", "            if False:\n"),
    ),
)
