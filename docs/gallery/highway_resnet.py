"""Highway-BP in a ResNet, in Lightning: one word of the Trainer, beside autograd."""

import lightning
import torch
from drawing import SHORT, save
from sklearn.datasets import load_digits

import gradfree
import gradfree.lightning  # registers every engine as a strategy

EPOCHS, DEPTH = (1, 8) if SHORT else (6, 20)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
train, test = slice(None, 128 if SHORT else 1400), slice(1400, None)


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = gradfree.create_model("preact_resnet", depth=DEPTH, in_channels=1, num_classes=10, width=4)
        self.curve = []

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_epoch_end(self):
        self.net.eval()
        with torch.no_grad():
            right = (self.net(images[test]).argmax(1) == labels[test]).float().mean().item()
        self.net.train()
        self.curve.append((self.current_epoch + 1, 100 * right))


quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
curves = {}
for name in ("auto", "highway_bp"):  # "auto" is Lightning's own choice: autograd on this device
    lightning.seed_everything(0, verbose=False)
    model, data = Digits(), torch.utils.data.TensorDataset(images[train], labels[train])
    trainer = lightning.Trainer(strategy=name, accelerator="cpu", devices=1, max_epochs=EPOCHS, **quiet)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=64, shuffle=True))
    curves["autograd" if name == "auto" else name] = model.curve
save("A ResNet on digits: autograd and Highway-BP without iterations", curves, "epoch", "test accuracy (%)")
