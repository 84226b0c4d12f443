"""Mutants of rows: equal blocks whose backward pass runs in one batch."""

from mutant import mutant

DEPTH = "gradfree/depth/*.py"
UNEQUAL = "depth/test_unequal_blocks.py"
ROWS = f"depth/test_rows.py {UNEQUAL}"

MUTANTS = (
    mutant(
        "the stacked parameters belong to other blocks",
        ROWS,
        (
            DEPTH,
            "Batch(self._structure, self._tensors,",
            "Batch(self._structure, {n: own[::-1] for n, own in self._tensors.items()},",
        ),
    ),
    mutant(
        "a batch forgets direct cotangents in its iterations",
        ROWS,
        (DEPTH, "                terms[i] += e\n", "                terms[i] += 0 * e\n"),
    ),
    mutant(
        "a batch adds K where it is to be subtracted from F",
        "depth/test_rows.py",
        (DEPTH, "vjps = vjps - delta * factors[-1]", "vjps = vjps + delta * factors[-1]"),
    ),
    mutant(
        "a batch is not checked against the outputs of the pass",
        ROWS,
        (DEPTH, "            assert_on_device(same, message)\n", "            pass\n"),
    ),
    mutant(
        "of a parameter of several blocks in a batch one block's gradient counts",
        ROWS,
        (
            DEPTH,
            "total.parameters[number] = plus(total.parameters[number], gradient)",
            "total.parameters[number] = gradient",
        ),
    ),
    mutant(
        "the initial state gets the gradient of a state inside the batch",
        ROWS,
        (DEPTH, "initial = entered[0].clone()", "initial = entered[-1].clone()"),
    ),
    mutant(
        "blocks under autocast are a row",
        "depth/test_rows.py",
        ("gradfree/depth/row.py", "and not torch.is_autocast_enabled(state.device.type)", "and True"),
    ),
    mutant(
        "blocks that are not equal are a row",
        UNEQUAL,
        (
            "gradfree/rows/alike.py",
            "len({signature(block) for block in blocks}) > 1",
            "len({signature(block) for block in blocks}) > len(blocks)",
        ),
    ),
    mutant(
        "a replaced layer is not noticed in a row",
        UNEQUAL,
        ("gradfree/depth/row.py", "        self._watch_again_if_changed()\n", ""),
    ),
    mutant(
        "a change of modes is not noticed",
        ROWS,
        (DEPTH, "            tuple([m.training for m in self._modules]),\n", ""),
    ),
    mutant(
        "hooks that come later are not noticed in a row",
        ROWS,
        (DEPTH, "if hooked or replaced or list(", "if list("),
    ),
    mutant(
        "other attributes of blocks are not noticed",
        ROWS,
        (
            DEPTH,
            "[*users, *(m._modules for m in self._modules if m._modules)]",
            "[m._modules for m in self._modules if m._modules]",
        ),
    ),
    mutant(
        "other layers in blocks are not noticed",
        ROWS,
        (DEPTH, "[*users, *(m._modules for m in self._modules if m._modules)]", "users"),
    ),
    mutant(
        "a state that a block of a row changes in place is not noticed",
        ROWS,
        (DEPTH, "            if version(given) != before:\n", "            if False:\n"),
    ),
    mutant(
        "the model gets the very state that a row has saved",
        ROWS,
        (DEPTH, "return states[-1].clone()", "return states[-1]"),
    ),
    mutant(
        "of a row only the last block's output is checked",
        ROWS,
        (DEPTH, "        self._check(out[:-1], batch.inputs.detach()[1:], where)\n", ""),
    ),
    mutant(
        "a row has no residual path",
        ROWS,
        (DEPTH, "0.0 if isinstance(factor, Tensor) else factor)", "0.0)"),
    ),
    mutant(
        "threads share one structure of a block",
        "depth/test_threads.py depth/test_rows.py",
        ("gradfree/rows/structure.py", "thread = get_ident()", "thread = 0"),
    ),
)
