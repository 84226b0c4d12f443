"""What a training step of one model on several ranks takes, by the times of its blocks and of the links between."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """A model of the times of a step through blocks that all take the same.

    A turn is one rank's run of blocks, once, on one of m microbatches: forward, for the cotangent of its input (a
    pull), or for the gradients of its weights. What lies around the blocks is left out.

    Attributes:
        forward: seconds of one process's forward pass through all blocks with the whole batch.
        pull: likewise for the cotangent of the first block's input.
        weights: likewise for the gradients of all weights.
        overhead: seconds that each of the three takes beside that, however small the batch.
        latency: seconds that a message takes, however short.
        transfer: seconds that a state of the whole batch takes besides: its bytes by the bandwidth.
    """

    forward: float = 1 / 3
    pull: float = 1 / 3
    weights: float = 1 / 3
    overhead: float = 0.0
    latency: float = 0.0
    transfer: float = 0.0

    @property
    def one_process(self) -> float:
        """Seconds of a step of one process."""
        return self.forward + self.pull + self.weights + 3 * self.overhead

    def layer_parallel(self, ranks: int, microbatches: int, sweeps: int) -> float:
        """Return the seconds of a step where all runs are solved at once: the forward pass goes from rank to rank.

        Each of ``sweeps``, as far as there are borders, pulls through all runs at once, and the last walk computes the
        weights' gradients, too. Ranks lag behind the one on their right by a message.
        """
        _, b, w, t = self._turns(ranks, microbatches)
        pulls = 1 + min(sweeps, ranks - 1)
        return self._through(ranks, microbatches) + (ranks - 1) * t + microbatches * (pulls * b + w)

    def rank_by_rank(self, ranks: int, microbatches: int) -> float:
        """Return those of ``layer_parallel`` with the engine ``backprop``: each rank sends its cotangent on first.

        It walks through its run for that, then once more for all gradients; the first rank does so once.
        """
        _, b, w, t = self._turns(ranks, microbatches)
        if ranks == 1:
            return self._through(ranks, microbatches) + microbatches * (b + w)
        return self._through(ranks, microbatches) + (ranks - 2) * (b + t) + t + microbatches * (2 * b + w)

    def gpipe(self, ranks: int, microbatches: int) -> float:
        """Return those of a pipeline, all forward passes first (Huang et al. 2019)."""
        _, b, w, t = self._turns(ranks, microbatches)
        backward = (ranks - 1) * (b + w + t) + b + w + (microbatches - 1) * max(b + w, t)
        return self._through(ranks, microbatches) + backward

    def one_f_one_b(self, ranks: int, microbatches: int) -> float:
        """Return those of a pipeline with forward and backward passes in turns, each of which waits for a message."""
        f, b, w, t = self._turns(ranks, microbatches)
        waits = 2 * t * (ranks - 1 + (microbatches - 1 if ranks > 1 else 0))
        return (ranks + microbatches - 1) * (f + b + w) + waits

    def zero_bubble(self, ranks: int, microbatches: int) -> float:
        """Return the least that zero-bubble schedules may take: one microbatch's way, or one rank's work.

        Weights' gradients fill the gaps (Qi et al. 2024).
        """
        f, b, w, t = self._turns(ranks, microbatches)
        way = ranks * (f + b) + w
        work = microbatches * (f + b + w) + (ranks - 1) * max(f + b - 2 * w, 0.0)
        return max(way, work) + 2 * (ranks - 1) * t

    def _turns(self, ranks: int, microbatches: int) -> tuple[float, float, float, float]:
        """Return the seconds of a turn forward, of a pull, for the weights, and of a message."""
        times = [(own / microbatches + self.overhead) / ranks for own in (self.forward, self.pull, self.weights)]
        return times[0], times[1], times[2], self.latency + self.transfer / microbatches if ranks > 1 else 0.0

    def _through(self, ranks: int, microbatches: int) -> float:
        """Return the seconds of a forward pass."""
        f, _, _, t = self._turns(ranks, microbatches)
        return (ranks - 1) * (f + t) + f + (microbatches - 1) * max(f, t)
