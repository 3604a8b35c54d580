"""Corrupted images, five severities of each kind. Every one is a function of (kind, severity, image's index)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from overtone.training import rng

SEVERITIES = (1, 2, 3, 4, 5)

# What a kind does at each severity; lengths are shares of the image's side, so that 8 and 32 pixels suffer alike.
STRENGTHS: dict[str, tuple[float, ...]] = {
    "noise": (0.08, 0.14, 0.2, 0.28, 0.36),  # standard deviation, of pixels in [0, 1]
    "impulse": (0.03, 0.06, 0.1, 0.15, 0.22),  # share of pixels that become black or white
    "blur": (0.05, 0.065, 0.08, 0.1, 0.13),  # standard deviation
    "contrast": (0.6, 0.45, 0.32, 0.22, 0.14),  # what is left of the distance to the image's mean
    "brightness": (0.1, 0.2, 0.3, 0.4, 0.5),  # added
    "occlusion": (0.125, 0.25, 0.375, 0.5, 0.625),  # side of a black square
}


def corrupted(images: Tensor, kind: str, severity: int) -> Tensor:
    """uint8 images [n, c, h, w], the whole test set in order, after a corruption (severity 1 … 5)."""
    if kind not in STRENGTHS:
        raise ValueError(f"corrupted: kind: got {kind!r}, wanted one of {', '.join(STRENGTHS)}")
    if severity not in SEVERITIES:
        raise ValueError(f"corrupted: severity: got {severity!r}, wanted 1 to 5")
    strength = STRENGTHS[kind][severity - 1]
    place = list(STRENGTHS).index(kind)

    def draw(*keys: int | Tensor) -> Tensor:
        return rng.uniform(rng.CORRUPTION, place, severity, *keys)

    pixels = _KINDS[kind](images.double() / 255, strength, draw)
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8)


def _noise(images: Tensor, strength: float, draw: Callable[..., Tensor]) -> Tensor:
    """Gaussian, by Box and Muller."""
    numbers = _numbered(images)
    radius = (-2 * (1 - draw(0, numbers)).log()).sqrt()
    return images + strength * radius * (2 * math.pi * draw(1, numbers)).cos()


def _impulse(images: Tensor, strength: float, draw: Callable[..., Tensor]) -> Tensor:
    numbers = _numbered(images)
    extreme = (draw(1, numbers) < 0.5).to(images)
    return torch.where(draw(0, numbers) < strength, extreme, images)


def _blur(images: Tensor, strength: float, draw: Callable[..., Tensor]) -> Tensor:
    deviation = strength * images.shape[-1]
    reach = math.ceil(3 * deviation)
    kernel = torch.exp(-torch.arange(-reach, reach + 1, dtype=images.dtype).square() / (2 * deviation**2))
    kernel = kernel / kernel.sum()
    count, channels, height, width = images.shape
    planes = images.reshape(-1, 1, height, width)
    planes = F.conv2d(F.pad(planes, (reach, reach, 0, 0), mode="replicate"), kernel[None, None, None, :])
    planes = F.conv2d(F.pad(planes, (0, 0, reach, reach), mode="replicate"), kernel[None, None, :, None])
    return planes.reshape(count, channels, height, width)


def _contrast(images: Tensor, strength: float, draw: Callable[..., Tensor]) -> Tensor:
    mean = images.mean((1, 2, 3), keepdim=True)
    return mean + strength * (images - mean)


def _brightness(images: Tensor, strength: float, draw: Callable[..., Tensor]) -> Tensor:
    return images + strength


def _occlusion(images: Tensor, strength: float, draw: Callable[..., Tensor]) -> Tensor:
    *_, height, width = images.shape
    side = max(1, round(strength * width))
    index = torch.arange(len(images))
    top, left = ((draw(k, index) * (size - side + 1)).long()[:, None] for k, size in enumerate((height, width)))
    rows, columns = torch.arange(height), torch.arange(width)
    in_rows, in_columns = (rows >= top) & (rows < top + side), (columns >= left) & (columns < left + side)
    return images * ~(in_rows[:, None, :, None] & in_columns[:, None, None, :])


def _numbered(images: Tensor) -> Tensor:
    """A number for every pixel of every image."""
    return torch.arange(images.numel()).view(images.shape)


_KINDS: dict[str, Callable[[Tensor, float, Callable[..., Tensor]], Tensor]] = {
    "noise": _noise,
    "impulse": _impulse,
    "blur": _blur,
    "contrast": _contrast,
    "brightness": _brightness,
    "occlusion": _occlusion,
}
