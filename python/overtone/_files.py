"""Files that are whole at any time: written beside the old one, flushed, and renamed over it."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from overtone.libraries import imported


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


def write_safetensors(draft: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Tensors (contiguous, on the CPU) and metadata as a safetensors file that whoever may read others may read."""
    draft.unlink(missing_ok=True)
    draft.touch()
    mode = stat.S_IMODE(draft.stat().st_mode)  # by the umask; safetensors would keep the file from other users
    imported("safetensors.torch", "study").save_file(tensors, draft, metadata)
    draft.chmod(mode)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
