"""Models in folders: `model.safetensors` and `config.json`, as on the Hugging Face Hub. Nothing is unpickled.

The configuration is also in the metadata of model.safetensors, so that one rename replaces a whole model, and a process
that is killed at any time leaves the old one or the new one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overtone._files import replace_atomically, write_safetensors
from overtone.libraries import imported
from overtone.models.blocks import Transformer
from overtone.models.config import GPTConfig, TransformerConfig, ViTConfig
from overtone.models.gpt import GPT
from overtone.models.vit import VisionTransformer

__all__ = ["load", "save"]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
METADATA = "overtone_config"
_KINDS: dict[str, tuple[type[TransformerConfig], type[Transformer]]] = {
    "overtone_vit": (ViTConfig, VisionTransformer),
    "overtone_gpt": (GPTConfig, GPT),
}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def save(model: VisionTransformer | GPT, folder: str | Path) -> None:
    """Write a model to a folder, as model.safetensors and config.json (needs the package safetensors).

    A model that is there already is replaced, at once and as a whole. A folded model is kept as one of regime "free".

    Args:
        model: of ot.models, as it was made, trained or folded. What was put around its layers (adapters, quantized
            weights, shards) must be merged first.
        folder: is made if it is not there.
    """
    config, state = _content(model)
    text = json.dumps(_fields(config), indent=2)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with replace_atomically(folder / WEIGHTS) as draft:
        write_safetensors(draft, state, {"format": "pt", METADATA: text})
    with replace_atomically(folder / CONFIG) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def load(folder: str | Path, *, device: torch.device | str | None = None) -> VisionTransformer | GPT:
    """The model that `save` has written, in eval mode, every tensor in the dtype it was saved in.

    Raises:
        FileNotFoundError: there is no model.safetensors.
        ValueError: a file is damaged, or none of `save`'s; the message names it, and why.
    """
    path = Path(folder) / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"load: {path}: there is no such file, wanted a folder that ot.models.save has written")
    with _opened(path) as file:
        config = _config(path, file)
        shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no dict)
        _require_fit(config, shapes)
        # Copies: what is read may be a view of the file.
        state = {name: file.get_tensor(name).clone() for name in shapes}
        for name, value in state.items():
            if value.dtype not in _DTYPES:
                raise ValueError(f"{name} is {value.dtype}, wanted a floating-point type of at least 16 bits")
    with torch.random.fork_rng([]):
        model = _model_of(config, dtype=next(iter(state.values())).dtype)
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()


def _content(model: Any) -> tuple[TransformerConfig, dict[str, Tensor]]:
    """The configuration of a model, and its tensors."""
    if type(model) not in (kind for _, kind in _KINDS.values()):
        raise TypeError(f"save: model: got {type(model).__name__}, wanted a VisionTransformer or a GPT of ot.models")
    state = {name: value.detach() for name, value in model.state_dict().items()}
    for name, value in state.items():
        if type(value) is not Tensor:
            kind = type(value).__name__
            raise TypeError(
                f"save: model: got a {kind} as {name}, wanted a plain tensor: gather or dequantize it first"
            )
    shapes = {name: list(value.shape) for name, value in state.items()}
    # What `fold` leaves of any regime is a model of ordinary weights.
    differences = []
    for config in (model.config, model.config.replace(regime="free", norm_sign=None)):
        difference = _difference(config, shapes)
        if difference is None:
            return config, {name: value.cpu().contiguous() for name, value in state.items()}
        differences.append(difference)
    raise ValueError(f"save: model: its tensors are not those of its config: {differences[0]}")


def _fields(config: TransformerConfig) -> dict[str, Any]:
    kinds = {kind: (name, model.__name__) for name, (kind, model) in _KINDS.items()}
    name, model = kinds[type(config)]
    return {"model_type": name, "architectures": [model], **dataclasses.asdict(config)}


def _config(path: Path, file: Any) -> TransformerConfig:
    """The configuration in the file's metadata, which that in config.json must not contradict."""
    text = (file.metadata() or {}).get(METADATA)
    beside = path.with_name(CONFIG)
    if text is None:
        hint = "; overtone.training.load_model loads the run's" if "checked_state" in (file.metadata() or {}) else ""
        raise ValueError(f"it has no configuration, wanted a file that ot.models.save has written{hint}")
    fields = json.loads(text)
    if beside.is_file() and json.loads(beside.read_text(encoding="utf-8")) != fields:
        raise ValueError(f"{CONFIG} beside it is of another model; remove it, and the configuration in {WEIGHTS} holds")
    if not isinstance(fields, dict) or fields.get("model_type") not in _KINDS:
        got = fields.get("model_type") if isinstance(fields, dict) else fields
        raise ValueError(f"model_type: got {got!r}, wanted {' or '.join(map(repr, _KINDS))}")
    fields.pop("architectures", None)
    kind, _ = _KINDS[fields.pop("model_type")]
    # Before anything is made of it: a number of layers that the file does not have could fill the memory.
    blocks = {name.split(".")[1] for name in file.keys() if name.startswith("blocks.")}  # noqa: SIM118
    if fields.get("depth") != len(blocks):
        raise ValueError(f"depth: got {fields.get('depth')!r}, wanted {len(blocks)}, the number of its blocks")
    return kind(**fields)


def _model_of(config: TransformerConfig, **factory: Any) -> VisionTransformer | GPT:
    kinds: dict[Any, Any] = dict(_KINDS.values())
    return kinds[type(config)](config, **factory)


def _require_fit(config: TransformerConfig, shapes: dict[str, list[int]]) -> None:
    difference = _difference(config, shapes)
    if difference is not None:
        raise ValueError(f"its tensors are not those of its configuration: {difference}")


def _difference(config: TransformerConfig, shapes: dict[str, list[int]]) -> str | None:
    """Where tensors of these shapes are not those of a model of this configuration; None if nowhere."""
    wanted = {name: list(value.shape) for name, value in _model_of(config, device="meta").state_dict().items()}
    for name in [*wanted, *shapes]:
        if shapes.get(name) != wanted.get(name):
            return f"{name}: got {_shape(shapes.get(name))}, wanted {_shape(wanted.get(name))}"
    return None


def _shape(shape: list[int] | None) -> str:
    return "none" if shape is None else f"shape {shape}"


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file, and every error of what is in it as a ValueError that names it."""
    safetensors = imported("safetensors", "study")
    try:
        with safetensors.safe_open(path, "pt") as file:
            yield file
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged file may break any assumption of what reads it
        said = (str(error).partition("\n")[0] or type(error).__name__)[:300]
        raise ValueError(f"load: {path}: {said}") from error
