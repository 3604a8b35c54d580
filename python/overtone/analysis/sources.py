"""Models by name, and inputs for them: what `overtone analyze` takes.

A source is `timm:NAME`, `hf:CONFIG`, or the folder of a run of `overtone train`. Each has a loader: it takes the text
after the prefix and whether pretrained weights are wanted, and returns the model and what the model takes. Your own:

    overtone.analysis.sources.LOADERS["mine"] = lambda name, pretrained: Source(model, Images(3, 224, 224))
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class SourceError(ValueError):
    """The model or its inputs cannot be had; the message says why and what to do."""


class Images(NamedTuple):
    """A model that takes images [B, channels, height, width], normalised by mean and std per channel."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


class Words(NamedTuple):
    """A model that takes token ids [B, tokens] below `vocabulary`."""

    vocabulary: int
    most_tokens: int


class Source(NamedTuple):
    model: nn.Module
    takes: Images | Words


def load(name: str, *, pretrained: bool = False) -> Source:
    """The model of that name, on the CPU."""
    prefix, separator, rest = name.partition(":")
    if separator and prefix in LOADERS and rest:
        return LOADERS[prefix](rest, pretrained)
    if Path(name).exists():
        return _load_run(name)
    known = ", ".join(f"{prefix}:NAME" for prefix in LOADERS)
    raise SourceError(f"{name!r}: got neither a run's folder nor one of {known}")


def _imported(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SourceError(f"{what} needs {module.partition('.')[0]}: {error}") from error


def _load_timm(name: str, pretrained: bool) -> Source:
    timm = _imported("timm", f"timm:{name}")
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise SourceError(
            f"timm:{name}: timm has no such model" + (f"; did you mean {', '.join(close)}?" if close else "")
        )
    model = timm.create_model(name, pretrained=pretrained)
    config = model.pretrained_cfg
    channels, height, width = config["input_size"]
    return Source(model, Images(channels, height, width, tuple(config["mean"]), tuple(config["std"])))


def _load_hf(name: str, pretrained: bool) -> Source:
    """A folder or file with a configuration (and weights, if wanted), or a type such as vit or gpt2."""
    transformers = _imported("transformers", f"hf:{name}")
    try:
        if not Path(name).exists() and name in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(name)
        else:
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=not pretrained)
        if pretrained:
            model = transformers.AutoModel.from_pretrained(name)
        else:
            model = transformers.AutoModel.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise SourceError(f"hf:{name}: {str(error).strip().partition(chr(10))[0]}") from error
    if getattr(config, "vocab_size", None):
        return Source(model, Words(config.vocab_size, getattr(config, "max_position_embeddings", 512)))
    if not hasattr(config, "image_size"):
        raise SourceError(f"hf:{name}: its configuration names neither vocab_size nor image_size: what does it take?")
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return Source(model, Images(getattr(config, "num_channels", 3), height, width))


def _load_run(folder: str) -> Source:
    """A run of `overtone train`."""
    from overtone.training.errors import TrainingError
    from overtone.training.model import load_config, load_info, load_model

    try:
        info, config, model = load_info(folder), load_config(folder), load_model(folder)
    except TrainingError as error:
        raise SourceError(str(error)) from error
    except ImportError as error:
        raise SourceError(f"{folder}: a run is read with {error.name}: pip install 'overtone[study]'") from error
    size = config.image_size
    assert size is not None  # where it was left open, the run has written what it took
    return Source(model, Images(info.channels, size, size, tuple(info.mean), tuple(info.std)))


LOADERS: dict[str, Callable[[str, bool], Source]] = {"timm": _load_timm, "hf": _load_hf}


def synthetic(takes: Images | Words, samples: int, *, tokens: int | None = None, seed: int = 0) -> Tensor:
    """Images of normal noise, or sequences of uniformly drawn tokens (128, or as many as the model can take)."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(takes, Images):
        return torch.randn(samples, takes.channels, takes.height, takes.width, generator=generator)
    if tokens is not None and tokens > takes.most_tokens:
        raise SourceError(f"--tokens: got {tokens}, wanted at most {takes.most_tokens}, the model's longest sequence")
    length = tokens or min(128, takes.most_tokens)
    return torch.randint(takes.vocabulary, (samples, length), generator=generator)


def images(takes: Images | Words, folder: str | Path, samples: int, batch_size: int) -> Iterator[Tensor]:
    """Batches of the first `samples` images of a folder and its subfolders, resized and normalised for the model."""
    if not isinstance(takes, Images):
        raise SourceError("--images: the model takes words, not images")
    folder = Path(folder)
    if not folder.is_dir():
        raise SourceError(f"{folder}: got no folder, wanted one with images")
    pillow = _imported("PIL.Image", "a folder of images")
    endings = pillow.registered_extensions()
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())[:samples]
    if not paths:
        raise SourceError(f"{folder}: no image was found in it or its subfolders")
    return (_batch(takes, paths[start : start + batch_size], pillow) for start in range(0, len(paths), batch_size))


def _batch(takes: Images, paths: list[Path], pillow: Any) -> Tensor:
    return torch.stack([_read(takes, path, pillow) for path in paths])


def _read(takes: Images, path: Path, pillow: Any) -> Tensor:
    """One image [C, H, W]: the shorter side resized, the middle cut out, normalised."""
    modes = {1: "L", 3: "RGB"}
    if takes.channels not in modes:
        raise SourceError(f"--images: the model takes {takes.channels} channels, wanted 1 or 3")
    try:
        with pillow.open(path) as file:
            image = file.convert(modes[takes.channels])
    except OSError as error:
        raise SourceError(f"{path}: cannot be read as an image: {error}") from error
    scale = max(takes.width / image.width, takes.height / image.height)
    size = (max(takes.width, round(image.width * scale)), max(takes.height, round(image.height * scale)))
    image = image.resize(size, pillow.Resampling.BICUBIC)
    left, top = (image.width - takes.width) // 2, (image.height - takes.height) // 2
    image = image.crop((left, top, left + takes.width, top + takes.height))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(takes.height, takes.width, -1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (takes.mean, takes.std))
    return (pixels.permute(2, 0, 1).float() / 255 - mean) / std
