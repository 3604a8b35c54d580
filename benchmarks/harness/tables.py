"""The README's tables of figures, each cell a case and what to say of it. The cases they name are the standard set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# What a cell says: our ratio to a baseline of this name, to the fastest one, or both peaks of memory.
FASTEST, MEMORY = "fastest", "memory"
NOT_KNOWN = "–"

Results = Mapping[str, Mapping[str, Any]]  # by the case's name, as docs/benchmarks.json has them


@dataclass(frozen=True)
class Row:
    """One property of one case per column: `case` is its name with {} for the shape."""

    label: str
    case: str
    says: str  # a baseline, FASTEST, or MEMORY followed by a baseline
    only: tuple[str, ...] = ()  # the shapes that have it; default: all


@dataclass(frozen=True)
class Figures:
    """A table: rows over shapes."""

    title: str
    shapes: tuple[str, ...]
    rows: tuple[Row, ...]

    def cases(self) -> list[str]:
        names = [row.case.format(shape) for row in self.rows for shape in row.only or self.shapes]
        return list(dict.fromkeys(names))

    def markdown(self, results: Results) -> str:
        head = [self.title, *(re.sub(r"(\d)x(\d)", r"\1×\2", shape) for shape in self.shapes)]
        body = [[row.label, *(_cell(row, shape, results) for shape in self.shapes)] for row in self.rows]
        first, *rest = (f"| {' | '.join(line)} |" for line in (head, *body))
        return "\n".join([first, "|---" * len(head) + "|", *rest])


def _cell(row: Row, shape: str, results: Results) -> str:
    result = results.get(row.case.format(shape))
    if row.only and shape not in row.only:
        return ""
    if result is None or not result["trusted"]:
        return NOT_KNOWN
    kind, _, baseline = row.says.partition(" of ")
    if kind == MEMORY:
        return _megabytes(result["memory"], baseline)
    ratios = result["ratios"]
    if row.says == FASTEST:
        return _ratio(min(ratios.values(), default=None) if result["complete"] else None)
    return _ratio(ratios.get(row.says))


def _ratio(ratio: float | None) -> str:
    """Losses are bold."""
    if ratio is None:
        return NOT_KNOWN
    text = f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}"
    return f"**{text}**" if ratio < 1 else text


def _megabytes(memory: Mapping[str, int | None], baseline: str) -> str:
    ours, theirs = memory.get("ours"), memory.get(baseline)
    if ours is None or theirs is None:
        return NOT_KNOWN
    text = f"{ours / 1e6:.1f} / {theirs / 1e6:.1f}"
    return f"**{text}**" if ours > theirs else text


BOTH = "forward+backward"
PLAIN_SHAPES = ("64x197x192", "8x197x768", "256x65x192")
VIT_SHAPES = ("Ti-cifar", "Ti-224", "S-224", "B-224")

TABLES = (
    Figures(
        "tokens, [samples × tokens × channels]",
        PLAIN_SHAPES,
        (
            Row("`frequency_norms` forward, × eager reference", "frequency_norms {} float32 forward", "reference"),
            Row("… × compiled reference", "frequency_norms {} float32 forward", "compiled reference"),
            Row("… × the fastest plain PyTorch", "frequency_norms {} float32 forward", FASTEST),
            Row(f"`frequency_filter` {BOTH}, × eager reference", f"frequency_filter {{}} float32 {BOTH}", "reference"),
            Row("… × the fastest plain PyTorch", f"frequency_filter {{}} float32 {BOTH}", FASTEST),
            Row("… forward alone, × the fastest", "frequency_filter {} float32 forward", FASTEST),
            Row(f"… causal, {BOTH}, × the fastest", f"frequency_filter causal {{}} float32 {BOTH}", FASTEST),
        ),
    ),
    Figures(
        "`spectral_attention` with residual and norms",
        (*VIT_SHAPES, "N4096"),
        (
            Row("forward, × SDPA + matmul + norms, eager", "spectral_attention {} float32 forward", "sdpa"),
            Row("… × the fastest of eager and compiled", "spectral_attention {} float32 forward", FASTEST, VIT_SHAPES),
            Row("… peak of memory, ours / eager SDPA's, MB", "spectral_attention {} float32 forward", "memory of sdpa"),
            Row(f"{BOTH}, × eager", f"spectral_attention {{}} float32 {BOTH}", "sdpa", VIT_SHAPES),
            Row(
                "… × the fastest of eager and compiled", f"spectral_attention {{}} float32 {BOTH}", FASTEST, VIT_SHAPES
            ),
            Row("… peak of memory, MB", f"spectral_attention {{}} float32 {BOTH}", "memory of sdpa", VIT_SHAPES),
        ),
    ),
    Figures(
        'a whole attention module, ordinary weights (`ot.nn.SpectralAttention`, regime "free")',
        ("Ti-cifar", "Ti-224", "B-224"),
        tuple(
            Row(f"{start} × {name}", f"attention_module free {{}} float32 {mode}", baseline)
            for mode in ("forward", BOTH)
            for start, name, baseline in (
                (f"{mode},", "timm's `Attention`", "timm"),
                ("…", "transformers' `ViTAttention`", "transformers"),
                ("…", "`nn.MultiheadAttention`", "nn.MultiheadAttention"),
            )
        ),
    ),
    Figures(
        "training step of ViT-Ti⁻: forward, backward, fused AdamW",
        ("Ti-cifar", "Ti-224"),
        (
            Row("× the same model in plain PyTorch, eager", "training_step {} float32 forward", "plain"),
            Row("… both with every layer's norms", "training_step with norms {} float32 forward", "plain"),
            Row("… peak of memory, ours / plain, MB", "training_step {} float32 forward", "memory of plain"),
        ),
    ),
    *(
        Figures(
            f"`linalg.{op}`, [matrices × n], float32",
            shapes,
            (
                Row("× `torch.linalg`", f"{op} {{}} float32 forward", plain),
                Row("× `torch.linalg` split over the threads", f"{op} {{}} float32 forward", split),
            ),
        )
        for op, plain, split, shapes in (
            (
                "eigh",
                "torch.linalg",
                "torch over threads",
                ("16384x4", "8192x8", "4096x16", "1024x32", "256x64", "1x384"),
            ),
            ("eigvals", "torch", "torch split", ("4096x16", "1024x32", "64x65 softmax", "32x197 softmax")),
            ("qr", "torch.linalg", "torch.linalg, two threads", ("4096x16", "12x192", "12x384", "12x768")),
        )
    ),
)


def standard_names() -> set[str]:
    """The cases of `overtone bench` without --all: those that the README shows."""
    return {name for table in TABLES for name in table.cases()}
