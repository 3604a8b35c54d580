"""`overtone analyze`: does a model oversmooth, where, and why."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

DESCRIPTION = """\
Runs a model on images (or words) and measures, layer by layer and head by head, how it smooths its tokens: the ratio
of high to low frequencies, cosine, ranks, token similarity, the eigenvalues of attention and of the value-projection
weights, and which eigenvalue dominates, with a bound on the error of every verdict. Prints two tables and writes a
page, figures and CSV files.
"""
EXAMPLES = """\
examples:
  overtone analyze timm:vit_tiny_patch16_224                        random weights, noise as images
  overtone analyze timm:deit_base_patch16_224 --pretrained --images photos --samples 32
  overtone analyze hf:bert --tokens 64                              a type's default configuration, random weights
  overtone analyze hf:path/to/folder --pretrained                   a saved Hugging Face model
  overtone analyze runs/mine                                        a run of overtone train
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
    parser.add_argument("--images", type=Path, metavar="FOLDER", help="take images from there (default: noise)")
    parser.add_argument("--samples", type=_positive, default=8, metavar="N", help="images or sequences (%(default)s)")
    parser.add_argument("--batch-size", type=_positive, default=8, metavar="N", help="samples at once (%(default)s)")
    parser.add_argument(
        "--tokens", type=_positive, metavar="N", help="length of sequences (default: 128, or the model's longest)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random weights and inputs (%(default)s)")
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("reports/analyze"), help="folder of the report (%(default)s)")
    parser.add_argument("--no-report", action="store_true", help="print the tables, write nothing")
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, wanted at least 1")
    return value


_positive.__name__ = "int"  # argparse names it in the error for a text that is no number


def run(arguments: argparse.Namespace) -> int:
    """0: done; 2: the model, its inputs or a package that is needed cannot be had."""
    # Imported here: the other commands need none of this.
    import torch

    from overtone.analysis import analyze, sources

    try:
        torch.manual_seed(arguments.seed)
        source = sources.load(arguments.model, pretrained=arguments.pretrained)
        if arguments.images is None:
            inputs = sources.synthetic(source.takes, arguments.samples, tokens=arguments.tokens, seed=arguments.seed)
            batches = inputs.split(arguments.batch_size)
        else:
            batches = sources.images(source.takes, arguments.images, arguments.samples, arguments.batch_size)
        analysis = analyze(source.model.to(arguments.device), batches, name=arguments.model, progress=True)
        print(analysis)
        if not arguments.no_report:
            print(f"\nReport: {analysis.save(arguments.out)}")
    except (ValueError, ImportError) as error:
        print(f"overtone analyze: {error}", file=sys.stderr)
        return 2
    return 0
