"""The weights of other libraries' attention modules, whatever layers hold them."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = [
    "AttentionWeights",
    "Linears",
    "RequiresGrad",
    "class_name",
    "is_conv1d",
    "mismatch",
    "per_linear",
    "read",
    "requires_grad",
    "set_requires_grad",
    "write",
    "write_linear",
]

# The layers of queries, keys, values and output, or the packed one and the output's. Each has a weight and a bias.
Linears = tuple[Any, ...]


class AttentionWeights(NamedTuple):
    """An attention layer's weights [out, in], as nn.Linear holds them, and its biases, zero where it has none."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Tensor
    key_bias: Tensor
    value_bias: Tensor
    output_bias: Tensor


class RequiresGrad(NamedTuple):
    """Whether each of AttentionWeights requires a gradient."""

    query: bool
    key: bool
    value: bool
    output: bool
    query_bias: bool
    key_bias: bool
    value_bias: bool
    output_bias: bool


def class_name(thing: object) -> str:
    """The full name of its class, as it would be imported."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def is_conv1d(linear: nn.Module) -> bool:
    """Whether it is transformers' linear layer whose weight is [in, out]."""
    return class_name(linear) == "transformers.pytorch_utils.Conv1D"


def read(linears: Linears) -> AttentionWeights:
    """The weights of these layers, detached."""
    parts = [_read_linear(linear) for linear in linears]
    if len(parts) == 2:
        (packed, packed_bias), output = parts
        parts = [*zip(packed.chunk(3), packed_bias.chunk(3), strict=True), output]
    weights, biases = zip(*parts, strict=True)
    return AttentionWeights(*weights, *biases)


def _read_linear(linear: Any) -> tuple[Tensor, Tensor]:
    weight = linear.weight.detach().mT if is_conv1d(linear) else linear.weight.detach()
    bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach()
    return weight, bias


def write(linears: Linears, weights: AttentionWeights) -> None:
    """Copy the weights into these layers."""
    for linear, matrices, biases in per_linear(linears, weights):
        write_linear(linear, torch.cat(matrices), torch.cat(biases))


def write_linear(linear: Any, weight: Tensor, bias: Tensor) -> None:
    linear.weight.copy_(weight.mT if is_conv1d(linear) else weight)
    if linear.bias is not None:
        linear.bias.copy_(bias)


def requires_grad(linears: Linears) -> RequiresGrad:
    """Which weights and biases require a gradient. A missing bias counts as its layer's weight does."""
    weights = [linear.weight.requires_grad for linear in linears]
    biases = [(linear.weight if linear.bias is None else linear.bias).requires_grad for linear in linears]
    if len(linears) == 2:
        weights, biases = ([each[0]] * 3 + each[1:] for each in (weights, biases))
    return RequiresGrad(*weights, *biases)


def set_requires_grad(linears: Linears, wanted: RequiresGrad) -> None:
    """The reverse; a packed weight requires a gradient if any of its parts does."""
    for linear, weights, biases in per_linear(linears, wanted):
        linear.weight.requires_grad_(any(weights))
        if linear.bias is not None:
            linear.bias.requires_grad_(any(biases))


def per_linear(
    linears: Linears, values: AttentionWeights | RequiresGrad
) -> list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]]:
    """Every layer with the values that belong to its weight, and those that belong to its bias."""
    ends = (0, 3, 4) if len(linears) == 2 else range(5)
    return [
        (linear, values[:4][start:end], values[4:][start:end])
        for linear, (start, end) in zip(linears, itertools.pairwise(ends), strict=True)
    ]


def mismatch(weights: AttentionWeights) -> str | None:
    """Why these weights do not fit into one SpectralAttention, or None."""
    matrices = weights[:4]
    if len({x.shape for x in matrices}) > 1 or matrices[0].shape[0] != matrices[0].shape[1]:
        return "has heads that do not add up to its width, which SpectralAttention does not support"
    if len({(x.dtype, x.device) for x in weights}) > 1:
        return "has layers of several dtypes or devices, which SpectralAttention does not support"
    return None
