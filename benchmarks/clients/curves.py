"""Compare the learning of sb3-contrib's RecurrentPPO with and without ``run_with_resets`` in its policy.

    make build/clients/.ready
    build/clients/bin/python benchmarks/clients/curves.py [--steps 6144] [--seeds 3] [--rollout] [--out FILE.csv]

Writes the mean reward after each training phase of both, with the same seeds, on CartPole and Pendulum. With
``--rollout``, it only prints how much values, gradients, and weights after ten steps differ on one stored rollout, in
float64 and float32.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import torch
from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from sb3_recurrent_ppo import InOneCall
from torch import Tensor

ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1")
CURVES = Path(__file__).parents[1] / "results" / "clients" / "curves.csv"


class RecordingPPO(RecurrentPPO):
    """RecurrentPPO that stores the mean reward of each training phase."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.curve: list[float] = []

    def train(self) -> None:
        """Train, then store the mean reward."""
        super().train()
        rewards = [episode["r"] for episode in self.ep_info_buffer]
        self.curve.append(sum(rewards) / len(rewards) if rewards else float("nan"))


def curve(policy: type, environment: str, steps: int, seed: int) -> list[float]:
    """Return the mean reward of the last 100 episodes after each training phase."""
    return RecordingPPO(policy, environment, seed=seed, device="cpu").learn(steps).curve


def compare_on_a_rollout(environment: str) -> None:
    """Print the differences of both on the same data."""
    model = RecurrentPPO(RecurrentActorCriticPolicy, environment, seed=0, device="cpu")
    model.learn(model.n_steps)
    data = next(iter(model.rollout_buffer.get(model.n_steps)))
    made = [kind(**model.policy._get_constructor_parameters()) for kind in (RecurrentActorCriticPolicy, InOneCall)]
    for dtype in (torch.float64, torch.float32):
        results = []
        for policy in made:
            policy.load_state_dict(model.policy.state_dict())
            policy.to(dtype)
            # sb3 converts observations to float32.
            policy.features_extractor.register_forward_hook(lambda _, __, out, dtype=dtype: out.to(dtype))
            results.append(_ten_steps(policy, data, dtype, model.action_space.shape == ()))
        (a, after), (b, after_ours) = results
        weights = max((x - y).abs().max().item() for x, y in zip(after, after_ours, strict=True))
        print(
            f"{environment}, {dtype}: values and gradients differ by {_difference(a, b):.1e}, "
            f"weights after ten steps by {weights:.1e}"
        )


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


def _difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max((x - y).abs().max().item() / max(1e-3, x.abs().max().item()) for x, y in zip(a, b, strict=True))


def main() -> None:
    """Run everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6144)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rollout", action="store_true")
    parser.add_argument("--out", type=Path, default=CURVES)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.rollout:
        for environment in ENVIRONMENTS:
            compare_on_a_rollout(environment)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("environment", "seed", "phase", "as it is", "run_with_resets"))
        for seed in range(options.seeds):
            for environment in ENVIRONMENTS:
                plain = curve(RecurrentActorCriticPolicy, environment, options.steps, seed)
                ours = curve(InOneCall, environment, options.steps, seed)
                for phase, rewards in enumerate(zip(plain, ours, strict=True), start=1):
                    writer.writerow((environment, seed, phase, *rewards))
                file.flush()
                print(f"{environment}, seed {seed}: at last {plain[-1]:.2f} and {ours[-1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
