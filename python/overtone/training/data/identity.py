"""Which images a run is trained and tested on: a digest for its checkpoints, and a list that names differences.

Names, labels, sizes and the split always count. The content of the files counts where all of them together have at
most a gigabyte: hashing costs about a second then, and a training reads them anyway. Times do not count, since a copy
of the data is as good.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from overtone.training.errors import DataError, reason

if TYPE_CHECKING:
    from overtone.training.data.dataset import Data

LIST = "data.tsv"  # in the run's folder
MAX_HASHED_BYTES = 2**30  # bytes of all files
MAX_NAMED = 3  # of each kind of difference


class File(NamedTuple):
    """One file of the data, or all of an image set that is in memory (without a name)."""

    name: str
    label: int
    size: int
    read: Callable[[], bytes]


def listed(data: Data) -> str:
    """A line per class and per file: what it is, label, size, SHA-256 (its start; - where it is not read), name."""
    files = [("train", file) for file in data.train.files()] + [("test", file) for file in data.test.files()]
    is_read = sum(file.size for _, file in files) <= MAX_HASHED_BYTES
    with ThreadPoolExecutor(4) as pool:  # hashing and reading run beside each other
        hashes = list(pool.map(_hash, [file for _, file in files])) if is_read else ["-"] * len(files)
    rows = [
        (what, file.label, file.size, found, file.name or f"all {what}")
        for (what, file), found in zip(files, hashes, strict=True)
    ]
    classes = getattr(data.info, "classes", [])  # text has none
    rows += [("class", label, 0, "-", name) for label, name in enumerate(classes)]
    return "".join("\t".join((*map(str, row[:-1]), json.dumps(row[-1]))) + "\n" for row in rows)


def _hash(file: File) -> str:
    try:
        return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError as error:
        raise DataError(f"not readable: {file.name}: {reason(error)}") from None


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def difference(folder: Path, digest_before: str, now: str) -> str:
    """What has changed since the run's folder was written, in words."""
    try:
        before = (folder / LIST).read_text()
    except (OSError, ValueError):
        before = ""
    if digest(before) != digest_before:
        return f"{LIST}, which would say what, is missing or changed"
    old, new = _rows(before), _rows(now)
    both = old.keys() & new.keys()
    kinds = {
        "added": new.keys() - old.keys(),
        "removed": old.keys() - new.keys(),
        "changed": {key for key in both if old[key][2:] != new[key][2:]},
        "given another label": {key for key in both if old[key][1] != new[key][1]},
        "moved between training and test": {key for key in both if old[key][0] != new[key][0]},
    }
    samples = "images" if any(is_class for is_class, _ in new) else "texts"
    return "; ".join(
        f"{noun} {what}: {_few(found)}"
        for noun in ("classes", samples)
        for what, keys in kinds.items()
        if (found := sorted(name for is_class, name in keys if is_class == (noun == "classes")))
    )


def _rows(text: str) -> dict[tuple[bool, str], tuple[str, ...]]:
    """Set, label, size and hash by (whether it is a class, name)."""
    rows = [line.split("\t") for line in text.splitlines()]
    return {(row[0] == "class", json.loads(row[4])): tuple(row[:4]) for row in rows}


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
