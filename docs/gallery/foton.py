"""FOTON trains an orthogonal network of 20 layers without a backward pass; autograd beside it."""

import torch
from drawing import SHORT, save
from sklearn.datasets import load_digits

import gradfree

STEPS, DEPTH = (2, 5) if SHORT else (150, 20)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
images = (images - images.mean()) / images.std()


def train(engine, rate, **options):
    torch.manual_seed(0)
    model, curve = gradfree.create_model("orthogonal_mlp", in_features=64, num_classes=10, depth=DEPTH), []
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if engine:
        optimizer = gradfree.EngineOptimizer(optimizer, model, engine=engine, **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[:1400]), labels[:1400]).backward()
        optimizer.step()
        with torch.no_grad():
            right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()
        curve.append((step + 1, 100 * right))
    return curve


curves = {
    "autograd, free weights": train(None, 0.3),
    "orthogonal_backprop": train("orthogonal_backprop", 1.0, temperature=16.0),
    "foton": train("foton", 1.0, temperature=16.0),
    "dfa": train("dfa", 1.0),
}
save("Twenty orthogonal layers without a backward pass", curves, "step", "test accuracy (%)")
