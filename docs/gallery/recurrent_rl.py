"""A policy that must remember: rollouts hold many episodes, and run_with_resets runs each in one call."""

import torch
from drawing import SHORT, save

import gradfree

UPDATES, BATCH, STEPS, EPISODE = (2, 4, 16, 8) if SHORT else (80, 32, 128, 8)


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = torch.nn.GRU(3, 32), torch.nn.Linear(32, 2)

    def forward(self, seen, state, begins):
        """Return logits (T, B, 2); ``begins`` (T, B) is true where an episode begins."""
        hidden, state = gradfree.run_with_resets(self.gru, seen, state, begins)  # in place of a loop over steps
        return self.head(hidden), state


def rollout():
    """A cue of two is shown once, when an episode begins; the action at its end should repeat it."""
    t = torch.arange(STEPS)[:, None].expand(STEPS, BATCH)
    begins = (t + torch.arange(BATCH)) % EPISODE == 0
    begins[0] = True
    cue = torch.randint(2, (STEPS, BATCH))
    index = torch.where(begins, t, torch.zeros_like(t)).cummax(0).values
    wanted = cue.gather(0, index)
    last = torch.cat([begins[1:], torch.ones(1, BATCH, dtype=torch.bool)])
    shown = torch.nn.functional.one_hot(cue, 2) * begins[..., None]
    return torch.cat([shown, last[..., None]], -1).float(), begins, last, wanted


torch.manual_seed(0)
policy, curve = Policy(), []
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
for update in range(UPDATES):
    seen, begins, last, wanted = rollout()
    logits, _ = policy(seen, torch.zeros(1, BATCH, 32), begins)
    chosen = torch.distributions.Categorical(logits=logits)
    action = chosen.sample()
    reward = (action == wanted).float()[last]
    loss = -(chosen.log_prob(action)[last] * (reward - reward.mean())).mean()  # REINFORCE with a baseline
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    curve.append((update, reward.mean().item()))
save("A recurrent policy learns to remember a cue", {"run_with_resets": curve}, "update", "mean reward")
