"""Models by name, and inputs for them: what `overtone analyze` takes.

A source is `timm:NAME`, `hf:CONFIG`, or a folder: of a run of `overtone train`, or of `ot.models.save`. Each prefix has
a loader: it takes the text after it and whether pretrained weights are wanted, and returns the model and what the model
takes. A model is first built on the meta device, without memory: what is too large, or has no attention that can be
read, is refused before any work. Your own:

    overtone.cli.sources.LOADERS["mine"] = lambda name, pretrained: Source(model, Images(3, 224, 224))
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overtone.analysis.analyze import require_readable
from overtone.libraries import imported


class SourceError(ValueError):
    """The model or its inputs cannot be had; the message says why and what to do."""


class Images(NamedTuple):
    """A model that takes images [B, channels, height, width], normalized by mean and std per channel."""

    channels: int
    height: int
    width: int
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


class Words(NamedTuple):
    """A model that takes token ids [B, tokens] below `vocabulary`."""

    vocabulary: int
    most_tokens: int
    has_decoder: bool = False  # it takes two sequences; the same one is given twice
    name: str = "input_ids"  # of the argument


class Inputs(NamedTuple):
    """What a model is run on, and what that is in words."""

    batches: Sequence[Any]
    words: str


class Source(NamedTuple):
    """A model, what it takes, and in words what its weights are."""

    model: nn.Module
    takes: Images | Words
    weights: str = "weights as they were given"
    own_images: Callable[[int], tuple[Tensor, str]] | None = None  # so many of those it belongs to, and their name


def load(name: str, *, pretrained: bool = False) -> Source:
    """The model of that name, on the CPU."""
    prefix, separator, rest = name.partition(":")
    if separator and prefix in LOADERS and rest:
        return LOADERS[prefix](rest, pretrained)
    if Path(name).exists():
        return _load_saved(name) if _is_saved(Path(name)) else _load_run(name)
    known = ", ".join(f"{prefix}:NAME" for prefix in LOADERS)
    raise SourceError(f"{name!r}: got neither a folder of a run or of ot.models.save, nor one of {known}")


def first_line(error: Exception) -> str:
    """An error in one line that is not a page long."""
    return (str(error).strip().partition("\n")[0] or type(error).__name__)[:300]


def _weights(pretrained: bool) -> str:
    return "pretrained weights" if pretrained else "random weights"


def _build(name: str, build: Callable[[], Any]) -> Any:
    """Without memory at first: refused are models that do not fit, and those without attention that can be read."""
    with torch.device("meta"):
        outline = build()
    _require_memory(name, outline)
    try:
        require_readable(outline)
    except ValueError as error:
        raise SourceError(f"{name}: {error}") from None
    return build()


def _require_memory(name: str, outline: nn.Module) -> None:
    tensors = [*outline.parameters(), *outline.buffers()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    available = available_bytes()
    if available is not None and needed > available:
        count = sum(parameter.numel() for parameter in outline.parameters())
        raise SourceError(
            f"{name}: {count:,} parameters need {needed / 1e9:.1f} GB, and {available / 1e9:.1f} GB of memory are "
            "available; analyse a smaller configuration of its kind: hf:FOLDER with a config.json, or another timm:NAME"
        )


def available_bytes() -> int | None:
    """Memory that can be had without swapping, of the machine and of the control group; None where nothing tells."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text(encoding="ascii")))
    except OSError:  # not Linux, or no control group
        pass
    return max(0, min(found)) if found else None


def _load_timm(name: str, pretrained: bool) -> Source:
    timm = imported("timm")
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3)
        raise SourceError(
            f"timm:{name}: timm has no such model" + (f"; did you mean {', '.join(close)}?" if close else "")
        )
    try:
        model = _build(f"timm:{name}", lambda: timm.create_model(name))
        if pretrained:
            model = timm.create_model(name, pretrained=True)
    except SourceError:
        raise
    except Exception as error:  # what a download or a file of others may raise
        raise SourceError(f"timm:{name}: {first_line(error)}") from error
    config = model.pretrained_cfg
    channels, height, width = config["input_size"]
    takes = Images(channels, height, width, tuple(config["mean"]), tuple(config["std"]))
    return Source(model, takes, _weights(pretrained))


def _load_hf(name: str, pretrained: bool) -> Source:
    """A folder or file with a configuration (and weights, if wanted), or a type such as vit or gpt2."""
    transformers = imported("transformers")
    is_local = {"local_files_only": not pretrained, "trust_remote_code": False}
    try:
        if not Path(name).exists() and name in transformers.CONFIG_MAPPING:
            config = transformers.AutoConfig.for_model(name)
        else:
            config = transformers.AutoConfig.from_pretrained(name, **is_local)
        takes = _taken_by(name, config)
        model = _build(f"hf:{name}", lambda: transformers.AutoModel.from_config(config, trust_remote_code=False))
        if pretrained:
            model = transformers.AutoModel.from_pretrained(name, trust_remote_code=False)
    except SourceError:
        raise
    except Exception as error:  # what a configuration, a download or a file of others may raise
        raise SourceError(_hf_message(name, pretrained, error, transformers)) from error
    return Source(model, takes, _weights(pretrained))


def _hf_message(name: str, pretrained: bool, error: Exception, transformers: Any) -> str:
    if Path(name).exists() or (pretrained and not Path(name).is_absolute()):
        return f"hf:{name}: {first_line(error)}"
    close = difflib.get_close_matches(name, list(transformers.CONFIG_MAPPING.keys()), n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return f"hf:{name}: got neither a folder or file with a configuration nor a type that transformers knows{hint}"


def _taken_by(name: str, config: Any) -> Images | Words:
    if getattr(config, "vocab_size", None):
        # T5's positions are relative: it has no longest sequence.
        longest = getattr(config, "max_position_embeddings", 512)
        return Words(config.vocab_size, longest, bool(getattr(config, "is_encoder_decoder", False)))
    if not hasattr(config, "image_size"):
        raise SourceError(f"hf:{name}: its configuration names neither vocab_size nor image_size: what does it take?")
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return Images(getattr(config, "num_channels", 3), height, width)


def _is_saved(folder: Path) -> bool:
    """Whether ot.models.save has written the folder; a run of `overtone train` has another config.json."""
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(fields, dict) and str(fields.get("model_type")).startswith("overtone")


def _load_saved(folder: str) -> Source:
    """What ot.models.save has written."""
    from overtone import models

    try:
        model = models.load(folder)
    except (ValueError, OSError, ImportError) as error:
        raise SourceError(f"{folder}: {first_line(error)}") from error
    config: Any = model.config
    if isinstance(model, models.GPT):
        takes: Images | Words = Words(config.vocab_size, config.context_length, name="tokens")
    else:
        takes = Images(config.in_channels, config.image_size, config.image_size)
    return Source(model, takes, "weights as they were saved")


def _load_run(folder: str) -> Source:
    """A run of `overtone train`, with its test images."""
    try:
        from overtone.training.errors import TrainingError
        from overtone.training.model import load_config, load_info, load_model

        info, config, model = load_info(folder), load_config(folder), load_model(folder)
    except ImportError as error:
        raise SourceError(f"{folder}: a run is read with {error.name}: pip install 'overtone[study]'") from error
    except TrainingError as error:
        raise SourceError(str(error)) from error
    if not hasattr(info, "classes"):
        takes_words = Words(model.config.vocab_size, model.config.context_length)
        return Source(model, takes_words, "trained weights", _test_text(folder, config))
    size = config.data.image_size
    assert size is not None  # TrainConfig has set it

    def test_images(samples: int) -> tuple[Tensor, str]:
        from overtone.training.data import load_data

        try:
            test = load_data(config).test
            total = len(test.labels)
            # Spread over all of them: a folder's are sorted by class.
            chosen = torch.linspace(0, total - 1, min(samples, total)).round().long()
            pixels = info.normalize(test.images(chosen))
        except (TrainingError, OSError) as error:
            raise SourceError(f"{folder}: no test images of this run: {error}; --images FOLDER takes others") from error
        return pixels, f"{len(chosen)} of the run's {total} test images ({config.data.name})"

    takes = Images(info.channels, size, size, tuple(info.mean), tuple(info.std))
    return Source(model, takes, "trained weights", test_images)


def _test_text(folder: str, config: Any) -> Callable[[int], tuple[Tensor, str]]:
    """Windows of a run's test text, spread over all of it."""

    def windows(samples: int) -> tuple[Tensor, str]:
        from overtone.training import TrainingError, load_data

        try:
            test = load_data(config).test
        except TrainingError as error:
            raise SourceError(f"{folder}: no test text of this run: {error}") from error
        chosen = torch.linspace(0, len(test) - 1, min(samples, len(test))).round().long()
        return next(test.batches([chosen])).inputs.long(), f"{len(chosen)} windows of the run's test text"

    return windows


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


def inputs(source: Source, samples: int, *, batch_size: int, tokens: int, seed: int, folder: Path | None) -> Inputs:
    """Images of the folder, or the model's own, or noise."""
    takes = source.takes
    if folder is not None:
        found = images(takes, folder, samples, batch_size)
        return Inputs(found, f"{found.samples} image{'s' * (found.samples > 1)} of {folder}")
    if source.own_images is not None:
        pixels, words = source.own_images(samples)
        return Inputs(pixels.split(batch_size), words)
    made = synthetic(takes, samples, tokens=tokens, seed=seed)
    if isinstance(takes, Images):
        return Inputs(made.split(batch_size), f"{samples} image{'s' * (samples > 1)} of noise (seed {seed})")
    words = f"{samples} sequence{'s' * (samples > 1)} of {made.shape[1]} random tokens (seed {seed})"
    names = (takes.name, f"decoder_{takes.name}") if takes.has_decoder else (takes.name,)
    return Inputs([dict.fromkeys(names, part) for part in made.split(batch_size)], words)


class FolderImages(Sequence):
    """Batches of images, read when they are asked for."""

    def __init__(self, takes: Images, paths: list[Path], batch_size: int, pillow: Any) -> None:
        self.takes, self.paths, self.batch_size, self.pillow = takes, paths, batch_size, pillow

    @property
    def samples(self) -> int:
        return len(self.paths)

    def __len__(self) -> int:
        return -(-len(self.paths) // self.batch_size)

    def __getitem__(self, index):
        start = range(0, len(self.paths), self.batch_size)[index]
        paths = self.paths[start : start + self.batch_size]
        return torch.stack([_read(self.takes, path, self.pillow) for path in paths])


def images(takes: Images | Words, folder: str | Path, samples: int, batch_size: int) -> FolderImages:
    """Batches of the first `samples` images of a folder and its subfolders, resized and normalized for the model."""
    if not isinstance(takes, Images):
        raise SourceError("--images: the model takes words, not images")
    if takes.channels not in (1, 3):
        raise SourceError(f"--images: the model takes {takes.channels} channels, wanted 1 or 3")
    folder = Path(folder)
    if not folder.is_dir():
        raise SourceError(f"{folder}: got no folder, wanted one with images")
    pillow = imported("PIL.Image", "report")
    endings = pillow.registered_extensions()
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())[:samples]
    if not paths:
        raise SourceError(f"{folder}: no image was found in it or its subfolders")
    return FolderImages(takes, paths, batch_size, pillow)


def _read(takes: Images, path: Path, pillow: Any) -> Tensor:
    """One image [C, H, W]: the shorter side resized, the middle cut out, normalized."""
    from overtone.training.data.image_folder import in_bytes

    try:
        with pillow.open(path) as file:
            image = in_bytes(file, takes.channels)
    except Exception as error:  # Pillow has no one error for files that are broken, or far too large
        raise SourceError(f"{path}: not a readable image: {first_line(error)}; mend or remove it") from error
    scale = max(takes.width / image.width, takes.height / image.height)
    size = (max(takes.width, round(image.width * scale)), max(takes.height, round(image.height * scale)))
    image = image.resize(size, pillow.Resampling.BICUBIC)
    left, top = (image.width - takes.width) // 2, (image.height - takes.height) // 2
    image = image.crop((left, top, left + takes.width, top + takes.height))
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(takes.height, takes.width, -1)
    mean, std = (torch.tensor(values)[:, None, None] for values in (takes.mean, takes.std))
    return (pixels.permute(2, 0, 1).float() / 255 - mean) / std
