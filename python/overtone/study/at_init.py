"""What needs no data: a random ViT-B/16's dominance, token similarity with de-escalation, and LayerNorm's sign."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import overtone
from overtone.analysis import dominance, head_weights
from overtone.models import VisionTransformer, ViTConfig, vit_base
from overtone.nn import SignedLayerNorm, SpectralAttention
from overtone.study.escalation import block_measures

TAUS = (0.1, 0.5, 1.0)
Curve = list[float]


class Untrained(NamedTuple):
    """All of it."""

    vit_base: dict[str, int]  # verdicts, by name
    similarity: dict[str, Curve]  # token similarity over depth, by "pre" and "post"
    de_escalated: dict[float, Curve]  # by τ; post-norm
    norm_signs: dict[tuple[str, str, int], Curve]  # HFC/LFC over depth, by (norm, regime, sign)
    blocks: dict[str, list[dict[str, list[float]]]]  # block_measures by "pre", "post" and "de-escalated", a dict a seed


def untrained(quick: bool = False, seed: int = 0, seeds: int = 3) -> Untrained:
    """quick: fewer images, layers and tokens. seeds: of what is measured by block."""
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(seed)
        depth = 8 if quick else 24
        return Untrained(
            vit_base=vit_base_verdicts(depth=2 if quick else 12, images=1 if quick else 2),
            similarity={norm: token_similarity(norm, None, depth) for norm in ("pre", "post")},
            de_escalated={tau: token_similarity("post", tau, depth) for tau in TAUS},
            norm_signs={
                (norm, regime, sign): signed_stream(norm, regime, sign)
                for norm in ("pre", "post")
                for regime in ("smooth", "sharpen")
                for sign in (1, -1)
            },
            blocks={
                name: [_blocks(norm, tau, depth, seed) for seed in range(seeds)]
                for name, norm, tau in (("post", "post", None), ("de-escalated", "post", 1.0), ("pre", "pre", None))
            },
        )


def vit_base_verdicts(depth: int, images: int) -> dict[str, int]:
    """Of a ViT-B/16 with random weights on noise: how many (image, layer, head) have which verdict."""
    model = vit_base(depth=depth).eval()
    counts: Counter[str] = Counter()

    def count(attention: SpectralAttention, inputs: tuple[Tensor], _: dict) -> None:
        weights = head_weights(*attention.value_projection(), attention.num_heads)
        counts.update(dominance(attention.attention_weights(inputs[0]), weights).counts())

    for block in model.layers:
        block.attn.register_forward_pre_hook(count, with_kwargs=True)
    model(torch.randn(images, 3, 224, 224))
    return dict(counts)


def token_similarity(norm: str, tau: float | None, depth: int) -> Curve:
    """The mean token similarity of noise images before the first block and after each, at initialization."""
    model = _classic(norm, tau, depth)
    return _over_depth(model, torch.randn(8, 3, 128, 128), lambda x: overtone.token_similarity(x).mean().item())


def _classic(norm: str, tau: float | None, depth: int, **options) -> VisionTransformer:
    """With Xavier's weights, as in classic Transformers. tau: de-escalation after every block, None for none."""
    method = "plain" if tau is None else "de_escalation"
    model = VisionTransformer(
        ViTConfig(image_size=128, num_classes=10, depth=depth, norm=norm, method=method, strength=tau, **options)
    )
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    return model.eval()


@torch.enable_grad()
def _blocks(norm: str, tau: float | None, depth: int, seed: int) -> dict[str, list[float]]:
    """Of noise images with random labels."""
    torch.manual_seed(seed)
    model = _classic(norm, tau, depth, dim=96)
    return block_measures(model, torch.randn(4, 3, 128, 128), torch.randint(10, (4,)))


def _over_depth(model: VisionTransformer, images: Tensor, measure: Callable[[Tensor], float]) -> Curve:
    values: Curve = []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: values.append(measure(inputs[0])))
    for block in model.layers:
        block.register_forward_hook(lambda _, inputs, outputs: values.append(measure(outputs[0])))
    model(images)
    return values


def signed_stream(norm: str, regime: str, sign: int, depth: int = 12) -> Curve:
    """‖HFC‖/‖LFC‖ of a stream of attention layers alone, whose LayerNorm weights are all `sign`.

    Every call has the same tokens, bases and |λ|, uniform in [0.25, 0.75]: only the signs differ.
    """
    dim = 96
    torch.manual_seed(0)
    x = torch.randn(8, 64, dim)
    normalise = SignedLayerNorm(dim, sign)
    ratios = [overtone.frequency_norms(x).ratio.mean().item()]
    for _ in range(depth):
        layer = SpectralAttention(dim, 3, regime, bounded=True, qkv_bias=False)
        layer.spectrum.reset_parameters(magnitude=0.5)
        x = x + layer(normalise(x)) if norm == "pre" else normalise(x + layer(x))
        ratios.append(overtone.frequency_norms(x).ratio.mean().item())
    return ratios
