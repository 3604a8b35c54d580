"""Lets the torchvision of .venv import beside the CPU build of torch; `scripts/setup` runs it.

The package index has torchvision for the CUDA build only. Beside the CPU build its compiled ops do not load, which it
allows for, but it registers what two of them do on fake tensors without asking. They get their schemas: torchvision
imports, and says of its ops that they are not there, as it means to. Where the ops load, this does nothing.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

MARK = "# added by overtone's scripts/mend_torchvision.py"
SCHEMAS = f"""

{MARK}
if not _has_ops():
    _schemas = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _schemas.define(f"{{_name}}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def mend(package: Path) -> None:
    path = package / "extension.py"
    text = path.read_text(encoding="utf-8")
    if MARK in text:
        return
    # Replaced, not written to: pip and others may have linked one file into several environments.
    new = path.with_suffix(".new")
    new.write_text(text + SCHEMAS, encoding="utf-8")
    os.replace(new, path)


if __name__ == "__main__":
    spec = importlib.util.find_spec("torchvision")
    if spec is not None and spec.submodule_search_locations:
        mend(Path(spec.submodule_search_locations[0]))
