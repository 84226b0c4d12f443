"""A module that does not use gradfree, and training runs with it."""

import lightning.pytorch as pl
import torch
from lightning_runs import is_bare
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gradfree
import gradfree.lightning


class ResidualClassifier(pl.LightningModule):
    """A module that does not use gradfree."""

    def __init__(self, dropout=0.5):
        super().__init__()
        self.net = gradfree.create_model(
            "residual_mlp", in_features=8, num_classes=3, depth=4, width=16, dropout=dropout
        )
        self.attached = []

    def training_step(self, batch, index):
        self.attached.append(not is_bare(self.net))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def loader():
    torch.manual_seed(3)
    return DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(3, (64,))), 16)


def trainer(tmp_path, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return pl.Trainer(default_root_dir=tmp_path, **(quiet | {"max_epochs": 2, "enable_checkpointing": False} | options))


def fit(tmp_path, strategy, **options):
    """Return the weights after two epochs."""
    torch.manual_seed(0)
    model = ResidualClassifier()
    trainer(tmp_path, strategy=strategy, **options).fit(model, loader(), loader())
    assert all(model.attached) == (strategy not in ("auto", "backprop"))
    assert is_bare(model.net)
    return torch.cat([p.detach().flatten() for p in model.parameters()])
