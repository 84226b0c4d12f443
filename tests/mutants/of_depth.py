"""Mutants of what records blocks and solves chains in depth."""

from mutant import mutant

DEPTH = "gradfree/depth/*.py"
UNUSUAL = "depth/unusual/test_unusual_passes.py"
EXACT = "depth/test_exactness.py"

MUTANTS = (
    mutant(
        "direct cotangents of states but the last are dropped",
        UNUSUAL,
        (
            DEPTH,
            "self._direct[i] = cotangent.clone()",
            "self._direct[i] = cotangent.clone() if i == len(self.links) - 1 else None",
        ),
        (
            DEPTH,
            "self._direct[index] = plus(self._direct[index], _copied(state))",
            "self._direct[index] = _copied(state) if index == len(self.links) - 1 else None",
        ),
        (
            DEPTH,
            "self._direct[index] = plus(self._direct[index], _copied(cotangent))",
            "self._direct[index] = _copied(cotangent) if index == len(self.links) - 1 else None",
        ),
    ),
    mutant(
        "a direct cotangent is not copied",
        EXACT,
        (DEPTH, "self._direct[i] = cotangent.clone()", "self._direct[i] = cotangent"),
        (DEPTH, "return cotangent.clone()", "return cotangent"),
    ),
    mutant(
        "a second backward pass adds to the direct cotangents of the first",
        UNUSUAL,
        (
            DEPTH,
            "self._direct[i] = cotangent.clone()",
            "self._earlier = getattr(self, '_earlier', {})\n"
            "                self._direct[i] = self._earlier[i] = cotangent + self._earlier.get(i, 0)",
        ),
        (
            DEPTH,
            "self._direct[index] = plus(self._direct[index], _copied(state))",
            "self._earlier = getattr(self, '_earlier', {})\n"
            "                self._direct[index] = self._earlier[index] = state + self._earlier.get(index, 0)",
        ),
        (
            DEPTH,
            "self._direct[index] = plus(self._direct[index], _copied(cotangent))",
            "self._earlier = getattr(self, '_earlier', {})\n"
            "                    self._direct[index] = self._earlier[index] = cotangent + self._earlier.get(index, 0)",
        ),
    ),
    mutant(
        "graphs are freed though the loss's graph is retained",
        UNUSUAL,
        (DEPTH, "self._gradients(keeps_graph())", "self._gradients(False)"),
    ),
    mutant(
        "a pass whose graphs are freed is solved again without a word",
        f"{UNUSUAL} depth/attaching/test_traces.py",
        (DEPTH, "        if self.freed:\n            raise ChainError(", "        if self.freed:\n            print("),
        (
            DEPTH,
            "        if self._freed:\n            raise ChainError(",
            "        if self._freed:\n            print(",
        ),
    ),
    mutant(
        "the gradient of a state inside a chain is its direct cotangent, without a word",
        f"{UNUSUAL} depth/test_refusals.py",
        (DEPTH, "if not torch._C._will_engine_execute_node(start):", "if False:"),
        (DEPTH, "if not will_run(start):", "if False:"),
        (DEPTH, "if start is None or not will_run(start):", "if start is None:"),
    ),
    mutant(
        "a hook that comes too late on a state is not refused",
        UNUSUAL,
        (DEPTH, "if not handed.hooks() and (state is None or not state.retains_grad):", "if True:"),
        (DEPTH, "if self.hooked(i) and (link.extra", "if False and (link.extra"),
    ),
    mutant(
        "a state with a hook does not end its chain",
        f"{UNUSUAL} depth/attaching/test_splits.py depth/attaching/test_borders.py",
        (DEPTH, "        if has_hooks(state):\n", "        if False:\n"),
    ),
    mutant(
        "a block that uses what it was not given is not noticed",
        UNUSUAL,
        (DEPTH, "if strange := self._strange(graph, call):", "if strange := None:"),
        (
            DEPTH,
            "        self._refuse_strange(graph, call)\n",
            "        known = call.recording.numbers\n"
            "        graph = graph._replace(leaves=[leaf for leaf in graph.leaves if id(leaf) in known])\n"
            "        self._refuse_strange(graph, call)\n",
        ),
    ),
    mutant(
        "what is computed from an older state and comes by a closure is not noticed",
        f"{UNUSUAL} depth/attaching/test_splits.py depth/attaching/test_borders.py",
        (DEPTH, "if not graph.stops <= own or not graph.kinds.isdisjoint(BORDERS):", "if False:"),
        (
            DEPTH,
            "elif [1 for node, _ in graph.stops if node not in own] or not graph.kinds.isdisjoint(BORDERS):",
            "elif False:",
        ),
    ),
    mutant(
        "an input that no block before had goes on in the same chain",
        f"{UNUSUAL} depth/attaching/test_splits.py",
        (DEPTH, "if tensor is not state and _number(recording, tensor) is None:", "if False:"),
        (DEPTH, "if recording.number(tensor) is None:", "if False:"),
    ),
    mutant(
        "blocks that branch are one chain",
        UNUSUAL,
        (DEPTH, "        if index != len(recording.links) - 1:\n", "        if False:\n"),
    ),
    mutant(
        "the gradient of the initial state is dropped",
        UNUSUAL,
        (DEPTH, "return gradients.initial, *gradients.inputs", "return None, *gradients.inputs"),
    ),
    mutant(
        "of a parameter of several blocks one block's gradient counts",
        "depth/attaching/test_trained_parameters.py",
        (DEPTH, "total.parameters[n] = plus(total.parameters[n], gradient)", "total.parameters[n] = gradient"),
    ),
    mutant(
        "of an input of several blocks one block's gradient counts",
        "depth/attaching/test_inside.py depth/test_ports.py layers/test_layers.py",
        (
            "gradfree/depth/*chain.py",
            "total.inputs[n] = plus(total.inputs[n], next(grads))",
            "total.inputs[n] = next(grads)",
        ),
    ),
    mutant(
        "blocks get the cotangents of other blocks for their parameters",
        UNUSUAL,
        (
            DEPTH,
            "[link.given(d) for link, d in zip(links, delta, strict=True)],\n"
            "                    retain_graph=self.keep_graph",
            "[link.given(d) for link, d in zip(links, reversed(delta), strict=True)],\n"
            "                    retain_graph=self.keep_graph",
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
        "depth/attaching/test_borders.py depth/attaching/test_inside.py",
        (DEPTH, "direct[index - 1] = plus(direct[index - 1], cotangent)", "pass"),
    ),
    mutant(
        "what a loss on extra outputs sends to parameters is lost",
        "depth/test_ports.py depth/attaching/test_borders.py",
        ("gradfree/depth/link.py", "total.parameters[n] = plus(total.parameters[n], next(grads))", "next(grads)"),
        (DEPTH, "total.parameters[n] = plus(total.parameters[n], next(pulled))", "next(pulled)"),
    ),
    mutant(
        "a state that its block has changed in place is not noticed",
        f"{UNUSUAL} depth/test_refusals.py",
        (
            DEPTH,
            "changed = [tensor for tensor, version in call.versions if tensor._version != version]",
            "changed = []",
        ),
        (DEPTH, "changed = [tensor for tensor, before in call.versions if version(tensor) != before]", "changed = []"),
    ),
    mutant(
        "a state that a block changes in place may be used elsewhere",
        f"{UNUSUAL} depth/attaching/test_borders.py depth/test_refusals.py",
        (DEPTH, "if link.in_place and (self._direct[index] is not None or index in inside):", "if False:"),
        (DEPTH, "if link.in_place and i and (", "if False and ("),
    ),
    mutant(
        "states that the model changes in place are not noticed",
        f"{UNUSUAL} depth/test_refusals.py",
        (DEPTH, "if seen._version != version:", "if False:"),
        (DEPTH, "if version(seen) != before:", "if False:"),
        (DEPTH, "if link.aliased and self.has_changed(i):", "if False:"),
        (DEPTH, "if link.root is not None and self.has_changed(i) and (", "if False and ("),
    ),
    mutant(
        "a function that writes to its cotangent gets that which others read",
        EXACT,
        ("gradfree/depth/link.py", "return delta.clone() if self.writes else delta", "return delta"),
    ),
    mutant(
        "hooks on parameters see each block's own gradient, too",
        "depth/attaching/test_trained_parameters.py",
        (
            "gradfree/depth/*chain.py",
            "with walking(links, delta), without_hooks(leaves):",
            "with walking(links, delta):",
        ),
    ),
    mutant(
        "a block in a checkpoint is recorded twice",
        "depth/attaching/test_splits.py depth/attaching/test_inside.py",
        (
            DEPTH,
            "if not torch.is_grad_enabled() or recomputed():",
            "if not torch.is_grad_enabled():",
        ),
    ),
    mutant(
        "threads share the call that is running",
        "depth/unusual/test_threads.py",
        (
            DEPTH,
            "call = self._calls.pop(get_ident(), None)",
            "call = self._calls.popitem()[1] if self._calls else None",
        ),
    ),
    mutant(
        "full backward hooks that come later are not noticed",
        "depth/test_refusals.py",
        (DEPTH, "if any(self._hooks):", "if False:"),
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
        "algorithms/test_deeppcr.py",
        (
            "gradfree/depth/jacobians.py",
            "result[i - 1, ..., : pulled.shape[-1]]",
            "result[-i, ..., : pulled.shape[-1]]",
        ),
    ),
    mutant(
        "blocks that mix samples have dense Jacobians",
        "algorithms/test_deeppcr.py",
        ("gradfree/depth/jacobians.py", "            if mixes:\n", "            if False:\n"),
    ),
)
