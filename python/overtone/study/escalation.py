"""What Yu and Zhang measure of every block of a model: token similarity, gradients, norms, the rate of escalation."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import overtone
from overtone.models import Block, VisionTransformer
from overtone.nn import SpectralAttention

#: By block, of the stream before the first and after each ("similarity") or of each block (the others).
BLOCK_METRICS = {
    "similarity": "token similarity",
    "gradient": "gradient norm",
    "stream": "‖stream‖ before the block",
    "update": "‖update‖ by the block",
    "rate": "escalation rate of attention and its residual",
    "components": "ξ₁/ξ₂",
    "estimate": "escalation rate estimated from |λ₂|",
}


class _Seen(NamedTuple):
    block: Block
    before: Tensor
    after: Tensor
    attention_input: Tensor  # what attention's weights are computed from
    stream: Tensor  # that attention's update is added to
    mixed: Tensor  # stream and update


def block_measures(model: VisionTransformer, images: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """BLOCK_METRICS of every block; medians over images, gradients of the mean loss."""
    model.eval()
    model.zero_grad()
    seen = _observe(model, images, labels)
    with torch.no_grad():
        stream = [seen[0].before, *(each.after for each in seen)]
        found = {"similarity": [overtone.token_similarity(x).median().item() for x in stream]}
        found["gradient"] = [_gradient_norm(each.block) for each in seen]
        found["stream"] = [_norm(each.before) for each in seen]
        found["update"] = [_norm(each.after - each.before) for each in seen]
        for each in seen:
            for name, value in _escalation(each).items():
                found.setdefault(name, []).append(value)
    model.zero_grad()
    return found


def _observe(model: VisionTransformer, images: Tensor, labels: Tensor) -> list[_Seen]:
    """One forward and backward pass, and the tokens around every attention and block."""
    attentions: list[tuple[Tensor, Tensor, Tensor]] = []
    seen: list[_Seen] = []

    def after_attention(_, inputs: tuple[Tensor], options: dict, output) -> None:
        update = (output[0] if isinstance(output, tuple) else output).detach()
        x, residual = inputs[0].detach(), options.get("residual")
        attentions.append((x, x if residual is None else residual.detach(), update))

    def after_block(block: Block, inputs: tuple[Tensor, ...], outputs) -> None:
        x, stream, result = attentions.pop()
        before = inputs[0].detach()
        if block.filter is not None and block.filter_place == "attention":  # attention gave its update alone
            stream, result = before, before + block.filter(result).detach()
        seen.append(_Seen(block, before, outputs[0].detach(), x, stream, result))

    handles = [block.attn.register_forward_hook(after_attention, with_kwargs=True) for block in model.layers]
    handles += [block.register_forward_hook(after_block) for block in model.layers]
    try:
        F.cross_entropy(model(images), labels).backward()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _gradient_norm(block: Block) -> float:
    return torch.stack([p.grad.norm() for p in block.parameters() if p.grad is not None]).norm().item()


def _norm(x: Tensor) -> float:
    return torch.linalg.matrix_norm(x).median().item()


def _escalation(seen: _Seen) -> dict[str, float]:
    """X ↦ Y = X + update: the rate t_div(X)/t_div(Y), ξ₁/ξ₂, and what |λ₂| makes of the rate (MATH §6)."""
    x, y = (overtone.frequency_norms(tokens.double()) for tokens in (seen.stream, seen.mixed))
    components = (y.low / x.low).square() / (y.high / x.high).square()
    similarity = overtone.token_similarity(seen.stream.double())
    attention: SpectralAttention = seen.block.attn
    weights = attention.attention_weights(seen.attention_input)
    second = overtone.linalg.eigvals(weights.double()).abs().sort(-1).values[..., -2]  # |λ₂|, [images, heads]
    basis_in, basis_out = attention.value_projection()
    # s²: the size of an update by a random W of this norm, relative to the stream.
    scale = seen.attention_input.double().square().sum((-2, -1)) / seen.stream.double().square().sum((-2, -1))
    size = scale * (basis_in @ basis_out).double().square().sum() / attention.dim
    contraction = (1 + size) / (1 + size * second.square().mean(-1))
    return {
        "rate": overtone.escalation_rate(seen.stream.double(), seen.mixed.double()).median().item(),
        "components": components.median().item(),
        "estimate": (1 + similarity * (contraction - 1)).median().item(),
    }
