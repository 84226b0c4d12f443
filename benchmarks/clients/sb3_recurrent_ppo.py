"""sb3-contrib's ``RecurrentPPO``, with one method of its policy overridden."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from comparing import Case, Training, compare
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from torch import Tensor, nn

import gradfree

LINE = "a policy that calls run_with_resets"
CASES = (
    Case("RecurrentPPO, CartPole", LINE, 160, {"environment": "CartPole-v1"}),
    Case("RecurrentPPO, Pendulum", LINE, 160, {"environment": "Pendulum-v1"}),
)
"""All options are the defaults of the library: LSTMs of 256 units, rollouts of 128 steps, ten epochs."""


class InOneCall(RecurrentActorCriticPolicy):
    """The policy, with its loop over steps replaced."""

    @staticmethod
    def _process_sequence(features: Tensor, lstm_states: Any, episode_starts: Tensor, lstm: nn.LSTM) -> Any:
        sequences = lstm_states[0].shape[1]
        x = features.reshape(sequences, -1, lstm.input_size).swapaxes(0, 1)
        resets = episode_starts.reshape(sequences, -1).swapaxes(0, 1).bool()
        out, states = gradfree.run_with_resets(lstm, x, lstm_states, resets)
        return out.transpose(0, 1).flatten(0, 1), states


def prepare(with_line: bool, steps: int, environment: str) -> Training:
    """Return a function that trains and returns the seconds of the training phases."""
    policy = InOneCall if with_line else RecurrentActorCriticPolicy
    model = RecurrentPPO(policy, environment, seed=0, device="cpu")
    phases: list[float] = []
    train: Callable[[], None] = model.train

    def timed() -> None:
        start = perf_counter()
        train()
        phases.append(perf_counter() - start)

    def learn() -> dict[str, float]:
        # Ten steps of the optimizer to a rollout.
        model.learn(model.n_steps * -(-steps // model.n_epochs))
        return {"training phases": sum(phases)}

    model.train = timed
    return learn


if __name__ == "__main__":
    compare("sb3-contrib", CASES, prepare)
