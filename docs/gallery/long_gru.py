"""A character GRU on one text of 2,048 characters a step: torch's GRU, and the same with shooting."""

import time
from pydoc_data.topics import topics

import torch
from drawing import SHORT, save

import gradfree

STEPS, LENGTH = (2, 256) if SHORT else (40, 2048)
text = torch.tensor(list("\n".join(topics.values()).encode("ascii", "replace")[: (STEPS + 1) * LENGTH]))


class Writer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.gru = torch.nn.Embedding(128, 64), torch.nn.GRU(64, 64, batch_first=True)
        self.head = torch.nn.Linear(64, 128)

    def forward(self, tokens):
        return self.head(self.gru(self.embed(tokens))[0])


def train(engine):
    torch.manual_seed(0)
    model = Writer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    if engine:
        optimizer = gradfree.EngineOptimizer(optimizer, model, engine=engine)  # the one line
    seconds, curve = 0.0, []
    for i in range(STEPS):
        window = text[i * LENGTH : (i + 1) * LENGTH + 1][None]
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(window[:, :-1])[0], window[0, 1:])
        loss.backward()
        optimizer.step()
        seconds += time.perf_counter() - start
        curve.append((seconds, loss.item()))
    return curve


torch.set_num_threads(1)
curves = {"nn.GRU": train(None), "nn.GRU with shooting": train("shooting")}
save("A GRU over 2,048 characters: the same losses, sooner", curves, "seconds", "loss")
