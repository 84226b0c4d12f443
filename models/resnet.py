"""CIFAR ResNets whose residual stream keeps its shape, so that the skip connections have K = I."""

from __future__ import annotations

from abc import abstractmethod

import torch.nn.functional as F
from torch import Tensor, nn


def downsample(x: Tensor, s: int) -> Tensor:
    """Return ``x``, (B, C, H, W), as (B, s·C, H/s, W/s): of s×s patches, rows are averaged, columns become channels.

    After i-RevNet, as Highway-BP uses it (arXiv 2501.17086, appendix G). ``upsample`` is a right inverse.
    """
    b, c, h, w = x.shape
    columns = x.view(b, c, h // s, s, w // s, s).mean(3)
    return columns.permute(0, 1, 4, 2, 3).reshape(b, c * s, h // s, w // s)


def upsample(y: Tensor, s: int) -> Tensor:
    """Return ``y``, (B, s·C, H, W), as (B, C, s·H, s·W): channels become columns, rows are repeated s times."""
    b, c, h, w = y.shape
    columns = y.view(b, c // s, s, h, w).permute(0, 1, 3, 4, 2).reshape(b, c // s, h, 1, w * s)
    return columns.expand(-1, -1, -1, s, -1).reshape(b, c // s, h * s, w * s)


class _Block(nn.Module):
    """Two 3×3 convolutions at 1/``stride`` of the stream's resolution and ``stride`` times its channels."""

    def __init__(self, width: int, stride: int):
        super().__init__()
        channels = width * stride
        self.stride = stride
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.norm2 = nn.BatchNorm2d(channels)

    @abstractmethod
    def branch(self, x: Tensor) -> Tensor:
        """Return the residual branch at the reduced resolution."""

    def residual(self, x: Tensor) -> Tensor:
        """Return Up(branch(Down(x)))."""
        return upsample(self.branch(downsample(x, self.stride)), self.stride)


class PreActBlock(_Block):
    """x + g(x), normalisation and ReLU before each convolution."""

    def branch(self, x: Tensor) -> Tensor:
        """Return conv(ReLU(norm(conv(ReLU(norm(x))))))."""
        x = self.conv1(F.relu(self.norm1(x)))
        return self.conv2(F.relu(self.norm2(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state, shaped as ``x``, (B, C, H, W)."""
        return x + self.residual(x)


class PostActBlock(_Block):
    """ReLU(x + g(x)), normalisation after each convolution."""

    def branch(self, x: Tensor) -> Tensor:
        """Return norm(conv(ReLU(norm(conv(x)))))."""
        x = F.relu(self.norm1(self.conv1(x)))
        return self.norm2(self.conv2(x))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next state, shaped as ``x``, (B, C, H, W)."""
        return F.relu(x + self.residual(x))


class _ResNet(nn.Module):
    """Stem, ``blocks`` on one stream of ``width`` channels at full resolution, classifier on 4·``width`` channels."""

    _STRIDES = (1, 2, 4)

    def __init__(self, block: type[_Block], depth: int, in_channels: int, num_classes: int, width: int):
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 6n + 2 with n of at least 1 (8, 14, 20, 32, 56, 110 ...), not {depth}.")
        each = (depth - 2) // 6
        self.stem = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(*(block(width, s) for s in self._STRIDES for _ in range(each)))
        self.head = nn.Linear(width * self._STRIDES[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _features(self, images: Tensor) -> Tensor:
        """Return the stream after the last block, (B, width, H, W)."""
        if images.shape[-1] % self._STRIDES[-1] or images.shape[-2] % self._STRIDES[-1]:
            raise ValueError(
                f"height and width must be multiples of {self._STRIDES[-1]}, not {tuple(images.shape[-2:])}."
            )
        return self.blocks(self._stem(images))

    def _stem(self, images: Tensor) -> Tensor:
        return self.stem(images)

    def _classify(self, stream: Tensor) -> Tensor:
        return self.head(stream.mean((-2, -1)))


class PreActResNet(_ResNet):
    """Pre-activation CIFAR ResNet by depth; every block is x + g(x) on a stream of constant shape.

    He et al. 2016 (arXiv 1603.05027) with Highway-BP's shape-preserving stages (arXiv 2501.17086, appendix G).

    Args:
        depth: number of layers, 6n + 2: 32 has 15 blocks, 56 has 27, 110 has 54.
        in_channels: number of image channels.
        num_classes: number of classes.
        width: channels of the residual stream; the stages' blocks have 1, 2 and 4 times as many.
    """

    def __init__(self, depth: int = 32, in_channels: int = 3, num_classes: int = 10, width: int = 16):
        super().__init__(PreActBlock, depth, in_channels, num_classes, width)
        self.norm = nn.BatchNorm2d(width * self._STRIDES[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``images`` (B, in_channels, H, W), H and W multiples of 4."""
        stream = self._features(images)
        return self._classify(F.relu(self.norm(downsample(stream, self._STRIDES[-1]))))


class PostActResNet(_ResNet):
    """CIFAR ResNet by depth with ReLU after each sum: every block is ReLU(x + g(x)) on one shape.

    He et al. 2015 (arXiv 1512.03385) with Highway-BP's shape-preserving stages (arXiv 2501.17086, appendix G).

    Args:
        depth: number of layers, 6n + 2: 32 has 15 blocks, 56 has 27, 110 has 54.
        in_channels: number of image channels.
        num_classes: number of classes.
        width: channels of the residual stream; the stages' blocks have 1, 2 and 4 times as many.
    """

    def __init__(self, depth: int = 32, in_channels: int = 3, num_classes: int = 10, width: int = 16):
        super().__init__(PostActBlock, depth, in_channels, num_classes, width)
        self.norm = nn.BatchNorm2d(width)

    def _stem(self, images: Tensor) -> Tensor:
        return F.relu(self.norm(self.stem(images)))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, num_classes) for ``images`` (B, in_channels, H, W), H and W multiples of 4."""
        return self._classify(downsample(self._features(images), self._STRIDES[-1]))
