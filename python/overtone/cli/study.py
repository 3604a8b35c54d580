"""`overtone study`: in this version, one fused op on a residual stream without training."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import overtone
from overtone import _extension
from overtone.backends import select

IMAGES, TOKENS, CHANNELS, LAYERS = 8, 197, 192, 12
# Every eigenvalue of the value-projection weight has this sign: above zero smooths, below zero sharpens.
REGIMES = {"smooth": 1.0, "sharpen": -1.0}


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "study",
        help="measure the smoothing of a residual stream, layer by layer",
        description="Sends random tokens through twelve layers x + A x W, once with positive and once with negative "
        "eigenvalues of W, and prints the ratio of high to low frequencies after each layer, what ran where, "
        "and how far it is from float64. The study that trains models is not part of this version.",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens and weights (default: 0)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    streams = {regime: residual_stream(sign, arguments.seed) for regime, sign in REGIMES.items()}
    norms = {regime: overtone.frequency_norms(stream) for regime, stream in streams.items()}
    ratios = {regime: result.ratio.mean(dim=1) for regime, result in norms.items()}
    print(f"High over low frequencies, mean of {IMAGES} images of {TOKENS} tokens x {CHANNELS} channels:")
    print("layer" + "".join(f"{regime:>12}" for regime in REGIMES))
    for layer in range(LAYERS + 1):
        print(f"{layer:>5}" + "".join(f"{ratios[regime][layer]:>12.4f}" for regime in REGIMES))
    error = max(relative_error(streams[regime], ratios[regime]) for regime in REGIMES)
    print(f"frequency_norms ran on {where_it_ran(streams['smooth'])}; it is within {error:.0e} of float64, relative.")
    print("This version has no training study yet: the weights were random, nothing was trained.")
    return 0


def residual_stream(sign: float, seed: int) -> Tensor:
    """The tokens before and after every layer, [layer, image, token, channel]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(IMAGES, TOKENS, CHANNELS, generator=generator)
    basis = torch.linalg.qr(torch.randn(CHANNELS, CHANNELS, generator=generator)).Q
    weight = (basis * (sign * torch.rand(CHANNELS, generator=generator))) @ basis.T
    stream = [x]
    for _ in range(LAYERS):
        attention = torch.softmax(x @ x.transpose(-1, -2) / CHANNELS, dim=-1)
        x = x + attention @ x @ weight
        stream.append(x)
    return torch.stack(stream)


def relative_error(stream: Tensor, ratios: Tensor) -> float:
    truth = overtone.reference.frequency_norms(stream.double()).ratio.mean(dim=1)
    return ((ratios.double() - truth).abs() / truth).max().item()


def where_it_ran(stream: Tensor) -> str:
    backend = select("frequency_norms", None, stream)
    if backend != "cpu" or _extension.native is None:
        return f"the {backend} backend"
    return f"the cpu backend ({_extension.native.last_kernel()}, {torch.get_num_threads()} threads)"
