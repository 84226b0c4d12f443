"""Mutants of chains in time: closed forms, scans, segments, Newton's method, packed and interrupted sequences."""

from mutant import mutant

RECURRENT = "time/programs/test_random_recurrences.py"
SHOOTING = f"{RECURRENT} time/test_shooting.py"
NEWTON = f"{RECURRENT} time/test_newton.py"
CELLS = f"{RECURRENT} time/cells/test_cell_layer.py"

MUTANTS = (
    mutant(
        "W_hh's gradient uses the states one step late",
        RECURRENT,
        ("gradfree/time/closed_chain.py", "_product(hidden[1:], self.out[:-1])", "_product(hidden[1:], self.out[1:])"),
    ),
    mutant(
        "W_hh's gradient lacks the first step",
        RECURRENT,
        ("gradfree/time/closed_chain.py", ".addmm_(hidden[0].t(), self.first[0])", ""),
    ),
    mutant(
        "a GRU's input gradient has the reset gate as a factor",
        RECURRENT,
        (
            "gradfree/time/closed_forms.py",
            "torch.mul(delta[0], self.new, out=hidden[..., -self.new.shape[-1] :])\n        return hidden",
            "return hidden",
        ),
    ),
    mutant(
        "a GRU's update gate has a gradient of the wrong sign",
        RECURRENT,
        ("gradfree/time/closed_forms.py", "torch.sub(before, n, out=f_z)", "torch.sub(n, before, out=f_z)"),
    ),
    mutant(
        "an LSTM's output gate lacks a factor of the sigmoid's derivative",
        RECURRENT,
        ("gradfree/time/closed_forms.py", "tanh_c * o * (1 - o)]", "tanh_c * o]"),
    ),
    mutant(
        "an LSTM's forget gate uses c after the step",
        RECURRENT,
        ("gradfree/time/closed_forms.py", "before * f * (1 - f)", "c * f * (1 - f)"),
    ),
    mutant(
        "an LSTM's VJP lacks the path from h to c",
        RECURRENT,
        (
            "gradfree/time/closed_forms.py",
            "return None, delta[0][steps] * self.out[steps] * self.carry[steps]",
            "return None, None",
        ),
    ),
    mutant(
        "an LSTM's unrolled VJP lacks the path through h in c's cotangent",
        RECURRENT,
        ("gradfree/time/closed_forms.py", "cs[t - 1].addcmul_(whole, fs[t])", "cs[t - 1].addcmul_(cs[t], fs[t])"),
    ),
    mutant(
        "the cotangent of the final state is lost",
        RECURRENT,
        ("gradfree/time/fused_layer.py", "            e[-1] += final\n", "            pass\n"),
    ),
    mutant(
        "the direct cotangent of the last step is lost in iterations",
        RECURRENT,
        (
            "gradfree/time/time_chain.py",
            "torch.cat([direct[:-1] + rest_vjp, direct[-1:]])",
            "torch.cat([direct[:-1] + rest_vjp, torch.zeros_like(direct[-1:])])",
        ),
    ),
    mutant(
        "packed sequences get the final state's cotangent at the end of the longest",
        RECURRENT,
        (
            "gradfree/time/fused_layer.py",
            "e.flatten(0, 1).index_add_(0, self.packing.last, final)",
            "e[-1] += final",
        ),
    ),
    mutant(
        "packed sequences run in reverse from the end of the longest",
        RECURRENT,
        ("gradfree/time/packing.py", "lengths - 1 - step.unsqueeze(1)", "steps - 1 - step.unsqueeze(1)"),
    ),
    mutant(
        "the mean gate counts padding",
        "time/test_gate_mean.py",
        (
            "gradfree/time/time_chain.py",
            "return d.mean((0, 1)) if self.valid is None else (d * self.valid).sum((0, 1)) / self.valid.sum()",
            "return d.mean((0, 1))",
        ),
    ),
    mutant(
        "the VJPs of any cell are added one step late",
        CELLS,
        (
            "gradfree/time/unrolled_chain.py",
            "None if v is None else v[1:] for v",
            "None if v is None else v[:-1] for v",
        ),
    ),
    mutant(
        "a cell that returns other states in one batch is not refused",
        "time/cells/test_cell_refusals.py",
        (
            "gradfree/time/unrolled_chain.py",
            "if not all(_close(a, s, within) for a, s in zip(again, states, strict=True)):",
            "if False:",
        ),
    ),
    mutant(
        "a cell with other parameters than in the forward pass is not refused",
        "time/cells/test_cell_refusals.py time/cells/test_cell_layer.py",
        (
            "gradfree/time/unrolled_chain.py",
            "if len(own) != len(parameters) or not all(map(_same, parameters, own)):",
            "if False:",
        ),
    ),
    mutant(
        "a scan's factors are one step off",
        "algebra/test_time_scan.py",
        ("gradfree/algebra/time_scan.py", "factors[1:][order]", "factors[:-1][order]"),
    ),
    mutant(
        "a scan's link products are those of the other direction",
        "algebra/test_time_scan.py",
        (
            "gradfree/algebra/time_scan.py",
            "inside[:-1] if reverse else inside[1:]",
            "inside[1:] if reverse else inside[:-1]",
        ),
    ),
    mutant(
        "a block scan couples parts one step off",
        "algebra/test_block_scan.py",
        (
            "gradfree/algebra/block_scan.py",
            "f.roll(-1, 0).flip(0)",
            "f.flip(0)",
        ),
    ),
    mutant(
        "the reverse direction's outputs are not flipped",
        SHOOTING,
        ("gradfree/time/forward.py", "run.out.flip(0) if direction else run.out", "run.out"),
    ),
    mutant(
        "segment starts are corrected in the wrong direction",
        SHOOTING,
        ("gradfree/segments/multiple_shooting.py", "start[here] += jump", "start[here] -= jump"),
    ),
    mutant(
        "segments count as converged after one run",
        SHOOTING,
        (
            "gradfree/segments/multiple_shooting.py",
            "outcome.settled = exact or outcome.mismatches[-1] <=",
            "outcome.settled = True or outcome.mismatches[-1] <=",
        ),
    ),
    mutant(
        "the forward pass uses segments that did not converge",
        SHOOTING,
        (
            "gradfree/segments/segmented_forward.py",
            "segments.trajectory(found) if outcome.settled else run_sequentially(recurrence)",
            "segments.trajectory(found)",
        ),
    ),
    mutant(
        "the backward pass uses segments that did not converge",
        SHOOTING,
        (
            "gradfree/segments/segmented_backward.py",
            "return segments.gradients(result) if outcome.settled else None,",
            "return segments.gradients(result),",
        ),
    ),
    mutant(
        "a GRU segment's backward pass uses the state after its first step",
        SHOOTING,
        (
            "gradfree/segments/gru_backward.py",
            "unflatten(0, (plan.count, -1))[:-1, -1]",
            "unflatten(0, (plan.count, -1))[1:, 0]",
        ),
    ),
    mutant(
        "the last GRU segment lacks the cotangent of the remaining steps",
        SHOOTING,
        ("gradfree/segments/gru_backward.py", "        entering[-1] = self.last\n", ""),
    ),
    mutant(
        "the padding of the last segment has cotangents",
        SHOOTING,
        (
            "gradfree/segments/segmented_backward.py",
            "F.pad(e, (0, 0, 0, 0, 0, missing))",
            "torch.cat([e, e[-1:].expand(missing, -1, -1)])",
        ),
    ),
    mutant(
        "Newton's method starts from the guess, not from the initial state",
        NEWTON,
        ("gradfree/newton/all_steps.py", "torch.cat([f.unsqueeze(0), part[:-1]])", "torch.cat([part[:1], part[:-1]])"),
    ),
    mutant(
        "Newton's method counts as converged after one sweep",
        NEWTON,
        ("gradfree/newton/iteration.py", "exact = outcome.sweeps >= len(state[0])", "exact = outcome.sweeps >= 1"),
    ),
    mutant(
        "Newton's method corrects with the wrong sign",
        NEWTON,
        (
            "gradfree/newton/all_steps.py",
            "[new - old for new, old in zip(after, base, strict=True)]",
            "[old - new for new, old in zip(after, base, strict=True)]",
        ),
    ),
    mutant(
        "saved tensors that were changed in place are used",
        "engines/test_refusal_tables.py time/test_recurrent.py",
        (
            "gradfree/torchside/guards.py",
            "        raise errors.CHANGED_IN_PLACE.error(where=where) from error\n",
            "        return tuple(ctx.to_save)\n",
        ),
    ),
    mutant(
        "the outputs' cotangent is changed in place",
        RECURRENT,
        ("gradfree/time/fused_layer.py", "cotangent if of_h is None else cotangent.clone()", "cotangent"),
    ),
    mutant(
        "the reverse direction's input gradient is not flipped",
        RECURRENT,
        (
            "gradfree/time/fused_layer.py",
            "return x.flip(0) if direction else x\n        packed",
            "return x\n        packed",
        ),
    ),
    mutant(
        "the reverse direction uses the forward direction's initial state",
        RECURRENT,
        ("gradfree/time/fused_layer.py", "first = [state[d] for", "first = [state[0] for"),
    ),
    mutant(
        "a part of the state without direct cotangents has none at all",
        RECURRENT,
        (
            "gradfree/time/time_chain.py",
            "return torch.cat([rest_vjp, rest_vjp.new_zeros(1, *rest_vjp.shape[1:])])",
            "return None",
        ),
    ),
    mutant(
        "the corrector does not propagate changes at borders",
        "time/test_shooting.py",
        ("gradfree/segments/multiple_shooting.py", "scan(jump, d[:-1], reverse)", "jump"),
    ),
    mutant(
        "parameters that are frozen between the passes get gradients",
        RECURRENT,
        ("gradfree/time/unrolled_chain.py", "if want and p.requires_grad]", "if want]"),
    ),
)
