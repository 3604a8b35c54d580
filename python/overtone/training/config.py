"""One typed configuration for everything a run depends on. Every field is a flag of `overtone train`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from overtone.training.errors import ConfigError, one_line, reason, shown

DataName = Literal["digits", "cifar10", "cifar100", "folder"]


def _field(default: Any, group: str, help: str, *, least: float = -math.inf, below: float = math.inf, neutral=False):
    """A field with what the command line says about it and what its values may be: least <= value < below.

    neutral: a resumed run may change it, since the result does not depend on it (but for rounding).
    """
    metadata = {"group": group, "help": help, "least": least, "below": below, "neutral": neutral}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a run. None stands for the data's default; see `resolved`."""

    data: DataName = _field("digits", "data", "digits (scikit-learn's), cifar10, cifar100, or folder")
    evaluate_on: Literal["test", "validation"] = _field(
        "test", "data", "validation: 20% of every class of the training images take the test images' place, as is "
        "right for choosing a recipe"
    )  # fmt: skip
    data_dir: str | None = _field(
        None,
        "data",
        "cifar: folder with the official binary archive, or where it was unpacked; folder: train/ and val/ with one "
        "directory per class each, or the classes' directories themselves: then 20% of every class (at least one "
        "image) are test images, the same ones for every --seed",
        neutral=True,
    )
    fraction: float = _field(1.0, "data", "share of the training images to use, the same of every class", least=0.0)
    image_size: int | None = _field(None, "data", "pixels of a side; only folder can choose (224)", least=1)
    workers: int = _field(2, "data", "threads that decode images of a folder", least=1, neutral=True)

    shift: int | None = _field(None, "augmentation", "shift by up to so many pixels (digits 1, cifar 4)", least=0)
    flip: bool | None = _field(None, "augmentation", "mirror every other image (all but digits)")
    crop: float | None = _field(
        None, "augmentation", "least share of the area that a crop keeps; 1: no crop (folder 0.35, else 1)", least=0.0
    )

    size: Literal["tiny", "small", "base"] = _field("tiny", "model", "ViT-Ti, ViT-S or ViT-B")
    dim: int | None = _field(None, "model", "channels, instead of the size's", least=1)
    heads: int | None = _field(None, "model", "heads, with --dim (one per 64 channels)", least=1)
    depth: int = _field(12, "model", "layers", least=1)
    patch_size: int | None = _field(None, "model", "pixels of a patch's side (digits 2, cifar 4, folder 16)", least=1)
    regime: str = _field("free", "model", "free, sharpen or smooth; or one per layer, separated by commas")
    kind: Literal["symmetric", "general"] = _field("symmetric", "model", "of the spectra: V Λ Vᵀ or V Λ V⁻¹")
    bounded: bool = _field(False, "model", "keep the eigenvalues in [-1, 0) or (0, 1]")
    norm: Literal["pre", "post"] = _field("pre", "model", "LayerNorm before or after attention and MLP")
    norm_sign: Literal[-1, 1] | None = _field(None, "model", "fixes the sign of the LayerNorm weights")
    pool: Literal["token", "mean"] = _field("token", "model", "class token, or the mean of the tokens")
    method: str = _field("plain", "model", "plain, or de_escalation, feat_scale, contranorm, attn_scale, …")
    strength: float | None = _field(None, "model", "of a method that has one")
    filter_place: Literal["block", "residual", "attention"] = _field(
        "block", "model", "where de_escalation, feat_scale and contranorm stand: on a block's result, on the stream "
        "after attention's residual, or on attention's output"
    )  # fmt: skip
    mimetic_init: float | None = _field(
        None, "model", "β: ordinary weights start at W_V W_proj = −βI + noise", least=0.0
    )
    condition_limit: float | None = _field(20.0, "model", "of V in V Λ V⁻¹; more than 1", least=1.001)
    position_std: float = _field(0.02, "model", "of the position embeddings at first; more for small data", least=1e-6)
    eigenvalue_size: float | None = _field(
        None, "model", "|λ| of spectra at first (default: that of a plain ViT's weights)", least=1e-3
    )
    drop_path: float = _field(0.0, "model", "stochastic depth: the rate of the last layer", least=0.0, below=1.0)

    epochs: int = _field(30, "recipe", "passes over the training images", least=1)
    batch_size: int = _field(64, "recipe", "images of a step, over all processes", least=1)
    accumulate: int = _field(1, "recipe", "parts that a step's images are computed in", least=1, neutral=True)
    learning_rate: float = _field(1e-3, "recipe", "after the warm-up", least=0.0)
    final_learning_rate: float = _field(1e-5, "recipe", "at the end of the cosine", least=0.0)
    warmup: float = _field(3.0, "recipe", "epochs in which the learning rate grows from zero", least=0.0)
    weight_decay: float = _field(0.05, "recipe", "AdamW's, on matrices only", least=0.0)
    beta1: float = _field(0.9, "recipe", "AdamW's", least=0.0, below=1.0)
    beta2: float = _field(0.999, "recipe", "AdamW's", least=0.0, below=1.0)
    label_smoothing: float = _field(0.1, "recipe", "probability spread over the other classes", least=0.0, below=1.0)
    clip: float = _field(1.0, "recipe", "largest norm of the gradient; 0: not clipped", least=0.0)
    ema: float = _field(0.0, "recipe", "decay of the weights' moving average, which is then tested and saved; 0: none",
                        least=0.0, below=1.0)  # fmt: skip
    precision: Literal["float32", "bfloat16", "float64"] = _field(
        "float32", "recipe", "bfloat16: autocast, after a trial in a process of its own"
    )
    recompute: bool = _field(False, "recipe", "activation checkpointing: less memory, more time", neutral=True)

    seed: int = _field(0, "run", "of weights, order and augmentation", least=0)
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "run", "auto: a GPU if there is one", neutral=True)
    compile: bool = _field(
        False, "run", "compile the model with torch.compile; a resumed run is the same bit for bit if this is the same",
        neutral=True,
    )  # fmt: skip
    parallel: Literal["ddp", "fsdp"] = _field("ddp", "run", "what several processes (torchrun) use", neutral=True)
    checkpoint_steps: int = _field(0, "run", "also write a checkpoint every so many steps", least=0, neutral=True)
    timeout: float = _field(
        600.0, "run", "seconds after which a process that hangs ends the run", least=1, neutral=True
    )
    tensorboard: bool = _field(True, "run", "also write TensorBoard's event files, if it is installed", neutral=True)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"fraction: got {self.fraction}, wanted more than 0 and at most 1")
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ConfigError(f"crop: got {self.crop}, wanted more than 0 and at most 1")
        if self.heads is not None and self.dim is None:
            raise ConfigError("heads: can only be given together with dim")

    @property
    def regimes(self) -> str | list[str]:
        """As the models take it: one word, or one per layer."""
        words = [word.strip() for word in self.regime.split(",")]
        return words[0] if len(words) == 1 else words

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "configuration") -> TrainConfig:
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                close = difflib.get_close_matches(name, names, n=1)
                raise ConfigError(f"{source}: no field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_saved(cls, values: dict[str, Any], source: str) -> TrainConfig:
        """The configuration in a checkpoint or model. Runs from before condition_limit existed had none."""
        has_no_limit = values.get("kind") == "general" and "condition_limit" not in values
        return cls.from_dict(values | {"condition_limit": None} if has_no_limit else values, source)

    @classmethod
    def from_json(cls, path: str | Path) -> TrainConfig:
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError, RecursionError) as error:
            said = reason(error) if isinstance(error, OSError) else one_line(error)
            raise ConfigError(f"{path}: no readable JSON file: {said}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: got a JSON {type(values).__name__}, wanted an object of fields")
        return cls.from_dict(values, str(path))

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def replace(self, **changes: Any) -> TrainConfig:
        return dataclasses.replace(self, **changes)

    def differences(self, other: TrainConfig) -> list[str]:
        """What makes the other run another one, as "field: ours, theirs"."""
        ours, theirs = self._decisive(), other._decisive()
        return [f"{name}: {value!r}, {theirs[name]!r}" for name, value in ours.items() if value != theirs[name]]

    def digest(self) -> str:
        """Of everything that makes it another run."""
        return hashlib.sha256(json.dumps(self._decisive()).encode()).hexdigest()

    def _decisive(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self) if not field.metadata["neutral"]]
        return {name: getattr(self, name) for name in names}

    def as_text(self) -> str:
        """One line per group."""
        groups: dict[str, list[str]] = {}
        for field in dataclasses.fields(self):
            groups.setdefault(field.metadata["group"], []).append(f"{field.name}={getattr(self, field.name)}")
        return "\n".join(f"{group}: {', '.join(values)}" for group, values in groups.items())


@functools.cache
def field_types() -> dict[str, tuple[tuple[Any, ...], bool]]:
    """Of every field: its type, or the words it is one of, and whether it may be None."""
    found = {}
    for name, hint in typing.get_type_hints(TrainConfig).items():
        is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        parts = typing.get_args(hint) if is_union else (hint,)
        (kind,) = (part for part in parts if part is not types.NoneType)
        choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else (kind,)
        found[name] = choices, types.NoneType in parts
    return found


def _check(field: dataclasses.Field, value: Any) -> None:
    choices, optional = field_types()[field.name]
    if value is None and optional:
        return
    if not isinstance(choices[0], type):
        if not isinstance(value, (int, str)) or value not in choices:
            raise ConfigError(f"{field.name}: got {shown(value)}, wanted one of {', '.join(map(str, choices))}")
        return
    (kind,) = choices
    allowed = (int, float) if kind is float else kind
    if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{field.name}: got {shown(value)}, wanted {kind.__name__}")
    if kind in (int, float):
        least, below = field.metadata["least"], field.metadata["below"]
        if not math.isfinite(value) or not least <= value < below:
            limits = f"at least {least:g}" + (f" and below {below:g}" if below < math.inf else "")
            raise ConfigError(f"{field.name}: got {shown(value)}, wanted a number of {limits}")
