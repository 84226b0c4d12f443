"""Nets and options for FOTON's tests."""

from torch import nn

import gradfree
from gradfree.algorithms import FOTON
from gradfree.testing.cases.models import gradients

FORMS = {
    "stored": {},
    "streaming": {"streaming": True},
    "tangent": {"perturbation": "tangent"},
    "streaming, tangent": {"streaming": True, "perturbation": "tangent"},
    "F kept": {"refresh_feedback_every": 3},
}


def convolutions(bend=nn.Identity):
    """Kernel = stride and non-expanding, from (N, 3, 8, 8) to (N, 5)."""
    first, second = nn.Conv2d(3, 12, 2, stride=2), nn.Conv2d(12, 20, 2, 2)
    return nn.Sequential(first, bend(), second, bend(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(20, 5))


def orthogonal(net):
    gradfree.orthogonalize(net)
    return net


def foton_gradients(net, x, **options):
    with FOTON(**options).attach(net, [""]):
        return gradients(net, lambda: net(x))
