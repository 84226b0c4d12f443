"""sb3-contrib's RecurrentPPO as it is, and with one method of its policy that calls ``run_with_resets``.

    pip install sb3-contrib
    python benchmarks/scripts/recurrent_ppo.py [--steps 4096] [--threads 1] [--seeds 1]

Trains both from the same seed on CartPole and Pendulum: seconds of the training phase and of the whole run, and the
mean reward behind each phase. On one stored rollout: how far the weights of both are apart after ten gradient steps in
float32, and values and gradients in float64.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

import gradfree

PPO: Any = import_module("sb3_contrib").RecurrentPPO
Original: Any = import_module("sb3_contrib.common.recurrent.policies").RecurrentActorCriticPolicy
ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1")


class InOneCall(Original):
    """The policy, with its loop over steps replaced."""

    @staticmethod
    def _process_sequence(features: Tensor, lstm_states: Any, episode_starts: Tensor, lstm: nn.LSTM) -> Any:
        sequences = lstm_states[0].shape[1]
        x = features.reshape(sequences, -1, lstm.input_size).swapaxes(0, 1)
        resets = episode_starts.reshape(sequences, -1).swapaxes(0, 1).bool()
        out, states = gradfree.run_with_resets(lstm, x, lstm_states, resets)
        return out.transpose(0, 1).flatten(0, 1), states


class Timed(PPO):
    """The algorithm, with a clock around its training phase."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.phases: list[float] = []
        self.curve: list[float] = []

    def train(self) -> None:
        """Train as usual."""
        start = perf_counter()
        super().train()
        self.phases.append(perf_counter() - start)
        rewards = [episode["r"] for episode in self.ep_info_buffer]
        self.curve.append(sum(rewards) / len(rewards) if rewards else float("nan"))


def trained(policy: type, environment: str, steps: int, seed: int) -> Any:
    """Return a trained model, with the seconds of the whole run."""
    model = Timed(policy, environment, n_steps=256, batch_size=128, n_epochs=10, seed=seed, device="cpu")
    start = perf_counter()
    model.learn(steps)
    model.seconds = perf_counter() - start
    return model


def compare_runs(environment: str, steps: int, seed: int) -> None:
    """Print times and rewards of both."""
    plain, ours = (trained(policy, environment, steps, seed) for policy in (Original, InOneCall))
    phases = [sum(model.phases) for model in (plain, ours)]
    print(f"{environment}, seed {seed}: training phase {phases[0]:.1f} s and {phases[1]:.1f} s, "
          f"{phases[0] / phases[1]:.1f}x; whole run {plain.seconds:.1f} s and {ours.seconds:.1f} s, "
          f"{plain.seconds / ours.seconds:.1f}x")  # fmt: skip
    print(f"  rewards {[round(r, 2) for r in plain.curve]}")
    print(f"  and     {[round(r, 2) for r in ours.curve]}")


def compare_on_a_rollout(environment: str) -> None:
    """Print how far both are apart on the same data."""
    model = PPO(Original, environment, n_steps=256, batch_size=128, n_epochs=1, seed=0, device="cpu")
    model.learn(256)
    data = next(iter(model.rollout_buffer.get(256)))
    made = [kind(**model.policy._get_constructor_parameters()) for kind in (Original, InOneCall)]
    for dtype in (torch.float64, torch.float32):
        results = []
        for policy in made:
            policy.load_state_dict(model.policy.state_dict())
            policy.to(dtype)
            # Observations are made float32 in any case.
            policy.features_extractor.register_forward_hook(lambda _, __, out, dtype=dtype: out.to(dtype))
            results.append(_ten_steps(policy, data, dtype, model.action_space.shape == ()))
        (a, after), (b, after_ours) = results
        print(f"{environment}, {dtype}: values and gradients apart by {_apart(a, b):.1e}, weights after ten steps by "
              f"{max((x - y).abs().max().item() for x, y in zip(after, after_ours, strict=True)):.1e}")  # fmt: skip


def _ten_steps(policy: Any, data: Any, dtype: torch.dtype, discrete: bool) -> tuple[list[Tensor], list[Tensor]]:
    states = type(data.lstm_states)(*(tuple(part.to(dtype) for part in both) for both in data.lstm_states))
    actions = data.actions.long().flatten() if discrete else data.actions
    mask = data.mask > 1e-8
    optimizer = torch.optim.Adam(policy.parameters(), 3e-4)
    first: list[Tensor] = []
    for step in range(10):
        starts = data.episode_starts.to(dtype)
        values, log_prob, _ = policy.evaluate_actions(data.observations.to(dtype), actions, states, starts)
        errors = (values.flatten() - data.returns)[mask].pow(2).mean()
        optimizer.zero_grad()
        (errors - (log_prob * data.advantages)[mask].mean()).backward()
        if step == 0:
            first = [values.detach(), *(p.grad.clone() for p in policy.parameters() if p.grad is not None)]
        optimizer.step()
    return first, [p.detach().clone() for p in policy.parameters()]


def _apart(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() / max(1e-3, x.abs().max().item()) for x, y in zip(a, b, strict=True))


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for environment in ENVIRONMENTS:
        compare_on_a_rollout(environment)
        for seed in range(options.seeds):
            compare_runs(environment, options.steps, seed)


if __name__ == "__main__":
    main()
