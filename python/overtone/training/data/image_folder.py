"""Images of the user's own: one directory per class, read with Pillow when they are needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from overtone.training.config import DataConfig
from overtone.training.data.dataset import SPLIT, Batch, Data, DataInfo, ImageSet, split
from overtone.training.data.identity import File
from overtone.training.errors import DataError, one_line, reason

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TEST_FOLDERS = ("val", "test")
# ImageNet's, which models for photographs commonly use.
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class FolderImages(ImageSet):
    """Decoded by threads (Pillow lets them run at the same time), one batch ahead of its use."""

    def __init__(self, root: Path, paths: list[Path], labels: Tensor, size: int, num_workers: int) -> None:
        self.root, self.paths, self.labels, self.size, self.num_workers = root, paths, labels, size, num_workers

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Batch]:
        def result() -> Batch:
            labels, images = ahead.pop(0)
            return Batch(torch.stack([image.result() for image in images]), labels)

        with ThreadPoolExecutor(self.num_workers) as pool:
            ahead: list[tuple[Tensor, list[Future]]] = []
            for indices in batches:
                images = [pool.submit(read_image, self.paths[index], self.size) for index in indices.tolist()]
                ahead.append((self.labels[indices], images))
                if len(ahead) == 2:
                    yield result()
            while ahead:
                yield result()

    def subset(self, indices: Tensor) -> FolderImages:
        kept = [self.paths[index] for index in indices.tolist()]
        return FolderImages(self.root, kept, self.labels[indices], self.size, self.num_workers)

    def files(self) -> list[File]:
        try:
            return [
                File(path.relative_to(self.root).as_posix(), label, path.stat().st_size, path.read_bytes)
                for path, label in zip(self.paths, self.labels.tolist(), strict=True)
            ]
        except OSError as error:
            raise DataError(f"folder: not readable: {error.filename}: {reason(error)}") from None


def read_image(path: Path, size: int, channels: int = 3) -> Tensor:
    """uint8 [channels, size, size]: the shorter side scaled to `size`, and the middle of the longer one."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            image = ImageOps.fit(in_bytes(file, channels), (size, size), Image.Resampling.BICUBIC)
    except Exception as error:  # Pillow's decoders let anything through: struct.error, IndexError, zlib.error, …
        what = error if str(error) else type(error).__name__
        raise DataError(f"cannot read image {path}: {one_line(what)}; fix or remove it") from None
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(size, size, channels).permute(2, 0, 1)


def in_bytes(image: Image, channels: int) -> Image:
    """The image in 8 bits per channel, 1 (gray) or 3 of them. Transparency is left out."""
    if image.mode in _WIDE:
        image = _scaled(image)
    elif image.mode == "La":
        image = image.convert("LA")
    elif image.mode == "P":
        image = image.convert("RGBA")  # RGB, with a warning for some palettes otherwise
    return image.convert("RGB" if channels == 3 else "L")


_WIDE = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


def _scaled(image: Image) -> Image:
    """More than 8 bits of gray in 8: Pillow would clip at 255.

    16 bits keep their upper 8, as Pillow does with 16-bit colors. Nothing tells the range of 32-bit integers and
    floating-point numbers: it is the smallest of 1 (of floats), 255 and 65535 that holds all values of the image.
    """
    whole = image.convert("F")  # exact up to 24 bits
    values = torch.frombuffer(bytearray(whole.tobytes()), dtype=torch.float32)
    least, most = values.min().item(), values.max().item()
    if not 0 <= least <= most <= 65535:  # false for NaN too
        raise ValueError(f"gray values from {least:g} to {most:g}, wanted 0 to 1 (of floats), 255 or 65535")
    has_16_bits = image.mode.startswith("I;16") or image.format in ("PNG", "PPM")
    if has_16_bits or most > 255:
        return whole.point(lambda value: value * (1 / 256) + 0)
    return whole.point(lambda value: value * (255 if image.mode == "F" and most <= 1 else 1) + 0.5)


def load_folder(config: DataConfig) -> Data:
    """`data_dir` holds one directory per class, or train/ and val/ (or test/) that do."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise DataError("folder: Pillow reads the images: pip install 'overtone[study]'") from None
    if config.dir is None:
        raise DataError("folder: data_dir is not given: wanted a folder with one directory of images per class")
    folder = Path(config.dir)
    if not folder.is_dir():
        raise DataError(f"folder: missing: {folder}; wanted a folder with one directory of images per class")
    if not (folder / "train").is_dir():
        classes = _classes(folder)
        everything = _image_set(folder, folder, classes, config)
        _check_two_of_each(folder, everything.labels, classes)
        train, test = split(everything)
        said = f"there is no {folder / 'train'}; {SPLIT}"
    else:
        test_folder = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), None)
        if test_folder is None:
            raise DataError(f"folder: missing: {folder / 'val'} (or test) beside {folder / 'train'}")
        classes = _classes(folder / "train")
        if _classes(test_folder) != classes:
            different = sorted(set(_classes(test_folder)) ^ set(classes))
            raise DataError(f"folder: {folder / 'train'} and {test_folder} differ in the class {different[0]!r}")
        train, test = (_image_set(folder, place, classes, config) for place in (folder / "train", test_folder))
        said = f"from {folder / 'train'} and {test_folder}"
    return Data(train, test, DataInfo(classes, channels=3, mean=MEAN, std=STD), said)


def _classes(folder: Path) -> list[str]:
    try:
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"folder: not readable: {folder}: {reason(error)}") from None
    if len(classes) < 2:
        raise DataError(f"folder: {folder} has {len(classes)} directories, wanted one per class and at least 2")
    return classes


def _check_two_of_each(folder: Path, labels: Tensor, classes: list[str]) -> None:
    """A split takes at least one of every class for the test, and something must be left to train on."""
    for name, count in zip(classes, labels.bincount(minlength=len(classes)).tolist(), strict=True):
        if count < 2:
            raise DataError(f"folder: {folder / name} has 1 image, wanted at least 2: one to train, one to test")


def _image_set(root: Path, folder: Path, classes: list[str], config: DataConfig) -> FolderImages:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = image_files(folder / name)
        if not found:
            raise DataError(f"folder: {folder / name} has no image ({', '.join(sorted(SUFFIXES))})")
        paths += found
        labels += [label] * len(found)
    assert config.image_size is not None  # TrainConfig has set it
    return FolderImages(root, paths, torch.tensor(labels), config.image_size, config.num_workers)


def image_files(folder: Path) -> list[Path]:
    """The images of a folder and its subfolders, in a fixed order."""

    def refuse(error: OSError) -> None:
        raise DataError(f"folder: not readable: {error.filename}: {reason(error)}")

    places = os.walk(folder, onerror=refuse)  # rglob would leave out what it cannot read
    return sorted(
        Path(place, name) for place, _, names in places for name in names if Path(name).suffix.lower() in SUFFIXES
    )
