"""Two audio effects fitted to a recording of one second: by Newton's method over all steps, and as a Python loop."""

import time

import torch
from drawing import SHORT, save

import gradfree

STEPS, LOOPED, FITS = (256, 1, 3) if SHORT else (44_100, 3, 40)


def compressor(audio, engine, attack, release, threshold, ratio):
    """Follow the level, fast upwards and slowly downwards, and turn down what is louder than the threshold."""

    def level(s, x):
        keep = torch.sigmoid(torch.where(x > s, attack, release))
        return (keep * s + (1 - keep) * x,) * 2

    loud = 20 * torch.log10(audio.abs() + 1e-4)
    levels = gradfree.scan(level, loud[0], loud, engine=engine)[1]
    return audio * 10 ** (torch.relu(levels - threshold) * (1 / ratio - 1) / 20)


def resonance(audio, engine, frequency, damping, drive):
    """Filter by a state variable filter whose resonance saturates."""

    def step(s, x):
        low, band = s
        band = band + frequency * (x - low - damping * torch.tanh(drive * band))
        return (low + frequency * band, band), low

    return gradfree.scan(step, (0 * audio[0], 0 * audio[0]), audio, engine=engine)[1]


def errors(effect, engine, target, fits):
    """Return (seconds, error relative to the first) after each step of Adam from other settings."""
    settings, found, start = (0.7 * target).requires_grad_(), [], time.perf_counter()
    optimizer = torch.optim.Adam([settings], 0.02 * float(target.abs().mean()))
    for _ in range(fits):
        optimizer.zero_grad()
        error = torch.nn.functional.mse_loss(effect(audio, engine, *settings), recordings[effect])
        error.backward()
        optimizer.step()
        found.append((time.perf_counter() - start, error.item()))
    return [(seconds, error / found[0][1]) for seconds, error in found]


torch.set_num_threads(1)
torch.manual_seed(0)
beats = 0.1 + (torch.sin(torch.arange(STEPS) / 1500) > 0)
audio = torch.randn(STEPS, 1) * beats.unsqueeze(1)  # (T, B)
targets = {compressor: torch.tensor([4.0, 7.0, -20.0, 4.0]), resonance: torch.tensor([0.1, 0.3, 1.5])}
with torch.no_grad():
    recordings = {effect: effect(audio, "newton", *target) for effect, target in targets.items()}
curves = {}
for effect, target in targets.items():
    for label, engine, fits in (("newton", "newton", FITS), ("Python loop", "backprop", LOOPED)):
        curves[f"{effect.__name__}, {label}"] = errors(effect, engine, target, fits)
save("Effects fitted to one second of audio", curves, "seconds", "error, relative to the first")
