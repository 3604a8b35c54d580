"""The published tables, each cell a case and what to show of it. The cases they name are the standard set."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from overtone.benchmarks import shapes

# What a cell shows: our ratio to a baseline of this name, to the fastest one, or both peaks of memory.
FASTEST, MEMORY = "fastest", "memory"
NOT_KNOWN = "–"

Results = Mapping[str, Mapping[str, Any]]  # by the case's name, as docs/benchmarks.json has them


@dataclass(frozen=True)
class Row:
    """One property of one case per column: `case` is its name with {} for the shape."""

    label: str
    case: str
    metric: str  # a baseline, FASTEST, or MEMORY followed by a baseline
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
    kind, _, baseline = row.metric.partition(" of ")
    if kind == MEMORY:
        return _megabytes(result["memory"], baseline)
    return _bold_if_slower(_ratio_to(row.metric, result))


def _ratio_to(metric: str, result: Mapping[str, Any] | None) -> float | None:
    """To a baseline, or to the fastest one, which is known only if all of them took part."""
    if result is None or not result["trusted"]:
        return None
    ratios = result["ratios"]
    if metric == FASTEST:
        return min(ratios.values(), default=None) if result["complete"] else None
    return ratios.get(metric)


def _number(ratio: float) -> str:
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.2f}"


def _bold_if_slower(ratio: float | None) -> str:
    if ratio is None:
        return NOT_KNOWN
    return f"**{_number(ratio)}**" if ratio < 1 else _number(ratio)


def _megabytes(memory: Mapping[str, int | None], baseline: str) -> str:
    ours, theirs = memory.get("ours"), memory.get(baseline)
    if ours is None or theirs is None:
        return NOT_KNOWN
    text = f"{ours / 1e6:.1f} / {theirs / 1e6:.1f}"
    return f"**{text}**" if ours > theirs else text


BOTH = "forward+backward"
PLAIN_SHAPES = tuple(shape.label for shape in shapes.TOKENS)
VIT_SHAPES = tuple(shape.label for shape in shapes.VITS)

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
        (*VIT_SHAPES, shapes.N4096.label),
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


Names = tuple[str, ...]


def _names(case: str, labels: Names) -> Names:
    return tuple(case.format(label) for label in labels)


@dataclass(frozen=True)
class Highlight:
    """A row of README's table: the range of one ratio over some of the tables' cases, or several ranges."""

    label: str
    groups: tuple[Names, ...]
    metric: str
    compared: str

    def range(self, results: Results) -> str:
        return " / ".join(self._range(group, results) for group in self.groups)

    def _range(self, names: Names, results: Results) -> str:
        ratios = [_ratio_to(self.metric, results.get(name)) for name in names]
        known = [ratio for ratio in ratios if ratio is not None]
        if not known:
            return NOT_KNOWN
        low, high = _number(min(known)), _number(max(known))
        return f"{low}×" if low == high else f"{low}–{high}×"


EAGER_AND_COMPILED = "the fastest of eager and compiled"
_SOLVERS = tuple(table for table in TABLES if table.title.startswith("`linalg"))

HIGHLIGHTS = (
    Highlight(
        "`spectral_attention` with norms, forward",
        (_names("spectral_attention {} float32 forward", VIT_SHAPES),),
        FASTEST,
        f"{EAGER_AND_COMPILED} SDPA + projection + norms",
    ),
    Highlight(
        "… forward + backward",
        (_names(f"spectral_attention {{}} float32 {BOTH}", VIT_SHAPES),),
        FASTEST,
        "the same",
    ),
    Highlight(
        "a whole attention module, forward + backward",
        (_names(f"attention_module free {{}} float32 {BOTH}", ("Ti-cifar", "Ti-224", "B-224")),),
        FASTEST,
        "the fastest of timm, transformers, `nn.MultiheadAttention`",
    ),
    Highlight(
        "a training step of ViT-Ti⁻ / with all norms",
        (
            _names("training_step {} float32 forward", ("Ti-cifar", "Ti-224")),
            _names("training_step with norms {} float32 forward", ("Ti-cifar", "Ti-224")),
        ),
        "plain",
        "the same model in eager PyTorch",
    ),
    Highlight(
        "batched `eigh` / `eigvals` / `qr`",
        tuple(tuple(name for name in table.cases() if " 1x" not in name) for table in _SOLVERS),
        FASTEST,
        "`torch.linalg`, also split over threads",
    ),
)


def losses(results: Results) -> Iterator[str]:
    """The published ops that are slower than the fastest plain PyTorch, with the range of those ratios."""
    slower = defaultdict(list)
    for name in dict.fromkeys(name for table in TABLES for name in table.cases()):
        ratio = _ratio_to(FASTEST, results.get(name))
        if ratio is not None and ratio < 1:
            case, _, mode = name.partition(" float32 ")
            op = case.rpartition(" ")[0]
            slower[f"`{op}` {mode}" if _has_modes(op) else f"`{op}`"].append((ratio, case.rpartition(" ")[2]))
    for title, cases in slower.items():
        low, high = _number(min(cases)[0]), _number(max(cases)[0])
        yield f"{title} {low if low == high else f'{low}–{high}'}× at {' and '.join(shape for _, shape in cases)}"


def _has_modes(op: str) -> bool:
    return any(name.startswith(f"{op} ") and name.endswith(BOTH) for table in TABLES for name in table.cases())


def standard_names() -> set[str]:
    """The cases of `overtone bench` without --all: those that are published."""
    return {name for table in TABLES for name in table.cases()}
