"""CIFAR-10 and CIFAR-100 from their official binary version: no pickle, every byte checked."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import Tensor

from overtone.training.data.dataset import Data, DataInfo, MemoryImages
from overtone.training.errors import DataError

PIXELS = 3 * 32 * 32


class File(NamedTuple):
    size: int
    sha256: str


class Cifar(NamedTuple):
    """What the official archive holds. A record is `label_bytes` bytes, the last of them the class, and the pixels."""

    archive: str
    archive_file: File
    folder: str  # inside the archive
    train: dict[str, File]
    test: dict[str, File]
    names: str  # the file of the classes' names
    label_bytes: int
    classes: int
    mean: list[float]
    std: list[float]

    @property
    def source(self) -> str:
        return f"https://www.cs.toronto.edu/~kriz/{self.archive}"


CIFAR = {
    "cifar10": Cifar(
        archive="cifar-10-binary.tar.gz",
        archive_file=File(170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),
        folder="cifar-10-batches-bin",
        train={
            "data_batch_1.bin": File(30730000, "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
            "data_batch_2.bin": File(30730000, "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
            "data_batch_3.bin": File(30730000, "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
            "data_batch_4.bin": File(30730000, "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
            "data_batch_5.bin": File(30730000, "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        },
        test={"test_batch.bin": File(30730000, "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b")},
        names="batches.meta.txt",
        label_bytes=1,
        classes=10,
        mean=[0.4914, 0.4822, 0.4465],
        std=[0.2470, 0.2435, 0.2616],
    ),
    "cifar100": Cifar(
        archive="cifar-100-binary.tar.gz",
        archive_file=File(168513733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"),
        folder="cifar-100-binary",
        train={"train.bin": File(153700000, "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29")},
        test={"test.bin": File(30740000, "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a")},
        names="fine_label_names.txt",
        label_bytes=2,  # coarse, then fine
        classes=100,
        mean=[0.5071, 0.4865, 0.4409],
        std=[0.2673, 0.2564, 0.2762],
    ),
}


def load_cifar(name: str, data_dir: str | None) -> Data:
    """From the archive in `data_dir`, or from the folder it unpacks to (in `data_dir`, or `data_dir` itself)."""
    cifar = CIFAR[name]
    if data_dir is None:
        raise DataError(f"{name}: data_dir is not given: wanted the folder that holds {cifar.archive} ({cifar.source})")
    folder = Path(data_dir)
    test_file = next(iter(cifar.test))
    unpacked = [place for place in (folder / cifar.folder, folder) if (place / test_file).exists()]
    if unpacked:
        contents = _from_folder(unpacked[0], cifar)
    elif (folder / cifar.archive).exists():
        contents = _from_archive(folder / cifar.archive, cifar)
    else:
        raise DataError(
            f"{name}: missing: {folder / cifar.archive}, or {cifar.folder}/ unpacked from it; "
            f"get it from {cifar.source} and leave it packed or unpack it there"
        )
    train, test = (_image_set([contents[file] for file in files], cifar) for files in (cifar.train, cifar.test))
    names = contents[cifar.names].decode().split()
    if len(names) != cifar.classes:
        raise DataError(f"{name}: {cifar.names} names {len(names)} classes, wanted {cifar.classes}; {_again(cifar)}")
    info = DataInfo(names, channels=3, mean=cifar.mean, std=cifar.std)
    return Data(train, test, info, "the official training and test images")


def _from_folder(folder: Path, cifar: Cifar) -> dict[str, bytes]:
    contents = {}
    for name, expected in {**cifar.train, **cifar.test}.items():
        path = folder / name
        _check(path, expected, cifar)
        contents[name] = path.read_bytes()
    try:
        contents[cifar.names] = (folder / cifar.names).read_bytes()
    except OSError:
        raise DataError(f"missing: {folder / cifar.names}; {_again(cifar)}") from None
    return contents


def _from_archive(path: Path, cifar: Cifar) -> dict[str, bytes]:
    _check(path, cifar.archive_file, cifar)
    contents = {}
    with tarfile.open(path) as archive:
        for name in (*cifar.train, *cifar.test, cifar.names):
            member = archive.extractfile(f"{cifar.folder}/{name}")
            assert member is not None  # the archive is the official one, to the bit
            contents[name] = member.read()
    return contents


def _check(path: Path, expected: File, cifar: Cifar) -> None:
    """By size first: a download that stopped is the common case, and it is told at once."""
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise DataError(f"damaged: {path} has {size} bytes, wanted {expected.size}; {_again(cifar)}")
        with path.open("rb") as file:
            found = _sha256(file)
    except OSError as error:
        raise DataError(f"not readable: {path}: {error.strerror}; {_again(cifar)}") from None
    if found != expected.sha256:
        raise DataError(f"damaged: {path} has SHA-256 {found}, wanted {expected.sha256}; {_again(cifar)}")


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def _again(cifar: Cifar) -> str:
    return f"get it again from {cifar.source}"


def _image_set(contents: list[bytes], cifar: Cifar) -> MemoryImages:
    records = torch.cat([_records(content, cifar) for content in contents])
    images = records[:, cifar.label_bytes :].reshape(-1, 3, 32, 32)
    return MemoryImages(images, records[:, cifar.label_bytes - 1].long())


def _records(content: bytes, cifar: Cifar) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, cifar.label_bytes + PIXELS)
