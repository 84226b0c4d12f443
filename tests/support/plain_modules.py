"""LightningModules and data without any code for gradfree: this file does not import it."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

KINDS = ("layers", "blocks", "time")


class Block(nn.Module):
    """x + g(x)."""

    def __init__(self, width):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(width, width), nn.Tanh())

    def forward(self, x):
        return x + self.branch(x)


class Net(nn.Module):
    """A net of plain layers, residual blocks or a GRU: every engine accepts at least one kind."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.stem = nn.Linear(6, 8)
        if kind == "layers":
            self.middle = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        elif kind == "blocks":
            self.middle = nn.Sequential(*[Block(8) for _ in range(4)])
        else:
            self.middle = nn.GRU(1, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.middle(x.unsqueeze(-1))[0][:, -1] if self.kind == "time" else self.middle(x)
        return self.head(x)


class PlainModule(pl.LightningModule):
    """A usual LightningModule."""

    def __init__(self, kind, lr=0.1, batch_size=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = Net(kind)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch, index):
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch, index):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(samples(), batch_size=16)

    test_dataloader = predict_dataloader = val_dataloader


def samples():
    """Return 64 samples, the same at every call, in float32."""
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(64, 6, dtype=torch.float32, generator=numbers)
    return TensorDataset(x, torch.randint(3, (64,), generator=numbers))


def weights(module):
    """Return all weights as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])
