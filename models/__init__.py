"""Models to train with gradfree's engines, or with autograd."""

from gradfree.models.gpt import GPT
from gradfree.models.lenet import LeNet
from gradfree.models.mlp import MLP
from gradfree.models.orthogonal import OrthogonalConvNet, OrthogonalLeNet, OrthogonalMLP
from gradfree.models.para_rnn import ParaGRU, ParaLSTM
from gradfree.models.pixel_classifier import PixelClassifier
from gradfree.models.recurrent_lm import RecurrentLM
from gradfree.models.residual_mlp import ResidualMLP
from gradfree.models.resnet import PostActResNet, PreActResNet
from gradfree.models.vit import ViT

__all__ = [
    "GPT",
    "MLP",
    "LeNet",
    "OrthogonalConvNet",
    "OrthogonalLeNet",
    "OrthogonalMLP",
    "ParaGRU",
    "ParaLSTM",
    "PixelClassifier",
    "PostActResNet",
    "PreActResNet",
    "RecurrentLM",
    "ResidualMLP",
    "ViT",
]
