"""Images of the user's own: one directory per class, read with Pillow when they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from overtone.training.config import TrainConfig
from overtone.training.data import Data, DataInfo, split
from overtone.training.errors import DataError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TEST_FOLDERS = ("val", "test")
# ImageNet's, which models for photographs commonly use.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class FolderImages:
    """Decoded by threads (Pillow lets them run at the same time), one batch ahead of its use."""

    def __init__(self, paths: list[Path], labels: Tensor, size: int, workers: int) -> None:
        self.paths, self.labels, self.size, self.workers = paths, labels, size, workers

    def images(self, indices: Tensor) -> Tensor:
        return next(self.batches([indices]))

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Tensor]:
        with ThreadPoolExecutor(self.workers) as pool:
            ahead: list[list] = []
            for indices in batches:
                ahead.append([pool.submit(read_image, self.paths[index], self.size) for index in indices.tolist()])
                if len(ahead) == 2:
                    yield _stacked(ahead.pop(0))
            for batch in ahead:
                yield _stacked(batch)

    def subset(self, indices: Tensor) -> FolderImages:
        return FolderImages(
            [self.paths[index] for index in indices.tolist()], self.labels[indices], self.size, self.workers
        )


def _stacked(futures: list) -> Tensor:
    return torch.stack([future.result() for future in futures])


def read_image(path: Path, size: int) -> Tensor:
    """uint8 [3, size, size]: the shorter side scaled to `size`, and the middle of the longer one."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = ImageOps.fit(file.convert("RGB"), (size, size), Image.Resampling.BICUBIC)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"not a readable image: {path}: {error}; mend or remove it") from None
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(size, size, 3).permute(2, 0, 1)


def load_folder(config: TrainConfig) -> Data:
    """`data_dir` holds one directory per class, or train/ and val/ (or test/) that do."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError("folder: Pillow reads the images: pip install 'overtone[study]'") from None
    if config.data_dir is None:
        raise DataError("folder: data_dir is not given: wanted a folder with one directory of images per class")
    folder = Path(config.data_dir)
    if not folder.is_dir():
        raise DataError(f"folder: missing: {folder}; wanted a folder with one directory of images per class")
    if not (folder / "train").is_dir():
        classes = _classes(folder)
        train, test = split(_image_set(folder, classes, config))
    else:
        test_folder = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
        if test_folder is None:
            raise DataError(f"folder: missing: {folder / 'val'} (or test) beside {folder / 'train'}")
        classes = _classes(folder / "train")
        if _classes(test_folder) != classes:
            different = sorted(set(_classes(test_folder)) ^ set(classes))
            raise DataError(f"folder: {folder / 'train'} and {test_folder} differ in the class {different[0]!r}")
        train, test = (_image_set(place, classes, config) for place in (folder / "train", test_folder))
    return Data(train, test, DataInfo(classes, channels=3, mean=MEAN, std=STD))


def _classes(folder: Path) -> list[str]:
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise DataError(f"folder: {folder} has {len(classes)} directories, wanted one per class and at least 2")
    return classes


def _image_set(folder: Path, classes: list[str], config: TrainConfig) -> FolderImages:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(path for path in (folder / name).rglob("*") if path.suffix.lower() in SUFFIXES)
        if not found:
            raise DataError(f"folder: {folder / name} has no image ({', '.join(sorted(SUFFIXES))})")
        paths += found
        labels += [label] * len(found)
    assert config.image_size is not None  # resolved
    return FolderImages(paths, torch.tensor(labels), config.image_size, config.workers)
