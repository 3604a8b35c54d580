"""A small archive in the layout of CIFAR-10, which the loader takes for the official one."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from overtone.training.data import cifar
from overtone.training.data.cifar import PIXELS, File


def small_cifar10(folder: Path, monkeypatch: pytest.MonkeyPatch, *, train: int, test: int) -> None:
    """Images of ten classes, told apart by their brightness, as an archive in the folder."""
    contents = {"train.bin": _records(train, 0), "test.bin": _records(test, 1)}
    contents["names.txt"] = "\n".join(f"class{number}" for number in range(10)).encode()
    path = folder / "archive.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(f"inside/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    files = {name: described(content) for name, content in contents.items()}
    small = cifar.CIFAR["cifar10"]._replace(
        archive=path.name,
        archive_file=described(path.read_bytes()),
        folder="inside",
        train={"train.bin": files["train.bin"]},
        test={"test.bin": files["test.bin"]},
        names="names.txt",
    )
    monkeypatch.setitem(cifar.CIFAR, "cifar10", small)


def described(content: bytes) -> File:
    return File(len(content), hashlib.sha256(content).hexdigest())


def _records(count: int, offset: int) -> bytes:
    """A label, then pixels around a brightness that says which."""
    return b"".join(
        bytes([number % 10])
        + bytes((20 * (number % 10) + (7 * place + number + offset) % 40) for place in range(PIXELS))
        for number in range(count)
    )
