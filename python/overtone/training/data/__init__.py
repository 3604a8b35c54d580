"""The data of `overtone train`: a deterministic split, and errors that say which file is wrong."""

from __future__ import annotations

import torch

from overtone._deprecated import deprecated
from overtone.models import GPTConfig
from overtone.training import rng
from overtone.training.config import TrainConfig
from overtone.training.data.dataset import (
    SPLIT,
    TEST_SHARE,
    Batch,
    Data,
    DataInfo,
    Dataset,
    ImageSet,
    MemoryImages,
    split,
    stratified,
)
from overtone.training.errors import DataError

__all__ = ["Batch", "Data", "DataInfo", "Dataset", "ImageSet", "load_data", "resolved"]


def resolved(config: TrainConfig) -> TrainConfig:
    """The configuration itself: it holds the data's defaults since it was made."""
    deprecated("training.resolved is deprecated: a TrainConfig holds the data's defaults")
    return config


def load_data(config: TrainConfig) -> Data:
    """Training data (the fraction of them that is asked for), test data, and what a model must know about them."""
    wanted = config.data
    if isinstance(config.model, GPTConfig):
        from overtone.training.data.text import load_text

        return load_text(config, config.model.context_length)
    if wanted.name == "digits":
        data = _digits()
    elif wanted.name == "folder":
        from overtone.training.data.image_folder import load_folder

        data = load_folder(wanted)
    else:
        from overtone.training.data.cifar import load_cifar

        data = load_cifar(wanted.name, wanted.dir)
    if wanted.evaluate_on == "validation":
        held_out, kept = stratified(data.train.labels, TEST_SHARE, rng.VALIDATION)
        train, test = data.train.subset(kept), data.train.subset(held_out)
        origin = f"{TEST_SHARE:.0%} of every class of the training images validate; the test images are not looked at"
        data = data._replace(train=train, test=test, origin=origin)
    if wanted.train_fraction == 1:
        return data
    kept, _ = stratified(data.train.labels, wanted.train_fraction, rng.FRACTION)
    return data._replace(train=data.train.subset(kept))


def _digits() -> Data:
    """scikit-learn's 1797 digits of 8 × 8 pixels with 17 gray levels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise DataError(f"digits: scikit-learn brings them ({error}): pip install 'overtone[study]'") from None
    found = load_digits()
    images = torch.from_numpy(found.images).mul(255 / 16).round().to(torch.uint8)[:, None]
    train, test = split(MemoryImages(images, torch.from_numpy(found.target).long()))
    info = DataInfo([str(digit) for digit in range(10)], channels=1, mean=[0.305], std=[0.376])
    return Data(train, test, info, SPLIT)
