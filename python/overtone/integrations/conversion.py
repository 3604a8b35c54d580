"""Weights into a SpectralAttention, and out of it again."""

from __future__ import annotations

import torch
from torch import Tensor

from overtone import _validate as validate
from overtone import linalg
from overtone.integrations.weights import AttentionWeights, RequiresGrad, write_linear
from overtone.nn.attention import SpectralAttention
from overtone.spectrum import SMALLEST

__all__ = [
    "initialize",
    "merged_weights",
    "nearest_spectrum",
    "query_weight",
    "requires_grad",
    "set_requires_grad",
]


@torch.no_grad()
def initialize(core: SpectralAttention, weights: AttentionWeights, init: str) -> None:
    """Give `core` these weights. Its spectrum is the nearest to them if init is "nearest", else as it is (random)."""
    if core.regime == "free":
        write_linear(core.qkv, torch.cat(weights[:3]), torch.cat(weights[4:7]))
        write_linear(core.proj, weights.output, weights.output_bias)
        return
    write_linear(core.qk, torch.cat(weights[:2]), torch.cat(weights[4:6]))
    assert core.bias is not None
    core.bias.copy_(weights.output_bias)
    if init == "nearest":
        # Rows of A sum to one, so the values' bias passes through it. In half precision it is rounded only once.
        output, value_bias, output_bias = (_wide(x) for x in (weights.output, weights.value_bias, weights.output_bias))
        core.bias.copy_(output_bias + output @ value_bias)
        core.spectrum.set_spectrum(*nearest_spectrum(weights.value.mT, weights.output.mT, core))


def _wide(x: Tensor) -> Tensor:
    return x.to(validate.accumulate_dtype(x.dtype))


def nearest_spectrum(w_v: Tensor, w_proj: Tensor, core: SpectralAttention) -> tuple[Tensor, Tensor]:
    """The Frobenius-nearest V Λ Vᵀ of w_v @ w_proj with Λ in the regime's interval, eigenvectors sorted by head."""
    w_v, w_proj = w_v.double(), w_proj.double()
    weight = w_v @ w_proj
    eigenvalues, vectors = linalg.eigh((weight + weight.mT) / 2)
    sign = core.spectrum.sign
    largest = 1.0 if core.spectrum.bounded or core.kind == "general" else float("inf")
    clipped = sign * (sign * eigenvalues).clamp(SMALLEST, largest)
    # How much head h contributes to the quotient v_jᵀ W v_j of eigenvector j.
    read = (vectors.mT @ w_v).unflatten(-1, (core.num_heads, -1))  # [j, h, k]
    written = (w_proj @ vectors).unflatten(0, (core.num_heads, -1))  # [h, k, j]
    order = _assign(torch.einsum("jhk,hkj->hj", read, written) * sign)
    return vectors[:, order], clipped[order]


def _assign(affinity: Tensor) -> Tensor:
    """Eigenvectors [j] in the order of heads, assigned greedily by affinity [h, j]; every head gets as many."""
    heads, count = affinity.shape
    free = [count // heads] * heads
    owner: dict[int, int] = {}
    for place in affinity.flatten().argsort(descending=True).tolist():
        head, vector = divmod(place, count)
        if vector not in owner and free[head] > 0:
            owner[vector] = head
            free[head] -= 1
    return torch.tensor(sorted(owner, key=lambda vector: (owner[vector], vector)), device=affinity.device)


def merged_weights(core: SpectralAttention) -> AttentionWeights:
    """A converted layer as ordinary weights, the spectrum multiplied out."""
    packed = core.qkv if core.regime == "free" else core.qk
    query, key = packed.weight.split(core.dim)[:2]
    query_bias, key_bias = packed.bias.split(core.dim)[:2]
    w_v, w_proj = core.value_projection()
    bias = core.proj.bias if core.regime == "free" else core.bias
    assert bias is not None
    value_bias = packed.bias[2 * core.dim :] if core.regime == "free" else torch.zeros_like(bias)
    return AttentionWeights(query, key, w_v.mT, w_proj.mT, query_bias, key_bias, value_bias, bias)


def query_weight(core: SpectralAttention) -> Tensor:
    return core.qkv.weight if core.regime == "free" else core.qk.weight


def requires_grad(core: SpectralAttention) -> RequiresGrad:
    """Which of the original's weights require a gradient: those whose successors do."""
    assert (bias := core.proj.bias if core.regime == "free" else core.bias) is not None
    if core.regime == "free":
        packed, value, output = core.qkv, core.qkv.weight.requires_grad, core.proj.weight.requires_grad
        value_bias = core.qkv.bias.requires_grad
    else:
        packed, value_bias = core.qk, bias.requires_grad
        value = output = any(parameter.requires_grad for parameter in core.spectrum.parameters())
    query, query_bias = packed.weight.requires_grad, packed.bias.requires_grad
    return RequiresGrad(query, query, value, output, query_bias, query_bias, value_bias, bias.requires_grad)


def set_requires_grad(core: SpectralAttention, of: RequiresGrad) -> None:
    """What was frozen stays frozen. A parameter that replaces several requires a gradient if any of them did."""
    if core.regime == "free":
        core.qkv.weight.requires_grad_(of.query or of.key or of.value)
        core.qkv.bias.requires_grad_(of.query_bias or of.key_bias or of.value_bias)
        core.proj.weight.requires_grad_(of.output)
        core.proj.bias.requires_grad_(of.output_bias)
        return
    core.qk.weight.requires_grad_(of.query or of.key)
    core.qk.bias.requires_grad_(of.query_bias or of.key_bias)
    core.spectrum.requires_grad_(of.value or of.output)
    assert core.bias is not None
    core.bias.requires_grad_(of.output_bias or of.value_bias)
