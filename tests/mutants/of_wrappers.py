"""Mutants of wrappers of engines: sequences with resets, Lightning's strategies, the optimizer."""

from mutant import mutant

RESETS = "resets/test_with_resets.py"
RESUMED = "lightning/test_lightning_resume.py"
CARRIERS = "gradfree/lightning/engine_mixins.py"

MUTANTS = (
    mutant(
        "a single step has its resets inverted",
        RESETS,
        (
            "gradfree/resets/with_resets.py",
            "[part.masked_fill(resets.view(",
            "[part.masked_fill(resets.logical_not().view(",
        ),
    ),
    mutant(
        "an LSTM's padding clears c",
        RESETS,
        (
            "gradfree/resets/with_resets.py",
            "[-_SATURATED, _SATURATED, 0.0, 0.0]",
            "[_SATURATED, -_SATURATED, 0.0, 0.0]",
        ),
    ),
    mutant(
        "sequences of several steps run as one step",
        RESETS,
        ("gradfree/resets/with_resets.py", "if len(x) == 1:", "if len(x) >= 1:"),
    ),
    mutant(
        "a resumed run begins without what the engine kept",
        RESUMED,
        (CARRIERS, "self.handle.load_state_dict(self._restored or {})", "self.handle.load_state_dict({})"),
    ),
    mutant(
        "Lightning's checkpoints are without what the engine keeps",
        RESUMED,
        (CARRIERS, "checkpoint | {_KEY: self.handle.state_dict()}, *args", "checkpoint, *args"),
    ),
    mutant(
        "a Trainer leaves the engine on the module",
        "lightning/test_lightning.py lightning/test_lightning_around.py",
        (CARRIERS, "        self.handle.detach()\n", ""),
    ),
    mutant(
        "gradients that have come past an engine are not mentioned in Lightning",
        "chains/test_bypass.py",
        (CARRIERS, "        self.handle.watch()\n", ""),
    ),
    mutant(
        "each rank keeps a running mean of its own",
        "lightning/ranks/test_distributed.py",
        (CARRIERS, "if self.world_size > 1:", "if False:"),
    ),
    mutant(
        "a step leaves out its closure",
        "front/test_optimizer.py",
        ("gradfree/optimizer.py", "self.optimizer.step(closure)", "self.optimizer.step()"),
    ),
    mutant(
        "a step does not look at the gradient that is watched",
        "choosing/test_watching.py",
        ("gradfree/optimizer.py", "            self.gradient_watch.after_step()\n", "            pass\n"),
    ),
)
