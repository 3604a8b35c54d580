"""The model that a configuration describes, and the file that a trained one is kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overtone import models
from overtone.training import checkpoint
from overtone.training.config import TrainConfig
from overtone.training.data import DataInfo
from overtone.training.errors import CheckpointError, ConfigError, machine_errors, one_line


def build_model(config: TrainConfig, info: DataInfo) -> models.VisionTransformer:
    """With the weights that the seed decides. torch's generator is left as it was."""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.run.seed)
        try:
            return models.VisionTransformer(
                config.model.replace(in_channels=info.channels, num_classes=len(info.classes))
            )
        except ValueError as error:
            raise ConfigError(one_line(error)) from None


def save_model(folder: Path, config: TrainConfig, info: DataInfo, weights: dict[str, Tensor]) -> None:
    state = {"config": config.to_dict(), "data": info._asdict()}
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, weights, state)


def load_model(run: str | Path) -> models.VisionTransformer:
    """The trained model of a run, ready to use (eval mode, on the CPU).

    Args:
        run: the run's folder, or its model.safetensors.
    """
    path = _weights_file(run)
    checkpoint.note_if_unchecked(path)
    config, info, tensors = load_config(path), load_info(path), checkpoint.read_tensors(path)
    _check_size(path, config, info, tensors)
    with machine_errors():
        model = build_model(config, info)
    try:
        model.to(next(iter(tensors.values())).dtype)
        model.load_state_dict(tensors)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path}: its weights do not fit its configuration: {one_line(error)}") from None
    return model.eval()


def _check_size(path: Path, config: TrainConfig, info: DataInfo, tensors: dict[str, Tensor]) -> None:
    """Before a model is built, which a file that names another size could make too large for the machine."""
    head = tensors.get("head.weight", torch.empty(0, 0))
    sizes = {
        "depth": (config.model.depth, len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})),
        "classes": (len(info.classes), len(head)),
        "dim": (config.model.dim, head.shape[-1]),
    }
    for name, (said, found) in sizes.items():
        if said != found:
            raise CheckpointError(
                f"{path}: its weights do not fit its configuration: {name}: got {found}, wanted {said}"
            )


def load_config(run: str | Path) -> TrainConfig:
    """The configuration of a run."""
    path = _weights_file(run)
    return TrainConfig.from_saved(_part(path, "config"), str(path))


def load_info(run: str | Path) -> DataInfo:
    """What a run's model knows about its data: classes, channels, mean and standard deviation of the pixels."""
    path = _weights_file(run)
    try:
        return DataInfo(**_part(path, "data"))
    except TypeError as error:
        raise CheckpointError(f"{path}: damaged: {one_line(error)}") from None


def _part(path: Path, name: str) -> dict[str, Any]:
    values = checkpoint.read_state(path).get(name)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: no model of overtone train: its state has no {name}")
    return values


def _weights_file(run: str | Path) -> Path:
    path = Path(run)
    if path.is_dir():
        path = path / checkpoint.WEIGHTS
    if not path.is_file():
        raise CheckpointError(f"{path}: no trained model there; it is written after a run's first epoch")
    return path
