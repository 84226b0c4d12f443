"""Mutants of chains on several ranks."""

from mutant import mutant

RANKS = "ranks/test_exact_ranks.py"

MUTANTS = (
    mutant(
        "a rank's share of a shared weight's gradient is dropped",
        RANKS,
        (
            "gradfree/ranks/shared_weights.py",
            "return [found.get(name) for name in names]",
            "return [None] * len(names)",
        ),
    ),
    mutant(
        "what a rank's border changes by is carried on with the wrong sign",
        RANKS,
        ("gradfree/engines/across.py", "_along(end - before, factors)", "_along(before - end, factors)"),
    ),
    mutant(
        "direct cotangents inside a rank's run are lost",
        RANKS,
        (
            "gradfree/engines/across.py",
            "delta = carried if i == 0 else plus(self._direct[i - 1], carried)",
            "delta = carried",
        ),
    ),
    mutant(
        "what a rank gives another besides states gets no gradient back",
        RANKS,
        (
            "gradfree/ranks/shared_weights.py",
            "self.messages.give(list(found.values()),",
            "self.messages.give([0 * g for g in found.values()],",
        ),
    ),
    mutant(
        "weights that modules around the chain share are each rank's own",
        RANKS,
        ("gradfree/ranks/shared_weights.py", "if node is self._node}", "if node is None}"),
    ),
    mutant(
        "the outputs of microbatches are joined in the other order",
        "ranks/test_microbatches.py",
        (
            "gradfree/ranks/microbatches.py",
            "columns = zip(*(row for _, row in found), strict=True)",
            "columns = zip(*(row for _, row in reversed(found)), strict=True)",
        ),
    ),
    mutant(
        "a model that mixes samples is cut into microbatches",
        "ranks/test_microbatches.py",
        ("gradfree/ranks/microbatches.py", "        refuse_mixing(model)\n", ""),
    ),
)
