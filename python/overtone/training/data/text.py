"""Text as bytes: Python's own documentation, files of the user's, or WikiText-103."""

from __future__ import annotations

import codecs
import math
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from overtone.training import rng
from overtone.training.config import TrainConfig
from overtone.training.data.dataset import Batch, Data
from overtone.training.data.identity import File
from overtone.training.errors import DataError, reason

BYTES = 256
TEST_SHARE = 0.1  # of text that comes without a split
WIKITEXT = {"train": "wiki.train.raw", "validation": "wiki.valid.raw", "test": "wiki.test.raw"}
_BLOCK = 2**24


class TextInfo(NamedTuple):
    """What a model must know about its text: nothing, since its tokens are bytes."""

    source: str

    @property
    def unit(self) -> str:
        return "bytes"

    def prepare(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return inputs.long()

    def means(self, loss: float) -> dict[str, float]:
        """What is reported besides the loss, the mean of −ln p over the bytes."""
        return {"test_bits_per_byte": loss / math.log(2), "test_perplexity": math.exp(min(loss, 700.0))}


class TextSet:
    """Windows of a text, one after the other: of `context` bytes each, every one of which predicts the next."""

    def __init__(self, text: Tensor, context: int, name: str, offset: int = 0, leave: int = 0) -> None:
        self.text, self.context, self.name, self.offset, self.leave = text, context, name, offset, leave
        self.total = len(text)

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1 - self.leave) // self.context)

    def in_epoch(self, seed: int, epoch: int) -> TextSet:
        """With windows that begin elsewhere in every epoch."""
        offset = rng.seed(rng.WINDOWS, seed, epoch) % (self.leave + 1)
        return TextSet(self.text, self.context, self.name, offset, self.leave)

    def batches(self, batches: Iterable[Tensor]) -> Iterator[Batch]:
        places = torch.arange(self.context + 1)
        for samples in batches:
            windows = self.text[(samples * self.context + self.offset)[:, None] + places]
            yield Batch(windows[:, :-1], windows[:, 1:].long())

    def files(self) -> list[File]:
        return [File(self.name, -1, len(self.text), lambda: self.text.numpy().tobytes())]


def load_text(config: TrainConfig, context: int) -> Data:
    """The text that `data.dir` holds, or Python's documentation; the fraction of it that is asked for."""
    train, test, origin = _topics() if config.data.dir is None else _from_files(Path(config.data.dir), config)
    if config.data.evaluate_on == "validation" and not origin.startswith("WikiText"):
        train, test = _cut(train, 1 - TEST_SHARE)
        origin = f"the last {TEST_SHARE:.0%} of the training text validate; the test text is not looked at"
    train = train[: math.ceil(config.data.train_fraction * len(train))]
    sets = TextSet(train, context, "training text", leave=context - 1), TextSet(test, context, "test text")
    for part in sets:
        if not len(part):
            raise DataError(
                f"text: the {part.name} has {len(part.text)} bytes, wanted at least {part.leave + context + 1} "
                f"for context_length = {context}"
            )
    return Data(*sets, TextInfo(origin), origin)


def _topics() -> tuple[Tensor, Tensor, str]:
    """The documentation that every Python brings for help(), split by topic."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(f"text: this Python has no pydoc_data ({error}): --data-dir names other text") from None
    names = sorted(topics)
    order = rng.permutation(len(names), rng.SPLIT).tolist()
    tests = {names[index] for index in order[: round(TEST_SHARE * len(names))]}
    train, test = (
        _tensor("\n\n".join(topics[name] for name in names if (name in tests) == is_test).encode())
        for is_test in (False, True)
    )
    origin = f"{len(names)} topics of the documentation of Python {platform.python_version()}, {len(tests)} to test"
    return train, test, origin


def _from_files(place: Path, config: TrainConfig) -> tuple[Tensor, Tensor, str]:
    """WikiText-103's raw files; train.txt and test.txt; or any text files, of which the ends are test text."""
    if not place.exists():
        raise DataError(
            f"text: missing: {place}; wanted a text file, or a folder of them or of WikiText-103's raw files"
        )
    for folder in (place, place / "wikitext-103-raw"):
        if (folder / WIKITEXT["train"]).is_file():
            train, test = folder / WIKITEXT["train"], folder / WIKITEXT[config.data.evaluate_on]
            return _read(train), _read(test), f"WikiText-103: {train.name} and {test.name}"
    if (place / "train.txt").is_file():
        return _read(place / "train.txt"), _read(place / "test.txt"), f"train.txt and test.txt of {place}"
    files = [place] if place.is_file() else sorted(path for path in place.rglob("*.txt") if path.is_file())
    if not files:
        raise DataError(f"text: {place} has no text: wanted *.txt, or {', '.join(WIKITEXT.values())}")
    parts = [_cut(_read(path), 1 - TEST_SHARE) for path in files]
    starts, ends = (torch.cat(texts) for texts in zip(*parts, strict=True))
    return starts, ends, f"{len(files)} files of {place}; the last {TEST_SHARE:.0%} of each are test text"


def _cut(text: Tensor, share: float) -> tuple[Tensor, Tensor]:
    first = round(share * len(text))
    return text[:first], text[first:]


def _read(path: Path) -> Tensor:
    """A file's bytes, which must be UTF-8."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"text: not readable: {path}: {reason(error)}") from None
    if not content:
        raise DataError(f"text: {path} is empty")
    decoder, start = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        for start in range(0, len(content), _BLOCK):
            decoder.decode(content[start : start + _BLOCK], final=start + _BLOCK >= len(content))
    except UnicodeDecodeError as error:
        raise DataError(f"text: {path} is not UTF-8, at about byte {start + error.start}: {error.reason}") from None
    return _tensor(content)


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
