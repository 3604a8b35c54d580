"""Files that are whole at any time: written beside the old one, flushed, and renamed over it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """A draft to write to, which takes the place of `path` once all of it is on the disk; on an error it is removed."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        yield draft
        _flush(draft)
        os.replace(draft, path)
        _flush(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)  # part of a file would only fill the disk
        raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
