"""Random changes of training images, each a function of (seed, epoch, sample)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from overtone.training import rng
from overtone.training.config import DataConfig


def augment(images: Tensor, samples: Tensor, epoch: int, config: DataConfig, seed: int) -> Tensor:
    """uint8 images [b, c, h, w] of the samples [b], as this epoch sees them."""

    def draw(purpose: int) -> Tensor:
        return rng.uniform(purpose, seed, epoch, samples)

    if config.crop is not None and config.crop < 1:
        images = _cropped(images, config.crop, draw)
    if config.shift or config.flip:
        images = _shifted(images, config.shift or 0, bool(config.flip), draw)
    return images


def _shifted(images: Tensor, limit: int, flip: bool, draw) -> Tensor:
    """By up to `limit` pixels, black coming in; mirrored with probability 1/2."""
    *_, height, width = images.shape
    rows = torch.arange(height, device=images.device) + _steps(draw(rng.SHIFT_ROWS), limit)  # [b, h]
    columns = torch.arange(width, device=images.device) + _steps(draw(rng.SHIFT_COLUMNS), limit)  # [b, w]
    if flip:
        columns = torch.where(draw(rng.FLIP)[:, None] < 0.5, width - 1 - columns, columns)
    inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]  # [b, h, w]
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    moved = images.permute(0, 2, 3, 1)[
        sample, rows.clamp(0, height - 1)[:, :, None], columns.clamp(0, width - 1)[:, None]
    ]
    return (moved * inside[..., None]).permute(0, 3, 1, 2)


def _steps(uniform: Tensor, limit: int) -> Tensor:
    """-limit … limit with equal probability, [b, 1]."""
    return (uniform * (2 * limit + 1)).floor().long()[:, None] - limit


def _inside(positions: Tensor, size: int) -> Tensor:
    return (positions >= 0) & (positions < size)


def _cropped(images: Tensor, min_area: float, draw) -> Tensor:
    """A square of between `min_area` and all of the image, anywhere in it, scaled back to the image's size."""
    side = (min_area + (1 - min_area) * draw(rng.CROP_AREA)).sqrt()  # of an image that reaches from -1 to 1
    middle = [(1 - side) * (2 * draw(purpose) - 1) for purpose in (rng.CROP_COLUMN, rng.CROP_ROW)]
    none = torch.zeros_like(side)
    transform = torch.stack((side, none, middle[0], none, side, middle[1]), 1).view(-1, 2, 3).float()
    grid = F.affine_grid(transform, list(images.shape), align_corners=False)
    scaled = F.grid_sample(images.float(), grid, padding_mode="border", align_corners=False)
    return scaled.round().to(torch.uint8)
