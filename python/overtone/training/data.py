"""The data sets of `overtone train`: images as bytes, a deterministic split, errors that say which file is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from overtone.training import rng
from overtone.training.config import TrainConfig
from overtone.training.errors import ConfigError, DataError
from overtone.training.identity import File

TEST_SHARE = 0.2  # of data that comes without a split
SPLIT = f"{TEST_SHARE:.0%} of every class, at least one image, are test images, the same ones for every --seed"


class ImageSet(Protocol):
    """Images that may stay on disk until they are asked for."""

    labels: Tensor  # [n], int64

    def images(self, indices: Tensor) -> Tensor:
        """uint8 [b, channels, size, size]."""

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        """`images` of one batch after the other, read ahead where reading is slow."""

    def subset(self, indices: Tensor) -> ImageSet: ...

    def files(self) -> list[File]:
        """What the images are, in their order."""


class MemoryImages:
    """Images that fit in memory."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self.labels = images, labels

    def images(self, indices: Tensor) -> Tensor:
        return self._images[indices]

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        return map(self.images, batches)

    def subset(self, indices: Tensor) -> MemoryImages:
        return MemoryImages(self._images[indices], self.labels[indices])

    def files(self) -> list[File]:
        def content() -> bytes:
            return self._images.numpy().tobytes() + self.labels.numpy().tobytes()

        return [File("", -1, self._images.nbytes, content)]


class DataInfo(NamedTuple):
    """What a model must know about its data."""

    classes: list[str]
    channels: int
    mean: list[float]  # per channel, of pixels in [0, 1]
    std: list[float]

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Pixels 0 … 255 as the model takes them: mean zero, variance one."""
        mean, std = (torch.tensor(values, dtype=dtype, device=images.device) for values in (self.mean, self.std))
        return (images.to(dtype) / 255 - mean[:, None, None]) / std[:, None, None]


class Data(NamedTuple):
    train: ImageSet
    test: ImageSet
    info: DataInfo
    origin: str = ""  # where the two sets come from, in words


# What a field that is None stands for, per data set.
DEFAULTS: dict[str, dict[str, int | float | bool]] = {
    "digits": {"image_size": 8, "patch_size": 2, "shift": 1, "flip": False, "crop": 1.0},
    "cifar10": {"image_size": 32, "patch_size": 4, "shift": 4, "flip": True, "crop": 1.0},
    "cifar100": {"image_size": 32, "patch_size": 4, "shift": 4, "flip": True, "crop": 1.0},
    "folder": {"image_size": 224, "patch_size": 16, "shift": 0, "flip": True, "crop": 0.35},
}


def resolved(config: TrainConfig) -> TrainConfig:
    """The configuration with the data's defaults for every field that is None."""
    defaults = DEFAULTS[config.data]
    changes = {name: value for name, value in defaults.items() if getattr(config, name) is None}
    config = config.replace(**changes)
    if config.data != "folder" and config.image_size != defaults["image_size"]:
        raise ConfigError(
            f"image_size: got {config.image_size}, wanted {defaults['image_size']}: {config.data} has no other"
        )
    if config.image_size % config.patch_size:  # type: ignore[operator]
        raise ConfigError(f"patch_size: got {config.patch_size}, wanted a divisor of image_size = {config.image_size}")
    return config


def load_data(config: TrainConfig) -> Data:
    """Training images (the asked fraction of them), test images, and what a model must know about them."""
    config = resolved(config)
    if config.data == "digits":
        data = _digits()
    elif config.data == "folder":
        from overtone.training.image_folder import load_folder

        data = load_folder(config)
    else:
        from overtone.training.cifar import load_cifar

        data = load_cifar(config.data, config.data_dir)
    if config.evaluate_on == "validation":
        held_out, kept = stratified(data.train.labels, TEST_SHARE, rng.VALIDATION)
        train, test = data.train.subset(kept), data.train.subset(held_out)
        origin = f"{TEST_SHARE:.0%} of every class of the training images validate; the test images are not looked at"
        data = data._replace(train=train, test=test, origin=origin)
    if config.fraction == 1:
        return data
    kept, _ = stratified(data.train.labels, config.fraction, rng.FRACTION)
    return data._replace(train=data.train.subset(kept))


def split(images: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Training and test images of data that comes without a split. Every run of every seed gets the same."""
    test, train = stratified(images.labels, TEST_SHARE, rng.SPLIT)
    return images.subset(train), images.subset(test)


def stratified(labels: Tensor, share: float, purpose: int) -> tuple[Tensor, Tensor]:
    """The indices of a share of every class (at least one), and the others. A smaller share is part of a larger one."""
    order = rng.permutation(len(labels), purpose)
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = order[labels[order] == label]
        chosen[members[: max(1, round(share * len(members)))]] = True
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]


def _digits() -> Data:
    """scikit-learn's 1797 digits of 8 × 8 pixels with 17 levels of grey."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(f"digits: scikit-learn brings them ({error}): pip install 'overtone[study]'") from None
    found = load_digits()
    images = torch.from_numpy(found.images).mul(255 / 16).round().to(torch.uint8)[:, None]
    train, test = split(MemoryImages(images, torch.from_numpy(found.target).long()))
    info = DataInfo([str(digit) for digit in range(10)], channels=1, mean=[0.305], std=[0.376])
    return Data(train, test, info, SPLIT)
