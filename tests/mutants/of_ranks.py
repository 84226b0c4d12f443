"""Mutants of chains on several ranks."""

from mutant import mutant

RANKS = "ranks/test_exact_ranks.py"

MUTANTS = (
    mutant(
        "what a rank's border changes by is carried on with the wrong sign",
        RANKS,
        ("gradfree/engines/rank_segment.py", "_times_all(end - before, factors)", "_times_all(before - end, factors)"),
    ),
    mutant(
        "direct cotangents inside a rank's run are lost",
        RANKS,
        (
            "gradfree/engines/rank_segment.py",
            "delta = carried if i == 0 else plus(self._direct[i - 1], carried)",
            "delta = carried",
        ),
    ),
    mutant(
        "a weight that two ranks would hold is each rank's own",
        "ranks/test_refused_on_ranks.py ranks/test_rank_docs.py",
        ("gradfree/ranks/placement.py", "if home[name] != rank:", "if False:"),
    ),
    mutant(
        "what the model returns may depend on weights of another rank",
        "ranks/test_refused_on_ranks.py",
        ("gradfree/ranks/rank_pass.py", "raise errors.ELSEWHERE.error(what=what, name=name)", "pass"),
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
        ("gradfree/ranks/microbatches.py", "    refuse_mixing(model)\n", ""),
    ),
)
