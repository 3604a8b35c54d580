"""Everything a run depends on: groups of settings, each of which is also a flag of `overtone train`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from overtone._deprecated import deprecated, renamed_keywords
from overtone.models import GPTConfig, TransformerConfig, ViTConfig
from overtone.training.errors import ConfigError, one_line, reason, shown

DataName = Literal["digits", "cifar10", "cifar100", "folder", "text"]

# What a setting that is not given, or None, stands for: it depends on the data.
DATA_DEFAULTS: dict[str, dict[str, Any]] = {
    "digits": {"image_size": 8, "patch_size": 2, "shift": 1, "flip": False, "crop": 1.0, "label_smoothing": 0.1},
    "cifar10": {"image_size": 32, "patch_size": 4, "shift": 4, "flip": True, "crop": 1.0, "label_smoothing": 0.1},
    "cifar100": {"image_size": 32, "patch_size": 4, "shift": 4, "flip": True, "crop": 1.0, "label_smoothing": 0.1},
    "folder": {"image_size": 224, "patch_size": 16, "shift": 0, "flip": True, "crop": 0.35, "label_smoothing": 0.1},
    "text": {"image_size": None, "shift": 0, "flip": False, "crop": 1.0, "label_smoothing": 0.0},
}
SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}  # dim, num_heads

# The names of one release ago.
RENAMED = {
    "fraction": "train_fraction",
    "workers": "num_workers",
    "heads": "num_heads",
    "position_std": "pos_embed_std",
    "eigenvalue_size": "init_eigenvalue",
    "recompute": "grad_checkpointing",
    "accumulate": "grad_accumulation",
    "final_learning_rate": "min_learning_rate",
    "warmup": "warmup_epochs",
    "clip": "clip_grad_norm",
    "parallel": "strategy",
}


def _field(default: Any, help: str, *, ge: float = -math.inf, lt: float = math.inf, affects_result=True) -> Any:
    """A field with what the command line says about it and what its values may be: ge <= value < lt.

    affects_result: False where a resumed run may change it, since the result does not depend on it (but for rounding).
    """
    metadata = {"help": help, "ge": ge, "lt": lt, "affects_result": affects_result}
    return dataclasses.field(default=default, metadata=metadata)


class _Group:
    """A dataclass whose fields are checked by what they say about themselves."""

    def __post_init__(self) -> None:
        for setting in settings().values():
            if setting.group is type(self):
                setting.check(getattr(self, setting.field))


@dataclass(frozen=True, kw_only=True)
class DataConfig(_Group):
    """What a run is trained and tested on. None stands for the data's own default."""

    name: DataName = _field("digits", "digits (scikit-learn's), cifar10, cifar100, folder (of images), or text")
    evaluate_on: Literal["test", "validation"] = _field(
        "test", "validation: 20% of every class of the training images take the test images' place, as is right for "
        "choosing a recipe"
    )  # fmt: skip
    dir: str | None = _field(
        None,
        "cifar: folder with the official binary archive, or where it was unpacked; folder: train/ and val/ with one "
        "directory per class each, or the classes' directories themselves: then 20% of every class (at least one "
        "image) are test images, the same ones for every --seed; text: a text file, a folder of *.txt, or of "
        "WikiText-103's raw files (default: the documentation that this Python brings)",
        affects_result=False,
    )
    train_fraction: float = _field(1.0, "share of the training data to use, the same of every class", ge=0.0)
    image_size: int | None = _field(None, "pixels per side; only folder can choose (224)", ge=1)
    num_workers: int = _field(2, "threads that decode images of a folder", ge=1, affects_result=False)
    shift: int | None = _field(None, "shift by up to so many pixels (digits 1, cifar 4)", ge=0)
    flip: bool | None = _field(None, "mirror every other image (all but digits)")
    crop: float | None = _field(
        None, "smallest share of the area that a crop keeps; 1: no crop (folder 0.35, else 1)", ge=0.0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.train_fraction <= 1:
            raise ConfigError(f"train_fraction: got {self.train_fraction}, wanted more than 0 and at most 1")
        if self.crop is not None and not 0 < self.crop <= 1:
            raise ConfigError(f"crop: got {self.crop}, wanted more than 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class OptimConfig(_Group):
    """How the weights are updated: AdamW, a warm-up and a cosine."""

    epochs: int = _field(30, "passes over the training data", ge=1)
    batch_size: int = _field(64, "samples per step, over all processes", ge=1)
    grad_accumulation: int = _field(1, "parts that a step's batch is computed in", ge=1, affects_result=False)
    learning_rate: float = _field(1e-3, "after the warm-up", ge=0.0)
    min_learning_rate: float = _field(1e-5, "at the end of the cosine", ge=0.0)
    warmup_epochs: float = _field(3.0, "epochs in which the learning rate grows from zero", ge=0.0)
    weight_decay: float = _field(0.05, "AdamW's, on matrices only", ge=0.0)
    beta1: float = _field(0.9, "AdamW's", ge=0.0, lt=1.0)
    beta2: float = _field(0.999, "AdamW's", ge=0.0, lt=1.0)
    label_smoothing: float | None = _field(
        None, "probability spread over the other classes (0.1; text 0)", ge=0.0, lt=1.0
    )
    clip_grad_norm: float = _field(1.0, "largest norm of the gradient; 0: not clipped", ge=0.0)
    ema: float = _field(
        0.0, "decay of the weights' moving average, which is then tested and saved; 0: none", ge=0.0, lt=1.0
    )
    precision: Literal["float32", "bfloat16", "float64"] = _field(
        "float32", "bfloat16: autocast, after a trial in a process of its own"
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig(_Group):
    """How and where a run runs."""

    seed: int = _field(0, "of weights, order and augmentation", ge=0)
    device: Literal["auto", "cpu", "cuda"] = _field("auto", "auto: a GPU if there is one", affects_result=False)
    compile: bool = _field(
        False, "compile the model with torch.compile; a resumed run is the same bit for bit if this is the same",
        affects_result=False,
    )  # fmt: skip
    strategy: Literal["ddp", "fsdp"] = _field("ddp", "of several processes (torchrun)", affects_result=False)
    checkpoint_steps: int = _field(0, "also write a checkpoint every so many steps", ge=0, affects_result=False)
    timeout: float = _field(600.0, "seconds after which a process that hangs ends the run", ge=1, affects_result=False)
    tensorboard: bool = _field(True, "also write TensorBoard's event files, if it is installed", affects_result=False)


# What the command line says about a model's fields; those that follow from the data are none.
_MODEL_HELP = {
    "dim": "channels, instead of the size's",
    "num_heads": "attention heads (the size's; with --dim one per 64 channels)",
    "depth": "layers",
    "mlp_ratio": "hidden channels of the MLP per channel",
    "qkv_bias": "queries, keys and values have biases",
    "patch_size": "pixels per side of a patch (digits 2, cifar 4, folder 16)",
    "regime": "free, sharpen or smooth; or one per layer, separated by commas",
    "kind": "of the spectra: symmetric (V Λ Vᵀ) or general (V Λ V⁻¹)",
    "bounded": "keep the eigenvalues in [-1, 0) or (0, 1]",
    "init_eigenvalue": "|λ| of spectra at initialization (default: that of a plain ViT's weights)",
    "norm": "pre or post: LayerNorm before or after attention and MLP",
    "norm_sign": "1 or -1 fixes the sign of the LayerNorm weights",
    "pool": "token or mean: class token, or the mean of the tokens",
    "method": "plain, or de_escalation, feat_scale, contranorm, attn_scale, …",
    "strength": "of a method that has one",
    "context_length": "of a text's model: bytes that it sees at once",
    "tied": "of a text's model: the output's weight is that of the embeddings",
    "filter_place": "where de_escalation, feat_scale and contranorm stand: block (on a block's result), "
    "residual (on the stream after attention's residual) or attention (on attention's output)",
    "mimetic_init": "β: ordinary weights start at W_V W_proj = −βI + noise",
    "condition_limit": "of V in V Λ V⁻¹; more than 1",
    "pos_embed_std": "of the position embeddings at initialization; more for small data",
    "drop_path": "stochastic depth: the rate of the last layer",
    "grad_checkpointing": "recompute blocks in backward: less memory, more time",
}
GROUPS: dict[str, type] = {"data": DataConfig, "model": TransformerConfig, "optim": OptimConfig, "run": RunConfig}
MODELS: tuple[type[TransformerConfig], ...] = (ViTConfig, GPTConfig)


def model_class(data: str) -> type[TransformerConfig]:
    return GPTConfig if data == "text" else ViTConfig


class Setting(NamedTuple):
    """One field of a group, under the name that keywords, flags and errors have for it."""

    name: str
    group: type
    field: str
    kinds: tuple[Any, ...]  # its type, or the words it is one of
    is_optional: bool
    default: Any
    help: str
    ge: float = -math.inf
    lt: float = math.inf
    affects_result: bool = True

    def check(self, value: Any) -> None:
        """Raise a ConfigError unless this is a value of the setting."""
        if value is None and self.is_optional:
            return
        if not isinstance(self.kinds[0], type):
            if not isinstance(value, (int, str)) or value not in self.kinds:
                raise ConfigError(f"{self.name}: got {shown(value)}, wanted one of {', '.join(map(str, self.kinds))}")
            return
        (kind,) = self.kinds
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.name}: got {shown(value)}, wanted {kind.__name__}")
        if kind in (int, float) and (not math.isfinite(value) or not self.ge <= value < self.lt):
            limits = f"at least {self.ge:g}" + (f" and below {self.lt:g}" if self.lt < math.inf else "")
            wanted = f"a number of {limits}" if self.ge > -math.inf else "a finite number"
            raise ConfigError(f"{self.name}: got {shown(value)}, wanted {wanted}")


def flag(name: str) -> str:
    """A setting on the command line."""
    return f"--{name.replace('_', '-')}"


def renamed_flags(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, with those whose flag had another name one release ago under their new one."""
    names = {flag(name): name for name in (*settings(), "size")}
    renames = {flag(old): flag(new) for old, new in RENAMED.items()}
    flags = renamed_keywords("overtone train", {flag(name): value for name, value in given.items()}, renames)
    return {names[word]: value for word, value in flags.items()}


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting of every group, by name."""
    found: dict[str, Setting] = {}
    groups: tuple[Any, ...] = (DataConfig, *MODELS, OptimConfig, RunConfig)
    for group in groups:
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            if group in MODELS and (field.name not in _MODEL_HELP or field.name in found):
                continue  # the data decides it, or both kinds of models have it
            kinds, is_optional = _kinds(str if field.name == "regime" else hints[field.name])
            metadata = dict(field.metadata)
            if group in MODELS:
                metadata = {"help": _MODEL_HELP[field.name], "affects_result": field.name != "grad_checkpointing"}
            name = {"name": "data", "dir": "data_dir"}.get(field.name, field.name)
            named = TransformerConfig if group in MODELS else group
            found[name] = Setting(name, named, field.name, kinds, is_optional, field.default, **metadata)
    return found


def _kinds(hint: Any) -> tuple[tuple[Any, ...], bool]:
    """A field's type, or the words it is one of, and whether it may be None."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    (kind,) = (part for part in parts if part is not types.NoneType)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else (kind,), types.NoneType in parts


@dataclass(frozen=True, kw_only=True, init=False)
class TrainConfig:
    """Everything that decides a run.

    Args:
        data: a DataConfig, or its name.
        model: a ViTConfig, or a GPTConfig for text. What follows from the data (image_size, in_channels, num_classes,
            vocab_size) is set when it is built.
        optim: an OptimConfig.
        run: a RunConfig.
        **fields: single settings, named as the flags of `overtone train`: `TrainConfig(data="digits", depth=4,
            epochs=20)`. They count before those of the groups. `size` stands for dim and num_heads of ViT-Ti, ViT-S
            and ViT-B ("tiny", "small", "base").
    """

    data: DataConfig
    model: TransformerConfig
    optim: OptimConfig
    run: RunConfig

    def __init__(
        self,
        data: DataConfig | str = "digits",
        model: TransformerConfig | None = None,
        optim: OptimConfig | None = None,
        run: RunConfig | None = None,
        **fields: Any,
    ) -> None:
        values: dict[str, Any] = {}
        for group in (data, model, optim, run):
            values |= _settings_of(group) if isinstance(group, tuple(GROUPS.values())) else {}
        values |= {} if isinstance(data, DataConfig) else {"data": data}
        values |= _known(renamed_keywords("TrainConfig", fields, RENAMED))
        for name, value in _with_defaults(values).items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        """The fields of one release ago, when there were no groups."""
        setting = settings().get(RENAMED.get(name, name))
        if setting is None:
            raise AttributeError(f"TrainConfig has no attribute {name!r}")
        group = next(word for word, kind in GROUPS.items() if kind is setting.group)
        deprecated(f"TrainConfig.{name} is deprecated, use TrainConfig.{group}.{setting.field}")
        return getattr(getattr(self, group), setting.field)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "configuration") -> TrainConfig:
        """What `to_dict` made, or settings without their groups; names of one release ago are accepted."""
        try:
            return cls(**_flat(values))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_saved(cls, values: Mapping[str, Any], source: str) -> TrainConfig:
        """The configuration in a checkpoint or model. Runs from before condition_limit existed had none."""
        flat = _flat(values)
        has_no_limit = flat.get("kind") == "general" and "condition_limit" not in flat
        return cls.from_dict(flat | ({"condition_limit": None} if has_no_limit else {}), source)

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
        """By groups; without the fields of the model that follow from the data."""
        return {
            name: {settings()[word].field: value for word, value in _settings_of(getattr(self, name)).items()}
            for name in GROUPS
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def settings(self) -> dict[str, Any]:
        """The value of every setting, by the names of the flags."""
        return {name: value for group in GROUPS for name, value in _settings_of(getattr(self, group)).items()}

    def replace(self, **fields: Any) -> TrainConfig:
        """A copy with other values for these settings, or groups."""
        fields = renamed_keywords("TrainConfig.replace", fields, RENAMED)
        before = self.settings()
        if fields.get("data", self.data.name) != self.data.name:  # what other data left open is open again
            left_open = DATA_DEFAULTS[self.data.name].items()
            before = {name: value for name, value in before.items() if (name, value) not in left_open}
            before = {name: value for name, value in before.items() if _has(_data_name(fields["data"]), name)}
        if "size" in fields:
            del before["dim"]
        if "size" in fields or fields.get("dim", self.model.dim) != self.model.dim:
            del before["num_heads"]
        groups = {name: value for name, value in fields.items() if isinstance(value, tuple(GROUPS.values()))}
        for group in groups.values():
            before |= _settings_of(group)
        return TrainConfig(**(before | {name: value for name, value in fields.items() if name not in groups}))

    def differences(self, requested: Mapping[str, Any]) -> list[str]:
        """The settings among those requested that make another run, as "setting: ours, theirs"."""
        return [
            f"{name}: {_words(value)!r}, {_words(requested[name])!r}"
            for name, value in self.decisive().items()
            if name in requested and _words(value) != _words(requested[name])
        ]

    def digest(self) -> str:
        """Of everything that makes it another run."""
        return hashlib.sha256(json.dumps(self.decisive()).encode()).hexdigest()

    def decisive(self) -> dict[str, Any]:
        """The settings that the result depends on."""
        return {name: value for name, value in self.settings().items() if settings()[name].affects_result}

    def as_text(self) -> str:
        """One line per group."""
        lines = []
        for group in GROUPS:
            values = _settings_of(getattr(self, group))
            lines.append(f"{group}: " + ", ".join(f"{name}={_words(value)}" for name, value in values.items()))
        return "\n".join(lines)


def _words(value: Any) -> Any:
    return ",".join(value) if isinstance(value, tuple) else value


def _settings_of(group: Any) -> dict[str, Any]:
    return {
        s.name: getattr(group, s.field)
        for s in settings().values()
        if isinstance(group, s.group) and hasattr(group, s.field)
    }


def _has(data: str, name: str) -> bool:
    """Whether the data's model has a setting, if it is one of a model."""
    return settings()[name].group is not TransformerConfig or hasattr(model_class(data), name)


def _data_name(data: Any) -> Any:
    return data.name if isinstance(data, DataConfig) else data


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, from groups of them or not."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name not in GROUPS or not isinstance(value, dict):
            flat[RENAMED.get(name, name)] = value
            continue
        names = {setting.field: setting.name for setting in settings().values() if setting.group is GROUPS[name]}
        flat |= {names[field] if field in names else field: inner for field, inner in value.items()}
    return flat


def _known(values: dict[str, Any]) -> dict[str, Any]:
    names = [*settings(), "size"]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(f"no field {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return values


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """The groups, with the data's defaults for every setting that is None."""
    settings()["data"].check(values["data"])
    defaults = DATA_DEFAULTS[values["data"]]
    values = {name: value for name, value in values.items() if value is not None or name not in ("dim", "num_heads")}
    values |= {name: value for name, value in defaults.items() if values.get(name) is None}
    for name, value in values.items():
        if name not in ("regime", "size"):
            settings()[name].check(value)
        if name != "size" and not _has(values["data"], name):
            raise ConfigError(f"{name}: models of {values['data']} have no such field")
    if values["data"] != "folder" and values["image_size"] != defaults["image_size"]:
        got, wanted = values["image_size"], defaults["image_size"]
        raise ConfigError(f"image_size: got {got}, wanted {wanted}: {values['data']} has no other")
    given: dict[type, dict[str, Any]] = {group: {} for group in GROUPS.values()}
    for setting in settings().values():
        if setting.name in values:
            given[setting.group][setting.field] = values[setting.name]
    return {
        "data": DataConfig(**given[DataConfig]),
        "model": _model(model_class(values["data"]), given[TransformerConfig], values),
        "optim": OptimConfig(**given[OptimConfig]),
        "run": RunConfig(**given[RunConfig]),
    }


def _model(kind: type[TransformerConfig], given: dict[str, Any], values: dict[str, Any]) -> TransformerConfig:
    size = values.get("size", "tiny")
    if not isinstance(size, str) or size not in SIZES:
        raise ConfigError(f"size: got {shown(size)}, wanted one of {', '.join(SIZES)}")
    given = given | ({"regime": _regimes(given["regime"])} if "regime" in given else {})
    dim, num_heads = SIZES[size]
    if "dim" in given:
        num_heads = max(1, given["dim"] // 64)
    try:
        from_data = {"image_size": values["image_size"]} if kind is ViTConfig else {}
        return kind(**({"dim": dim, "num_heads": num_heads} | from_data | given))
    except ValueError as error:
        raise ConfigError(one_line(error).removeprefix(f"{kind.__name__}: ")) from None


def _regimes(value: Any) -> str | tuple[str, ...]:
    """One word, or one per layer, which the command line separates by commas."""
    if isinstance(value, str):
        words = tuple(word.strip() for word in value.split(","))
        return words[0] if len(words) == 1 else words
    if not isinstance(value, Sequence) or not all(isinstance(word, str) for word in value):
        raise ConfigError(f"regime: got {shown(value)}, wanted a word, or one per layer")
    return tuple(value)
