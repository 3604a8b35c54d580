"""`overtone predict`: the classes that a trained run sees in images, or the text that it writes after a prompt."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overtone.training import Prediction

MAX_SHOWN = 5  # classes, where --top-k does not say

DESCRIPTION = """\
Classifies images with the model of a run of `overtone train`, read as the run reads its own (size, colors,
normalization; 16-bit gray is scaled). Prints a line per image: the most probable classes and their probabilities.
An image that cannot be read has a line on stderr, the others are classified all the same, and the exit status is 1.

A run of text continues every prompt.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "predict",
        help="classify images, or continue text, with a trained run",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="RUN", help="folder of a run, or its model.safetensors")
    parser.add_argument(
        "inputs", metavar="INPUT", nargs="+", help="images: files, or folders with their subfolders; text: prompts"
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K",
        help=f"classes per image (default: at most {MAX_SHOWN}); text: draw from so many bytes (default: all)",
    )  # fmt: skip
    text = parser.add_argument_group("text")
    text.add_argument("--max-new-bytes", type=int, default=200, metavar="N", help="bytes to write (%(default)s)")
    text.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0: the likeliest (%(default)s)")
    text.add_argument("--seed", type=int, metavar="N", help="of the draws (default: another text every time)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="a JSON object per line: image, classes, probabilities")
    form.add_argument("--csv", action="store_true", help="CSV: image, class_1, probability_1, class_2, …")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="images at once (%(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, metavar="N", help="threads that decode (%(default)s)")
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)  # its name of one release ago
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0: all classified; 1: all but those that could not be read; 2: a mistake in what was asked."""
    from overtone.training import TrainingError, load_info, predict

    try:
        info = load_info(arguments.folder)
        if not hasattr(info, "classes"):
            return _continue_prompts(arguments)
        top = _top(arguments.top_k, len(info.classes))
        found = predict(
            arguments.folder,
            arguments.inputs,
            batch_size=arguments.batch_size,
            device=arguments.device,
            **({"num_workers": arguments.num_workers} if arguments.workers is None else {"workers": arguments.workers}),
        )
        show = _writer(arguments, top)
        failures = 0
        for prediction in found:
            if prediction.error is None:
                show(prediction)
            else:
                failures += 1
                _say(prediction.error)
    except (TrainingError, ImportError) as error:
        _say(str(error))
        return error.exit_status if isinstance(error, TrainingError) else 2
    return 1 if failures else 0


def _continue_prompts(arguments: argparse.Namespace) -> int:
    from overtone.training import ConfigError, continue_text

    if arguments.csv:
        raise ConfigError("--csv: a run of text has no classes; --json prints an object per prompt")
    for prompt in arguments.inputs:
        text = continue_text(
            arguments.folder,
            prompt,
            max_new_bytes=arguments.max_new_bytes,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            seed=arguments.seed,
            device=arguments.device,
        )
        if arguments.json:
            print(json.dumps({"prompt": prompt, "text": text}))
        else:
            print("".join(letter if letter.isprintable() or letter in "\n\t" else "·" for letter in prompt + text))
    return 0


def _top(asked: int | None, classes: int) -> int:
    from overtone.training import ConfigError

    if asked is not None and not 1 <= asked <= classes:
        raise ConfigError(f"--top-k: got {asked}, wanted 1 to {classes}, the run's classes")
    return asked or min(MAX_SHOWN, classes)


def _writer(arguments: argparse.Namespace, top: int) -> Callable[[Prediction], None]:
    if arguments.json:
        return lambda found: print(
            json.dumps(
                {
                    "image": str(found.image),
                    "classes": found.classes[:top],
                    "probabilities": found.probabilities[:top],
                }
            )
        )
    if arguments.csv:
        table = csv.writer(sys.stdout, lineterminator="\n")
        table.writerow(["image", *(name for k in range(1, top + 1) for name in (f"class_{k}", f"probability_{k}"))])
        return lambda found: table.writerow([_cell(str(found.image)), *_pairs(found, top)])
    return lambda found: print(_printable(f"{found.image}: {_sentence(found, top)}"))


def _pairs(found: Prediction, top: int) -> list[str | float]:
    pairs = zip(found.classes[:top], found.probabilities[:top], strict=True)
    return [cell for name, probability in pairs for cell in (_cell(name), probability)]


def _sentence(found: Prediction, top: int) -> str:
    pairs = zip(found.classes[:top], found.probabilities[:top], strict=True)
    return ", ".join(f"{name} {probability:.2%}" for name, probability in pairs)


def _cell(text: str) -> str:
    """No spreadsheet takes a name for a formula."""
    return _printable(f"'{text}" if text.startswith(("=", "+", "-", "@")) else text)


def _printable(text: str) -> str:
    """On one line, and in any encoding: file names may hold line breaks and bytes that are no text."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _say(message: str) -> None:
    print(f"overtone predict: {_printable(message)}", file=sys.stderr, flush=True)
