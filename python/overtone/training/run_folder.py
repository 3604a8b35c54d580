"""What the folder of a run holds, and whether this run may continue it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from overtone.training import checkpoint
from overtone.training.config import TrainConfig
from overtone.training.data import Data, identity, load_data
from overtone.training.errors import CheckpointError, DataError

CONFIG = "config.json"


def saved_config(folder: Path) -> TrainConfig | None:
    """The configuration of the run in the folder: its checkpoint's, or what it was started with; None without a run."""
    path = folder / checkpoint.CHECKPOINT
    if path.exists():
        return TrainConfig.from_saved(checkpoint.read_run(path)["config"], str(path))
    path = folder / CONFIG
    return TrainConfig.from_json(path) if path.exists() else None


def saved_state(folder: Path, config: TrainConfig, resume: bool) -> dict | None:
    """What the folder's checkpoint says besides tensors; None if there is none."""
    path = folder / checkpoint.CHECKPOINT
    if path.exists() and not resume:
        raise CheckpointError(f"{folder} holds a run already: resume it (--resume), or choose another folder")
    before = saved_config(folder) if resume else None
    if before is not None:
        check_same_run(folder, before, config)
    return checkpoint.read_run(path) if path.exists() else None


def check_same_run(folder: Path, before: TrainConfig, config: TrainConfig) -> None:
    """More epochs do not make it another run; everything else that decides the result does."""
    longer = before.replace(epochs=max(before.optim.epochs, config.optim.epochs))
    is_longer = longer.optim.epochs == config.optim.epochs
    check_settings(folder, longer if is_longer else before, config.decisive())


def check_settings(folder: Path, before: TrainConfig, requested: Mapping[str, Any]) -> None:
    """Refuse settings that would make it another run, whether they go together or not."""
    differences = before.differences(requested)
    if differences:
        raise CheckpointError(
            f"{folder} belongs to a different run; these settings differ (saved, requested): {'; '.join(differences)}"
        )


class Images(NamedTuple):
    """Which data a run is about: see `identity`."""

    listed: str
    digest: str

    def __str__(self) -> str:
        return f"{len(self.listed.splitlines())} classes and images (SHA-256 {self.digest[:8]})"


def identified_data(folder: Path, config: TrainConfig, state: dict | None) -> tuple[Data, Images]:
    """The data, and which they are. A run continues with its own data only."""
    data = load_data(config)
    listed = identity.listed(data)
    images = Images(listed, identity.digest(listed))
    before = images.digest if state is None else state.get("data_sha256", images.digest)
    if before != images.digest:
        raise DataError(
            f"{folder}: not the data that the run was trained on: {identity.difference(folder, before, listed)}; "
            "restore them, or train in another folder"
        )
    return data, images
