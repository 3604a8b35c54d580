"""`overtone study`: in this version, the smoothing of a residual stream by the fused op, without training."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor

import overtone
from overtone import _extension
from overtone.backends import select

IMAGES, TOKENS, CHANNELS, HEADS, LAYERS = 8, 197, 192, 3, 12
# Every eigenvalue of the value-projection weight has this sign: above zero smooths, below zero sharpens.
REGIMES = {"smooth": 1.0, "sharpen": -1.0}
COLOURS = {"smooth": "#c2410c", "sharpen": "#1d4ed8"}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "study",
        help="measure the smoothing of a residual stream, layer by layer",
        description="Sends random tokens through twelve layers of spectral attention, once with positive and once with "
        "negative eigenvalues, prints and draws the ratio of high to low frequencies after each layer, what ran where, "
        "and how far it is from float64. The study that trains models is not part of this version.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens and weights (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("reports/study"), help="folder of the figure (%(default)s)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    ratios = {regime: residual_stream(sign, arguments.seed) for regime, sign in REGIMES.items()}
    print(f"High over low frequencies, mean of {IMAGES} images of {TOKENS} tokens x {CHANNELS} channels:")
    print("layer" + "".join(f"{regime:>12}" for regime in REGIMES))
    for layer in range(LAYERS + 1):
        print(f"{layer:>5}" + "".join(f"{ratios[regime][layer]:>12.4f}" for regime in REGIMES))
    print(f"spectral_attention and frequency_norms ran on {where_it_ran()}.")
    with overtone.use_backend("reference"):
        truth = {regime: residual_stream(sign, arguments.seed, torch.float64) for regime, sign in REGIMES.items()}
    error = max(abs(a / b - 1) for regime in REGIMES for a, b in zip(ratios[regime], truth[regime], strict=True))
    print(f"The float64 reference agrees to {error:.0e}, relative, after {LAYERS} layers.")
    arguments.out.mkdir(parents=True, exist_ok=True)
    figure = arguments.out / "depth.svg"
    figure.write_text(depth_figure(ratios))
    print("This version has no training study yet: the weights were random, nothing was trained.")
    print(f"Figure: {figure}")
    return 0


def residual_stream(sign: float, seed: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """‖HFC‖/‖LFC‖, the mean over images, before and after every layer x + A x V Λ Vᵀ."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(IMAGES, TOKENS, CHANNELS, generator=generator).to(dtype)
    basis = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS, generator=generator, dtype=torch.float64)).Q.to(dtype)
    eigenvalues = (sign * torch.rand(CHANNELS, generator=generator)).to(dtype)
    ratios = [overtone.frequency_norms(x).ratio.mean().item()]
    for _ in range(LAYERS):
        query, value = split_heads(x), split_heads(x @ basis)
        x, norms = overtone.spectral_attention(
            query, query, value, eigenvalues, basis.T, residual=x, scale=1 / CHANNELS, return_norms=True
        )
        ratios.append(norms.ratio.mean().item())
    return ratios


def split_heads(x: Tensor) -> Tensor:
    """[B, N, H·D] as [B, H, N, D], a view."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def where_it_ran() -> str:
    backend = select("spectral_attention", None, torch.empty(0))
    if backend != "cpu" or _extension.native is None:
        return f"the {backend} backend"
    return f"the cpu backend ({_extension.native.isa()} kernels, {torch.get_num_threads()} threads)"


def depth_figure(ratios: dict[str, list[float]]) -> str:
    """The ratios over depth on a logarithmic axis, as SVG."""
    width, height, left, top, bottom = 640, 320, 60, 24, 44
    values = [value for curve in ratios.values() for value in curve]
    decades = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)

    def x_at(layer: int) -> float:
        return left + layer * (width - left - 90) / LAYERS

    def y_at(value: float) -> float:
        share = (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
        return height - bottom - share * (height - top - bottom)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for decade in decades:
        y = y_at(10.0**decade)
        parts.append(f'<line x1="{left}" x2="{width - 90}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for layer in range(0, LAYERS + 1, 2):
        parts.append(f'<text x="{x_at(layer):.1f}" y="{height - bottom + 18}" text-anchor="middle">{layer}</text>')
    parts.append(f'<text x="{(left + width - 90) / 2}" y="{height - 6}" text-anchor="middle">layer</text>')
    parts.append(f'<text x="{left}" y="14">‖HFC‖ / ‖LFC‖</text>')
    for regime, curve in ratios.items():
        points = " ".join(f"{x_at(layer):.1f},{y_at(value):.1f}" for layer, value in enumerate(curve))
        colour = COLOURS[regime]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        parts.append(f'<text x="{x_at(LAYERS) + 8:.1f}" y="{y_at(curve[-1]) + 4:.1f}" fill="{colour}">{regime}</text>')
    return "\n".join([*parts, "</svg>\n"])
