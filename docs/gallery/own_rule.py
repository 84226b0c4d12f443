"""A rule of one's own in 20 lines, and how closely its gradients follow autograd's, block by block."""

from dataclasses import dataclass

import torch
from drawing import SHORT, save

import gradfree

DEPTH = 6 if SHORT else 24


@dataclass(frozen=True, kw_only=True)
class Gain(gradfree.SweepEngine):
    """Each block gets the error of the block behind it, times a gain: δ_i = e_i + gain · δ_{i+1}.

    Args:
        gain: what an error is multiplied by at each block.
        iterations: corrections by the blocks' own Jacobians.
    """

    gain: float = 1.0
    iterations: int = 0

    @property
    def sweeps(self):
        return self.iterations

    def split(self, chain):
        return chain.constant(self.gain)


torch.manual_seed(0)
model = gradfree.create_model("residual_mlp", in_features=16, num_classes=4, depth=DEPTH, width=32)
batch = torch.randn(64, 16), torch.randint(4, (64,))
rules = {
    "gain 1": Gain(),
    "gain 0.9": Gain(gain=0.9),
    "gain 1, two iterations": Gain(iterations=2),
    "truncated": gradfree.create_engine("truncated"),
}
curves = {}
for name, rule in rules.items():
    fidelity = gradfree.gradient_fidelity(rule, model, torch.nn.functional.cross_entropy, batch)
    states = reversed(fidelity.states.values())
    curves[name] = [(distance, state.relative_error) for distance, state in enumerate(states)]
save("Errors of the cotangents", curves, "blocks from the output", "relative error")
