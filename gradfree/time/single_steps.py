"""Calls of a recurrent layer with single steps, where engines have nothing to do at once."""

from __future__ import annotations

import warnings


class SingleStepWarning:
    """Warns once if a layer's first 16 calls all have one step: an engine has nothing to parallelise there.

    Args:
        path: the layer's module path.

    Attributes:
        remaining: the number of calls that are still to be counted.
    """

    def __init__(self, path: str):
        self.path, self.remaining = path, 16

    def count(self, length: int) -> None:
        """Count a call of ``length`` steps."""
        if length > 1:
            self.remaining = 0
        elif self.remaining:
            self.remaining -= 1
            if not self.remaining:
                warnings.warn(
                    f"{self.path or 'the recurrent layer'} has been called with single steps only, where an engine "
                    "makes it slower. Pass whole sequences. For sequences whose state is reset in the middle, call "
                    "gradfree.run_with_resets(layer, input, state, resets).",
                    stacklevel=2,
                )
