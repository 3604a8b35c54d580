"""What a trained run says about images of any kind: `overtone predict` from Python."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overtone._deprecated import accepts_renamed
from overtone.spectrum import fold
from overtone.training.config import TrainConfig
from overtone.training.data import DataInfo
from overtone.training.data.image_folder import image_files, read_image
from overtone.training.data.text import TextInfo
from overtone.training.errors import ConfigError, DataError, machine_errors
from overtone.training.model import load_config, load_info, load_model


class Prediction(NamedTuple):
    """Of one image: the classes and their probabilities, the most probable first; or why there are none."""

    image: Path
    classes: list[str]
    probabilities: list[float]
    error: str | None = None


@accepts_renamed("predict", workers="num_workers")
def predict(
    run: str | Path,
    images: Iterable[str | Path],
    *,
    batch_size: int = 64,
    device: str = "cpu",
    num_workers: int = 2,
) -> Iterator[Prediction]:
    """Classify images with the model of a run, as the run reads them: its size, colors and normalization.

    Args:
        run: the run's folder, or its model.safetensors.
        images: files, and folders, whose images are taken with those of their subfolders. An image that cannot be read
            gives a prediction with an `error`, and the others follow.
        batch_size: images computed at once.
        device: where the model runs, such as "cuda".
        num_workers: threads that decode images.
    """
    if batch_size < 1 or num_workers < 1:
        raise ConfigError(f"predict: got batch_size={batch_size}, num_workers={num_workers}, wanted at least 1")
    if isinstance(load_info(run), TextInfo):
        raise ConfigError(f"{run}: a run of text: it continues prompts, and classifies no images")
    with machine_errors():
        config, info, model = load_config(run), load_info(run), load_model(run).to(_device(device))
        found = list(_files(images))
    with ThreadPoolExecutor(num_workers) as pool:
        for start in range(0, len(found), batch_size):
            with machine_errors():
                part = _classified(found[start : start + batch_size], model, config, info, pool)
            yield from part


def continue_text(
    run: str | Path,
    prompt: str,
    *,
    max_new_bytes: int = 200,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int | None = None,
    device: str = "cpu",
) -> str:
    """What the model of a text run writes after the prompt.

    Args:
        run: the run's folder, or its model.safetensors.
        prompt: the text before; the model sees at most the last context_length bytes of it and of its own text.
        max_new_bytes: how many bytes to write.
        temperature: divides the logits; 0 always takes the likeliest byte.
        top_k: draw from so many of the likeliest bytes; default: from all.
        seed: of the draws; default: torch's own generator.
        device: where the model runs, such as "cuda".
    """
    if not isinstance(load_info(run), TextInfo):
        raise ConfigError(f"{run}: a run of images: it classifies images, and continues no text")
    if not prompt or max_new_bytes < 1:
        raise ConfigError(f"predict: got a prompt of {len(prompt)} letters and max_new_bytes={max_new_bytes}, "
                          "wanted at least 1 of each")  # fmt: skip
    where = _device(device)
    with machine_errors():
        model: Any = fold(load_model(run).to(where))
    text = list(prompt.encode("utf-8", "surrogateescape"))
    first, context = len(text), model.config.context_length
    draws = None if seed is None else torch.Generator(where).manual_seed(seed)
    while (missing := first + max_new_bytes - len(text)) > 0:
        # When the context is full, its second half is what the model goes on from.
        window = text[-(context - 1) :] if len(text) < context else text[-max(1, context // 2) :]
        new = min(missing, context - len(window))
        try:
            tokens = model.generate(
                torch.tensor([window], device=where), new, temperature=temperature, top_k=top_k, generator=draws
            )
        except (ValueError, TypeError, FloatingPointError) as error:
            raise ConfigError(str(error).removeprefix("GPT.generate: ")) from None
        text += tokens[0, len(window) :].tolist()
    return bytes(text[first:]).decode("utf-8", "replace")


@torch.inference_mode()
def _classified(
    images: Sequence[Path | Prediction],
    model: nn.Module,
    config: TrainConfig,
    info: DataInfo,
    pool: ThreadPoolExecutor,
) -> list[Prediction]:
    size, parameter = config.data.image_size, next(model.parameters())
    assert size is not None  # TrainConfig has set it

    def read(image: Path | Prediction) -> tuple[Path, Tensor] | Prediction:
        if isinstance(image, Prediction):
            return image
        try:
            return image, read_image(image, size, info.channels)
        except DataError as error:
            return Prediction(image, [], [], str(error))

    contents = list(pool.map(read, images))
    readable = [content[1] for content in contents if not isinstance(content, Prediction)]
    if not readable:
        return [content for content in contents if isinstance(content, Prediction)]
    inputs = info.normalize(torch.stack(readable).to(parameter.device), parameter.dtype)
    scores = iter(model(inputs).softmax(1).double().cpu())
    return [
        content if isinstance(content, Prediction) else _prediction(content[0], next(scores), info.classes)
        for content in contents
    ]


def _prediction(image: Path, probabilities: Tensor, classes: Sequence[str]) -> Prediction:
    values, order = probabilities.sort(descending=True, stable=True)
    return Prediction(image, [classes[index] for index in order.tolist()], values.tolist())


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: got {name!r}, wanted cpu, cuda or another of torch's") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch finds no GPU here; use cpu")
    return device


def _files(images: Iterable[str | Path]) -> Iterator[Path | Prediction]:
    """All images, and the folders that have none as predictions that say so."""
    for image in map(Path, images):
        if not image.is_dir():
            yield image
            continue
        try:
            found = image_files(image)
        except DataError as error:
            yield Prediction(image, [], [], str(error))
            continue
        if not found:
            yield Prediction(image, [], [], f"{image}: a folder without images")
        yield from found
