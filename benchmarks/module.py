"""The price of a whole attention module: qkv projection, attention, output projection.

ot.nn.SpectralAttention in regime "free" stands beside the attention modules of timm, transformers and torch itself, all
with the same weights; with a spectrum, beside the same in plain PyTorch. Gradients are those of the tokens and of every
weight. A library that is not installed is skipped, with a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overtone as ot
from overtone.benchmarks.harness.case import Case, Results, Workload
from overtone.benchmarks.harness.check import Check, Expected, check_against_truth
from overtone.benchmarks.shapes import TI_224, TI_CIFAR, VITS, AttentionShape
from overtone.benchmarks.step import PlainAttention, basis_caches
from overtone.libraries import imported
from overtone.reference.linalg import inverse

FORWARD, FORWARD_BACKWARD = "forward", "forward+backward"


@dataclass(frozen=True)
class Built:
    """A module, how it is called, and its parameters with the number of equal parts that each is judged in."""

    module: nn.Module
    call: Callable[[Tensor], Tensor]
    parameters: tuple[tuple[Tensor, int], ...]


Builder = Callable[[AttentionShape, tuple[Tensor, ...]], Built]


class Implementation:
    """A module with the case's weights. It is built at its first call, in the dtype of the tokens."""

    def __init__(self, build: Builder, shape: AttentionShape, mode: str) -> None:
        self.build, self.shape, self.mode = build, shape, mode
        self.built: dict[torch.dtype, Built] = {}

    def __call__(self, x: Tensor, grad: Tensor, *weights: Tensor) -> Results:
        if x.dtype not in self.built:
            self.built[x.dtype] = self.build(self.shape, weights)
        built = self.built[x.dtype]
        for cache in basis_caches(built.module):  # as after a step of training
            cache.clear()
        if self.mode == FORWARD:
            return (built.call(x),)
        return self._with_gradients(built, x.detach().requires_grad_(), grad)

    @torch.enable_grad()  # the kit calls what takes its own backward without
    def _with_gradients(self, built: Built, x: Tensor, grad: Tensor) -> Results:
        y = built.call(x)
        grads = torch.autograd.grad(y, (x, *(parameter for parameter, _ in built.parameters)), grad)
        parts = (
            part for (_, count), whole in zip(built.parameters, grads[1:], strict=True) for part in whole.chunk(count)
        )
        return y.detach(), grads[0], *parts


def _built(module: nn.Module, values: dict[str, Tensor], parts: tuple[int, ...], call: Any = None) -> Built:
    """The module in eval mode (there is no dropout), with these values in the parameters of these names."""
    module = module.to(next(iter(values.values())).dtype).eval()
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            named[name].copy_(value)
    parameters = tuple(zip((named[name] for name in values), parts, strict=True))
    return Built(module, call or module, parameters)


# Ordinary weights: W_qkv [3d, d], its bias, W_proj [d, d], its bias; the parts of a packed tensor are q, k and v.

PACKED = (3, 3, 1, 1)


def _ours(shape: AttentionShape, weights: tuple[Tensor, ...]) -> Built:
    names = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    module = ot.nn.SpectralAttention(shape.channels, shape.num_heads, "free")
    return _built(module, dict(zip(names, weights, strict=True)), PACKED)


def _timm(shape: AttentionShape, weights: tuple[Tensor, ...]) -> Built:
    names = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    module = imported("timm.layers").Attention(shape.channels, shape.num_heads, qkv_bias=True)
    return _built(module, dict(zip(names, weights, strict=True)), PACKED)


def _torch(shape: AttentionShape, weights: tuple[Tensor, ...]) -> Built:
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    module = nn.MultiheadAttention(shape.channels, shape.num_heads, batch_first=True)
    values = dict(zip(names, weights, strict=True))
    return _built(module, values, PACKED, lambda x: module(x, x, x, need_weights=False)[0])


def _transformers(shape: AttentionShape, weights: tuple[Tensor, ...]) -> Built:
    library = imported("transformers.models.vit.modeling_vit")
    config = library.ViTConfig(
        hidden_size=shape.channels, num_attention_heads=shape.num_heads, attn_implementation="sdpa"
    )
    module = library.ViTAttention(config)
    projections = ("q_proj", "k_proj", "v_proj")
    values = {f"{name}.weight": part for name, part in zip(projections, weights[0].chunk(3), strict=True)}
    values |= {f"{name}.bias": part for name, part in zip(projections, weights[1].chunk(3), strict=True)}
    values |= {"o_proj.weight": weights[2], "o_proj.bias": weights[3]}
    return _built(module, values, (1,) * 8, lambda x: module(x)[0])


class PlainFree(nn.Module):
    """The module in plain PyTorch, the matrices of logits written out."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.heads = shape.num_heads
        self.qkv = nn.Linear(shape.channels, 3 * shape.channels)
        self.proj = nn.Linear(shape.channels, shape.channels)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (query.shape[-1] ** -0.5 * query @ key.mT).softmax(-1)
        return self.proj((weights @ value).transpose(1, 2).flatten(2))


def _reference(shape: AttentionShape, weights: tuple[Tensor, ...]) -> Built:
    names = ("qkv.weight", "qkv.bias", "proj.weight", "proj.bias")
    return _built(PlainFree(shape), dict(zip(names, weights, strict=True)), PACKED)


FREE = {"reference": _reference, "timm": _timm, "transformers": _transformers, "nn.MultiheadAttention": _torch}


# Weights with a spectrum: W_qk [2d, d], its bias, the basis [d, d], raw eigenvalues [d].


class PlainGeneral(PlainAttention):
    """V Λ V⁻¹ attention in plain PyTorch; `theta` is V, `psi` is Λ."""

    def forward(self, x: Tensor) -> Tensor:
        query, key = self.qk(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        value = (x @ self.theta).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return (heads * self.psi.clamp(-1, 0)) @ inverse(self.theta)


SPECTRAL_PLAIN = {"symmetric": PlainAttention, "general": PlainGeneral}
UNPACKED = (1, 1, 1, 1)


def _spectral(kind: str, shape: AttentionShape, weights: tuple[Tensor, ...]) -> Built:
    names = ("qk.weight", "qk.bias", "spectrum.basis", "spectrum.raw_eigenvalues")
    module = ot.nn.SpectralAttention(shape.channels, shape.num_heads, "sharpen", kind)
    return _built(module, dict(zip(names, weights, strict=True)), UNPACKED)


def _plain_spectral(kind: str, shape: AttentionShape, weights: tuple[Tensor, ...]) -> Built:
    names = ("qk.weight", "qk.bias", "theta", "psi")
    module = SPECTRAL_PLAIN[kind](shape.channels, shape.num_heads)
    return _built(module, dict(zip(names, weights, strict=True)), UNPACKED)


def _check_free(results: Results, expected: Expected) -> Check:
    """The standard check of y and the gradients of x, q's, k's and v's weights and biases, proj's weight and bias.

    The keys' bias is judged as a part of the packed bias that it belongs to: its own gradient is zero, since a softmax
    does not see it, and all that is left of it is rounding.
    """

    def judged(parts: Results) -> Results:
        return parts if len(parts) == 1 else (*parts[:6], torch.cat(parts[5:8]), *parts[7:])

    if len(results) != len(expected.plain):
        return Check.failed(f"got {len(results)} results, wanted {len(expected.plain)}")
    return check_against_truth(
        judged(results), replace(expected, plain=judged(expected.plain), truth=judged(expected.truth))
    )


def _inputs(shape: AttentionShape, kind: str) -> tuple[Tensor, ...]:
    """Tokens, the gradient of the result, and weights of a kind's shapes."""
    generator = torch.Generator().manual_seed(0)
    d, tokens = shape.channels, (shape.batch, shape.tokens, shape.channels)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(size, generator=generator)

    x, grad, scale = random(*tokens), random(*tokens), d**-0.5
    if kind == "free":
        return x, grad, random(3 * d, d, scale=scale), random(3 * d), random(d, d, scale=scale), random(d)
    basis = torch.eye(d) + random(d, d, scale=0.5 * scale)
    raw = -torch.rand(d, generator=generator) * 0.8 - 0.1  # inside the interval that the general kind clips to
    return x, grad, random(2 * d, d, scale=scale), random(2 * d), basis, raw


def _case(kind: str, shape: AttentionShape, mode: str) -> Case:
    if kind == "free":
        builders: dict[str, Builder] = {"ours": _ours, **FREE}
    else:
        builders = {"ours": partial(_spectral, kind), "plain": partial(_plain_spectral, kind)}
    implementations = {name: Implementation(build, shape, mode) for name, build in builders.items()}
    tokens, both = shape.batch * shape.tokens, mode == FORWARD_BACKWARD
    linear, attention = 8 * tokens * shape.channels**2, 2 * tokens * shape.tokens * shape.channels
    return Case(
        op="attention_module",
        variant=kind,
        shape=shape.label,
        dtype=torch.float32,
        mode=mode,
        check=_check_free if kind == "free" else check_against_truth,
        workload=Workload(
            setup=lambda: _inputs(shape, kind),
            ours=implementations.pop("ours"),
            baselines=implementations,
            flops=(3 if both else 1) * linear + (7 if both else 2) * attention,
            bytes=(3 if both else 1) * 2 * tokens * shape.channels * 4,
            bound_by="matmul",
            runs_own_backward=both,
        ),
    )


def cases() -> list[Case]:
    modes = (FORWARD, FORWARD_BACKWARD)
    return [
        *(_case("free", shape, mode) for shape in VITS for mode in modes),
        *(_case(kind, shape, mode) for kind in SPECTRAL_PLAIN for shape in (TI_CIFAR, TI_224) for mode in modes),
    ]
