"""What a run is trained on: sets of images as bytes, and their deterministic split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from overtone._deprecated import deprecated
from overtone.training import rng
from overtone.training.data.identity import File

TEST_SHARE = 0.2  # of data that comes without a split
SPLIT = f"{TEST_SHARE:.0%} of every class, at least one image, are test images, the same ones for every --seed"


class Batch(NamedTuple):
    """What a model is given, as bytes, and what it should say, both in the host's memory."""

    inputs: Tensor
    targets: Tensor


class Dataset(Protocol):
    """Samples that may stay on disk until they are asked for."""

    @property
    def total(self) -> int:
        """In the data's unit, images or bytes."""

    def __len__(self) -> int: ...

    def in_epoch(self, seed: int, epoch: int) -> Dataset:
        """The samples as this epoch cuts them."""

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Batch]:
        """The samples of one batch after the other, read ahead where reading is slow."""

    def files(self) -> list[File]:
        """What the samples are, in their order."""


class ImageSet:
    """Images with labels: the base of those in memory and in files."""

    labels: Tensor  # [n], int64

    def images(self, indices: Tensor) -> Tensor:
        """uint8 [b, channels, size, size]."""
        return next(self.batches([indices])).inputs

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Batch]:
        raise NotImplementedError

    def subset(self, indices: Tensor) -> ImageSet:
        raise NotImplementedError

    def files(self) -> list[File]:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def total(self) -> int:
        return len(self.labels)

    def in_epoch(self, seed: int, epoch: int) -> ImageSet:
        return self


class MemoryImages(ImageSet):
    """Images that fit in memory."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self.labels = images, labels

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Batch]:
        return (Batch(self._images[indices], self.labels[indices]) for indices in batches)

    def subset(self, indices: Tensor) -> MemoryImages:
        return MemoryImages(self._images[indices], self.labels[indices])

    def files(self) -> list[File]:
        def content() -> bytes:
            return self._images.numpy().tobytes() + self.labels.numpy().tobytes()

        return [File("", -1, self._images.nbytes, content)]


class DataInfo(NamedTuple):
    """What a model must know about its images."""

    classes: list[str]
    channels: int
    mean: list[float]  # per channel, of pixels in [0, 1]
    std: list[float]

    @property
    def unit(self) -> str:
        return "images"

    def prepare(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return self.normalize(inputs, dtype)

    def means(self, loss: float) -> dict[str, float]:
        """What is reported besides the loss."""
        return {}

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`normalize`, under its name of one release ago."""
        deprecated("DataInfo.normalise is deprecated, use normalize")
        return self.normalize(images, dtype)

    def normalize(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Pixels 0 … 255 as the model takes them: mean zero, variance one."""

        def constants(values: list[float]) -> Tensor:  # made on the device: a copy would wait for it
            return torch.stack([torch.full((1, 1), value, dtype=dtype, device=images.device) for value in values])

        return (images.to(dtype) / 255 - constants(self.mean)) / constants(self.std)


class Data(NamedTuple):
    train: Any  # a Dataset; an ImageSet where the data are images
    test: Any
    info: Any  # a DataInfo, or a TextInfo
    origin: str = ""  # where the two sets come from, in words


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
