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
from overtone.training.data.text import BYTES, TextInfo
from overtone.training.errors import CheckpointError, ConfigError, machine_errors, one_line


def build_model(config: TrainConfig, info: DataInfo | TextInfo) -> Any:
    """With the weights that the seed decides. torch's generator is left as it was."""
    with torch.random.fork_rng([]):
        torch.manual_seed(config.run.seed)
        try:
            wanted: Any = config.model
            if isinstance(info, TextInfo):
                return models.GPT(wanted.replace(vocab_size=BYTES))
            return models.VisionTransformer(wanted.replace(in_channels=info.channels, num_classes=len(info.classes)))
        except ValueError as error:
            raise ConfigError(one_line(error)) from None


def save_model(folder: Path, config: TrainConfig, info: DataInfo | TextInfo, weights: dict[str, Tensor]) -> None:
    state = {"config": config.to_dict(), "data": info._asdict()}
    checkpoint.write_tensors(folder / checkpoint.WEIGHTS, weights, state)


def load_model(run: str | Path) -> Any:
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


def _check_size(path: Path, config: TrainConfig, info: DataInfo | TextInfo, tensors: dict[str, Tensor]) -> None:
    """Before a model is built, which a file that names another size could make too large for the machine."""

    def size(name: str, axis: int) -> int:
        shape = tensors[name].shape if name in tensors else ()
        return shape[axis] if axis < len(shape) else 0

    model = config.model
    sizes = {
        "depth": (model.depth, len({name.split(".")[1] for name in tensors if name.startswith("blocks.")})),
        "dim": (model.dim, size("pos_embed", 2)),
        "mlp_ratio": (int(model.dim * model.mlp_ratio), size("blocks.0.mlp.fc1.weight", 0)),
    }
    if isinstance(info, TextInfo):
        sizes["context_length"] = (model.context_length, size("pos_embed", 1))  # type: ignore[attr-defined]
    else:
        sizes["classes"] = (len(info.classes), size("head.weight", 0))
    for name, (said, found) in sizes.items():
        if said != found:
            raise CheckpointError(
                f"{path}: its weights do not fit its configuration: {name}: got {found}, wanted {said}"
            )


def load_config(run: str | Path) -> TrainConfig:
    """The configuration of a run."""
    path = _weights_file(run)
    return TrainConfig.from_saved(_part(path, "config"), str(path))


def load_info(run: str | Path) -> Any:
    """What a run's model knows about its data: classes, channels, mean and standard deviation of the pixels."""
    path = _weights_file(run)
    try:
        part = _part(path, "data")
        return TextInfo(**part) if "source" in part else DataInfo(**part)
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
