"""`overtone analyze`: does a model oversmooth, where, and why."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from overtone.cli import fail, positive

DESCRIPTION = """\
Runs a model on images (or words) and measures, layer by layer and head by head, how it smooths its tokens: the ratio
of high to low frequencies, cosine, ranks, token similarity, the eigenvalues of attention and of the value-projection
weights, and which eigenvalue dominates, with a bound on the error of every verdict. Prints what was analysed, what was
measured, what eigenvalues alone predict, and two tables; writes a page, figures and CSV files.
"""
EXAMPLES = """\
examples:
  overtone analyze timm:vit_tiny_patch16_224                        random weights, noise as images
  overtone analyze timm:deit_base_patch16_224 --pretrained --images photos --samples 32
  overtone analyze hf:bert --tokens 64                              a type's default configuration, random weights
  overtone analyze hf:path/to/folder --pretrained                   a saved Hugging Face model
  overtone analyze runs/mine                                        a run of overtone train, on its test images
A type whose default configuration does not fit into memory (hf:llama) is refused; a folder with a smaller config.json
is read. Code that comes with a model is never run.
"""


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "analyze",
        help="measure whether a model oversmooths, where, and why",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="timm:NAME, hf:CONFIG (a folder, a file or a type), or a run")
    parser.add_argument(
        "--pretrained", action="store_true", help="load weights; those that are not here are downloaded"
    )
    parser.add_argument(
        "--images",
        type=Path,
        metavar="FOLDER",
        help="take images from there (default: a run's test images, else noise)",
    )
    count = {"type": positive(int), "metavar": "N"}
    parser.add_argument("--samples", **count, default=8, help="images or sequences (%(default)s)")
    parser.add_argument("--batch-size", **count, default=8, help="samples at once (%(default)s)")
    parser.add_argument("--tokens", **count, help="length of sequences (default: 128, or the model's longest)")
    parser.add_argument("--seed", type=int, default=0, help="of random weights and inputs (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("reports/analyze"), help="folder of the report (%(default)s)")
    parser.add_argument("--no-report", action="store_true", help="print the tables, write nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0: done; 2: the model, its inputs, the device or a package cannot be had, or the report not be written."""
    # Imported here: the other commands need none of this.
    from overtone.cli.sources import SourceError

    try:
        _analyze(arguments)
    except (SourceError, ImportError) as error:
        return fail("analyze", str(error))
    return 0


def _analyze(arguments: argparse.Namespace) -> None:
    import torch

    from overtone.cli import sources

    device = _device(arguments.device)
    if not arguments.no_report:
        _require_writable(arguments.out)
    torch.manual_seed(arguments.seed)
    source = sources.load(arguments.model, pretrained=arguments.pretrained)
    given = sources.inputs(
        source,
        arguments.samples,
        batch_size=arguments.batch_size,
        tokens=arguments.tokens,
        seed=arguments.seed,
        folder=arguments.images,
    )
    count = sum(parameter.numel() for parameter in source.model.parameters())
    seed = f", seed {arguments.seed}" if source.weights == "random weights" else ""
    subject = f"{arguments.model} with {source.weights} ({count:,} parameters{seed}), on {given.words}."
    analysis = _analysis(source.model.to(device), given.batches, arguments.model, subject)
    # Written before anything is printed: who reads only the first lines (head) ends the program.
    report = None if arguments.no_report else analysis.save(arguments.out)
    print(analysis)
    if report is not None:
        print(f"\nReport: {report}")


def _analysis(model: Any, batches: Any, name: str, subject: str) -> Any:
    """`analyze`; what a model of others raises on these inputs is one line, as is what cannot be read."""
    from overtone.analysis import analyze
    from overtone.cli.sources import SourceError, first_line

    try:
        return analyze(model, batches, name=name, progress=True, subject=subject)
    except (ImportError, OSError, SourceError):
        raise
    except ValueError as error:
        raise SourceError(first_line(error)) from error
    except Exception as error:
        what = f"{type(model).__name__} does not run on these inputs"
        raise SourceError(f"{name}: {what}: {type(error).__name__}: {first_line(error)}") from error


def _device(text: str) -> Any:
    """A device that is here."""
    import torch

    from overtone.cli.sources import SourceError, first_line

    try:
        device = torch.device(text)
        # A number comes back: meta has none.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise SourceError(
            f"--device: got {text!r}, wanted cpu or a device that torch finds here: {first_line(error)}"
        ) from error
    return device


def _require_writable(folder: Path) -> None:
    """Before the work: a file in the folder's place, or one that cannot be written to."""
    from overtone.cli.sources import SourceError

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise SourceError(f"--out: got {folder}, wanted a folder that can be written to: {error.strerror}") from error
