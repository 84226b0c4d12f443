"""Mutants of engines for depth chains and for layers, and of fidelity, bypasses and other gradient checks."""

from mutant import mutant

PROGRAMS = "depth/programs/test_random_programs.py"
EXACT = "depth/test_exactness.py"
LAYERS = "gradfree/layers/*.py"

MUTANTS = (
    mutant(
        "the recurrence reads the residual path one link off",
        "algebra/test_scan.py",
        ("gradfree/algebra/cotangents.py", "times(delta[i + 1], factors[i + 1])", "times(delta[i + 1], factors[i])"),
    ),
    mutant(
        "one iteration less than asked for",
        PROGRAMS,
        ("gradfree/engines/sweeps.py", "min(most, len(system) - 1)", "min(most, len(system) - 1) - 1"),
    ),
    mutant(
        "an iteration takes one state more for exact than is",
        EXACT,
        ("gradfree/engines/sweeps.py", "        self._exact = 1\n", "        self._exact = 2\n"),
    ),
    mutant(
        "iterations end where they still change something",
        "front/test_tolerance.py",
        ("gradfree/engines/sweeps.py", "bool(change > tolerance)", "bool(change < tolerance)"),
    ),
    mutant(
        "a window of one link more",
        EXACT,
        ("algorithms/truncated.py", "return self.window - 1", "return self.window"),
    ),
    mutant(
        "γ is the share of K, not that of the iterations",
        EXACT,
        ("algorithms/highway_bp.py", "chain.residual(1.0 - self.gamma)", "chain.residual(self.gamma)"),
    ),
    mutant(
        "the ramp of feedback runs from one to zero",
        "time/test_recurrent.py",
        ("algorithms/dsf.py", "torch.linspace(0, 1, units,", "torch.linspace(1, 0, units,"),
    ),
    mutant(
        "the running mean of the gate takes the new value whole",
        "time/test_gate_mean.py chains/test_memory.py",
        ("gradfree/chains/memory.py", "old.lerp(value, momentum)", "old.lerp(value, 1 - momentum)"),
    ),
    mutant(
        "a segment begins one link too late",
        "depth/test_segments.py",
        ("gradfree/engines/segmented.py", "[end - size + 1 for", "[end - size + 2 for"),
    ),
    mutant(
        "what a border changes by is carried on with the wrong sign",
        "depth/test_segments.py",
        (
            "gradfree/engines/segmented.py",
            "change = plus(after, None if before is None else -before)",
            "change = plus(before, None if after is None else -after)",
        ),
    ),
    mutant(
        "direct cotangents inside a segment are lost",
        "depth/test_segments.py",
        ("gradfree/engines/segmented.py", "delta[i - 1] = plus(self.direct[i - 1], carried)", "delta[i - 1] = carried"),
    ),
    mutant(
        "cyclic reduction multiplies its matrices in the other order",
        "algebra/test_cyclic_reduction.py",
        (
            "gradfree/algebra/cyclic_reduction.py",
            "links[stride:] @ links[:-stride]",
            "links[:-stride] @ links[stride:]",
        ),
    ),
    mutant(
        "the error is sent back through all layers but the last",
        "algorithms/test_foton.py",
        (LAYERS, "for i in range(self.last, -1, -1):", "for i in range(self.last - 1, -1, -1):"),
    ),
    mutant(
        "the second pass starts on the other side of the input",
        "algorithms/test_foton.py",
        (LAYERS, "else self.recording.initial - shift", "else self.recording.initial + shift"),
    ),
    mutant(
        "differences of two passes are not scaled back to the error's norm",
        "algorithms/test_foton.py algorithms/test_foton_second_pass.py",
        (LAYERS, "(x - other).mul_(_broadcast(norms, x))", "x - other"),
    ),
    mutant(
        "the second pass draws dropout masks of its own",
        "algorithms/test_foton_second_pass.py algorithms/test_pepita.py algorithms/test_foton.py",
        (
            LAYERS,
            "return self.vjp(link, second)",
            "return link.block.forward(second)",
        ),
    ),
    mutant(
        "a loss on a layer inside the chain is not refused",
        "layers/test_layers.py",
        (
            LAYERS,
            "direct[:-1], strict=True):\n            if e is not None:",
            "direct[:-1], strict=True):\n            if False:",
        ),
    ),
    mutant(
        "weights that have changed since the pass are run again",
        "layers/test_layers.py algorithms/test_foton_second_pass.py",
        (LAYERS, "        if replaced or any(tensor._version", "        if False and any(tensor._version"),
    ),
    mutant(
        "layers of another dtype than in the pass are solved",
        "layers/test_layers.py",
        (LAYERS, "if any(p is not trained or p.dtype is not data.dtype for", "if any(False for"),
    ),
    mutant(
        "a kept F is never made anew",
        "algorithms/test_foton_second_pass.py",
        ("algorithms/foton.py", 'memory.of("foton").clear()', "pass"),
    ),
    mutant(
        "what lies before the chain of layers gets nothing",
        "algorithms/test_foton.py layers/test_layers.py",
        (LAYERS, "if self.recording.input_requires_grad:", "if False:"),
    ),
    mutant(
        "weights are made orthogonal one step late",
        "orthogonal/test_orthogonality.py",
        ("gradfree/orthogonal/retraction.py", "if count % self._every == 0", "if count % self._every == 1"),
    ),
    mutant(
        "the temperature multiplies the error",
        "orthogonal/test_temperature.py",
        ("gradfree/orthogonal/orthogonal_engine.py", "(e / factor)", "(e * factor)"),
    ),
    mutant(
        "feedback alignment sends the error through the weights themselves",
        "algorithms/test_feedback_alignment.py algorithms/test_random_feedback.py",
        (
            "algorithms/fa.py",
            "return self.matrix(memory, path, weight.shape, weight, fan_in)\n        if",
            "return weight\n        if",
        ),
    ),
    mutant(
        "feedback that is learned does not change with the weights",
        "layers/test_feedback_layers.py",
        ("algorithms/fa.py", "return weight + kept[path]", "return kept[path]"),
    ),
    mutant(
        "direct feedback does not go through a layer's own activation",
        "algorithms/test_feedback_alignment.py",
        ("algorithms/dfa.py", "            delta = chain.vjp(link, delta)\n", "            pass\n"),
    ),
    mutant(
        "feedback is drawn anew in each pass",
        "algorithms/test_random_feedback.py front/test_conformance.py",
        (
            "gradfree/engines/feedback.py",
            "        if matrix is None:\n",
            "        if True:\n            key += f' {len(kept)}'\n",
        ),
    ),
    mutant(
        "PEPITA takes the first pass's inputs",
        "algorithms/test_pepita.py",
        ("algorithms/pepita.py", "norms, at_second=True)", "norms, at_second=False)"),
    ),
    mutant(
        "fidelity is relative to the engine's own gradient",
        "front/test_fidelity.py",
        ("gradfree/fidelity.py", "(error / exact_norm).item()", "(error / norm).item()"),
    ),
    mutant(
        "a layer's fidelity is that of its first parameter",
        "front/test_fidelity.py",
        ("gradfree/fidelity.py", "_agreement(of_layer)", "_agreement(of_layer[:1])"),
    ),
    mutant(
        "fidelity takes a missing gradient for an exact one",
        "front/test_fidelity.py",
        ("gradfree/fidelity.py", "(torch.zeros_like(e) if a is None else a, e)", "(e if a is None else a, e)"),
    ),
    mutant(
        "fidelity compares the engine with itself",
        "front/test_fidelity.py",
        (
            "gradfree/fidelity.py",
            "with handle.setting(deltas=exact_deltas, use_exact=True):",
            "with handle.setting(deltas=exact_deltas):",
        ),
    ),
    mutant(
        "fidelity leaves buffers as its passes have made them",
        "front/test_fidelity.py engines/test_dry_run.py",
        ("gradfree/trial/intact.py", "                    buffer.copy_(value)\n", "                    pass\n"),
    ),
    mutant(
        "the optimizer's checkpoint is without what the engine keeps",
        "front/test_optimizer.py choosing/test_auto.py",
        ("gradfree/optimizer.py", '{"gradfree": self.handle.state_dict()}', '{"gradfree": {}}'),
    ),
    mutant(
        "a checkpoint that does not fit is loaded half",
        "front/test_optimizer.py",
        (
            "gradfree/optimizer.py",
            "            self.optimizer.load_state_dict(before)\n            raise",
            "            raise",
        ),
    ),
    mutant(
        "gradients that have come past the engine are not mentioned",
        "front/test_optimizer.py chains/test_bypass.py",
        ("gradfree/optimizer.py", "        self.handle.watch()\n", ""),
    ),
    mutant(
        "a detached engine leaves its hooks behind",
        "depth/attaching/test_traces.py",
        ("gradfree/chains/handle.py", "            part.remove()\n", "            pass\n"),
    ),
    mutant(
        "second derivatives are taken for zero",
        "engines/test_refusal_tables.py",
        (
            "gradfree/torchside/guards.py",
            "    if torch.is_grad_enabled():\n        raise",
            "    if False:\n        raise",
        ),
    ),
    mutant(
        "anomaly detection says nothing about cotangents",
        "depth/test_refusals.py",
        ("gradfree/torchside/guards.py", "if torch.is_anomaly_enabled() and not _finite(cotangents):", "if False:"),
    ),
)
