"""The shapes of the benchmarks. Their labels are keys of published figures: a label never changes its meaning."""

from __future__ import annotations

import math
from typing import NamedTuple


class TokenShape(NamedTuple):
    """x: [batch, tokens, channels]."""

    batch: int
    tokens: int
    channels: int

    @property
    def label(self) -> str:
        return "x".join(map(str, self))

    @property
    def elements(self) -> int:
        return math.prod(self)


class MatrixShape(NamedTuple):
    """A batch of n × n matrices."""

    batch: int
    n: int

    @property
    def label(self) -> str:
        return f"{self.batch}x{self.n}"


class AttentionShape(NamedTuple):
    label: str
    batch: int
    tokens: int
    channels: int
    num_heads: int

    @property
    def head_dim(self) -> int:
        return self.channels // self.num_heads


class ImageShape(NamedTuple):
    """A batch of images and the model that is trained on them."""

    label: str
    batch: int
    image_size: int
    patch_size: int
    dim: int = 192
    num_heads: int = 3
    depth: int = 12

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + 1


# Tokens of ViT-Ti and ViT-B at 224 pixels, of ViT-Ti at CIFAR's 32; then sizes in between, so that growth is visible.
TOKENS = (TokenShape(64, 197, 192), TokenShape(8, 197, 768), TokenShape(256, 65, 192))
EXTRA_TOKENS = (TokenShape(64, 50, 192), TokenShape(16, 577, 192), TokenShape(8, 1025, 192))

TI_CIFAR = AttentionShape("Ti-cifar", 64, 65, 192, 3)
TI_224 = AttentionShape("Ti-224", 32, 197, 192, 3)
S_224 = AttentionShape("S-224", 16, 197, 384, 6)
B_224 = AttentionShape("B-224", 8, 197, 768, 12)
VITS = (TI_CIFAR, TI_224, S_224, B_224)
N4096 = AttentionShape("N4096", 1, 4096, 192, 3)
EXTRA_SHAPES = (
    AttentionShape("N50", 128, 50, 192, 3),
    AttentionShape("Ti-384", 8, 577, 192, 3),
    AttentionShape("N1025", 4, 1025, 192, 3),
)

STEP_TI_CIFAR = ImageShape("Ti-cifar", 64, 32, 4)
STEP_TI_224 = ImageShape("Ti-224", 16, 224, 16)
STEP_B_224 = ImageShape("B-224", 16, 224, 16, 768, 12)

SYMMETRIC = (
    MatrixShape(16384, 4),
    MatrixShape(8192, 8),
    MatrixShape(4096, 16),
    MatrixShape(1024, 32),
    MatrixShape(256, 64),
)
LARGE_SYMMETRIC = (MatrixShape(64, 128), MatrixShape(32, 197), MatrixShape(1, 64), MatrixShape(1, 384))
# All layers of a ViT-Ti, -S and -B, and a batch of small matrices.
QR = (MatrixShape(4096, 16), MatrixShape(12, 192), MatrixShape(12, 384), MatrixShape(12, 768))
