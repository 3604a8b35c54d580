"""The blocks of every model, and how a model runs through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overtone import _validate as validate
from overtone.models.cache import BlockCache, TokenCache
from overtone.models.config import TransformerConfig
from overtone.nn import head_methods
from overtone.nn.attention import SpectralAttention, evaluate_spectra
from overtone.nn.filters import ContraNorm, DeEscalation, FeatScale
from overtone.nn.linear import Mlp, is_plain
from overtone.nn.norms import SignedLayerNorm, normalize_for_products
from overtone.ops.frequency import frequency_norms
from overtone.spectrum import BasisCache
from overtone.types import FrequencyNorms, Spectrum

__all__ = ["Block", "Transformer"]


class Block(nn.Module):
    """Attention and an MLP, each with a residual and a LayerNorm, before (pre-norm) or after it (post-norm).

    forward gives the tokens, and the FrequencyNorms of the residual stream right after attention's update if asked for.
    Of a causal block no token sees a later one: means over tokens become running means.

    Args:
        config: of the model.
        layer: which of its blocks this is, from 0.
    """

    def __init__(self, config: TransformerConfig, layer: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.post_norm, self.drop_path = config.norm == "post", config.drop_rates[layer]
        self.is_causal = config.is_causal
        # LayerNorm scaling: LN(x) / √ℓ before both sublayers of layer ℓ, counted from 1.
        self.norm_scale = (layer + 1) ** -0.5 if config.method == "layernorm_scaling" else 1.0
        self.norm1 = _make_norm(config, factory)
        self.attn = _make_attention(config, layer, factory)
        self.norm2 = _make_norm(config, factory)
        self.mlp = Mlp(config.dim, int(config.dim * config.mlp_ratio), config.gelu, **factory)
        self.filter, self.filter_place = _make_filter(config, factory), config.filter_place

    def forward(
        self,
        x: Tensor,
        spectrum: Spectrum | None = None,
        values_0: Tensor | None = None,
        return_norms: bool = False,
        cache: BlockCache | None = None,
    ) -> tuple[Tensor, FrequencyNorms | None]:
        options: dict[str, Any] = {"spectrum": spectrum, "values_0": values_0, "is_causal": self.is_causal}
        options |= {} if cache is None else cache.attention_options(x.shape[1])
        x, norms = self._attend(x, return_norms, options, cache)
        x = self._filtered(x, "residual", cache)
        if self.post_norm:
            x = self.norm1(x)
            x = self.norm2(self._apply_mlp(x, x))
        else:
            x = self._apply_mlp(self._normalized(self.norm2, x), x)
        return self._filtered(x, "block", cache), norms

    def _apply_mlp(self, x: Tensor, residual: Tensor) -> Tensor:
        """The residual is added inside where nobody else wants to see the MLP's own result."""
        if (self.training and self.drop_path > 0) or not is_plain(self.mlp, Mlp):
            return residual + self._drop_path(self.mlp(x))
        return self.mlp(x, residual)

    def attention_input(self, x: Tensor) -> Tensor:
        """What attention sees of the block's input."""
        return x if self.post_norm else self._normalized(self.norm1, x)

    def _normalized(self, norm: nn.Module, x: Tensor) -> Tensor:
        """What attention and the MLP take."""
        return normalize_for_products(norm, x) if self.norm_scale == 1 else norm(x) * self.norm_scale

    def _attend(
        self, x: Tensor, return_norms: bool, options: dict[str, Any], cache: BlockCache | None
    ) -> tuple[Tensor, FrequencyNorms | None]:
        inputs = self.attention_input(x)
        if self.filter is not None and self.filter_place == "attention":
            x = x + self._drop_path(self._filtered(self.attn(inputs, **options), "attention", cache))
            return x, frequency_norms(x) if return_norms else None
        options = {**options, "sample_scale": self._drop_factors(x)}
        if return_norms:
            return self.attn(inputs, residual=x, return_norms=True, **options)
        return self.attn(inputs, residual=x, **options), None

    def _filtered(self, x: Tensor, place: str, cache: BlockCache | None) -> Tensor:
        """After the method's filter, if this is its place."""
        if self.filter is None or place != self.filter_place:
            return x
        return self.filter(x, is_causal=self.is_causal) if cache is None else cache.filtered(self.filter, x)

    def _drop_factors(self, x: Tensor) -> Tensor | None:
        """Stochastic depth, [B]: a sample's update is left out with probability drop_path, and scaled up otherwise."""
        if not self.training or self.drop_path == 0:
            return None
        kept = 1 - self.drop_path
        mask = torch.empty(x.shape[0], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        mask.bernoulli_(kept)
        return mask.div_(kept) if kept > 0 else mask

    def _drop_path(self, update: Tensor) -> Tensor:
        factors = self._drop_factors(update)
        return update if factors is None else update * factors.to(update.dtype)[:, None, None]


def _make_norm(config: TransformerConfig, factory: dict) -> nn.LayerNorm:
    if config.norm_sign is None:
        return nn.LayerNorm(config.dim, eps=config.norm_eps, **factory)
    return SignedLayerNorm(config.dim, config.norm_sign, eps=config.norm_eps, **factory)


def _make_attention(config: TransformerConfig, layer: int, factory: dict) -> SpectralAttention:
    return SpectralAttention(
        config.dim,
        config.num_heads,
        config.regimes[layer],
        config.kind,
        bounded=config.bounded,
        condition_limit=config.condition_limit,
        qkv_bias=config.qkv_bias,
        head_gain=config.method == "attn_scale",
        centered=config.method == "centered",
        neutreno=config.method_strength if config.method == "neutreno" else 0.0,
        head_method=_make_head_method(config, factory),
        **factory,
    )


def _make_head_method(config: TransformerConfig, factory: dict) -> head_methods.HeadMethod | None:
    dim, num_heads, strength = config.dim, config.num_heads, config.method_strength
    makers: dict[str, Callable[[], head_methods.HeadMethod]] = {
        "laplacian": lambda: head_methods.LaplacianHeads(num_heads, strength, **factory),
        "value_residual": lambda: head_methods.ValueResidual(strength),
        "gfsa": lambda: head_methods.GraphFilter(num_heads, int(strength), **factory),
        "xsa": lambda: head_methods.XSA(num_heads, **factory),
        "gated": lambda: head_methods.GatedHeads(dim, **factory),
        "att_inv": lambda: head_methods.AttInv(dim, num_heads, **factory),
    }
    return makers[config.method]() if config.method in makers else None


def _make_filter(config: TransformerConfig, factory: dict) -> nn.Module | None:
    """What is applied to tokens at config.filter_place."""
    if config.method == "de_escalation":
        return DeEscalation(config.method_strength)
    if config.method == "contranorm":
        return ContraNorm(config.method_strength)
    return FeatScale(config.dim, **factory) if config.method == "feat_scale" else None


@torch.no_grad()
def _mimetic(attention: SpectralAttention, beta: float) -> None:
    """W_V W_proj = −βI + (the product of the weights as they are), each factor with half of its singular values."""
    value = attention.qkv.weight[-attention.dim :]  # a Linear keeps Wᵀ
    product = (attention.proj.weight.double() @ value.double()).mT
    if product.is_meta:
        return
    left, sizes, right = torch.linalg.svd(product - beta * torch.eye(attention.dim).to(product))
    value.copy_((left * sizes.sqrt()).mT)
    attention.proj.weight.copy_((sizes.sqrt()[:, None] * right).mT)


class Transformer(nn.Module):
    """What the models have in common: `blocks`, whose bases are evaluated together, and running through them.

    `grad_checkpointing` may be switched on a model that exists.
    """

    config: TransformerConfig
    blocks: nn.ModuleList

    def __init__(self, config: TransformerConfig, kind: type[TransformerConfig]) -> None:
        super().__init__()
        if not isinstance(config, kind):
            wanted = f"a {kind.__name__}"
            raise TypeError(f"{type(self).__name__}: config: got {validate.describe(config)}, wanted {wanted}")
        self.config, self.grad_checkpointing = config, config.grad_checkpointing
        self._cache = BasisCache()

    def reset_parameters(self) -> None:
        """timm's scheme: linear weights from a normal distribution of std 0.02, cut at ±2; spectra have their own."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for attention in (block.attn for block in self.layers):
            if attention.regime == "free" and self.config.mimetic_init is not None:
                _mimetic(attention, self.config.mimetic_init)
            elif attention.regime != "free" and self.config.init_eigenvalue is not None:
                attention.spectrum.reset_parameters(self.config.init_eigenvalue)

    @property
    def layers(self) -> list[Block]:
        return [cast(Block, block) for block in self.blocks]

    def evaluate_spectra(self) -> list[Spectrum | None]:
        """Every layer's spectrum from one batched factorization; None for layers that must do it themselves."""
        return evaluate_spectra([block.attn for block in self.layers], self._cache)

    def _run_blocks(
        self, x: Tensor, return_norms: bool, cache: TokenCache | None = None
    ) -> tuple[Tensor, FrequencyNorms | None]:
        """The tokens after the last block, and the norms of every block, [depth, B]."""
        norms: list[FrequencyNorms] = []
        spectra = self.evaluate_spectra() if cache is None else cache.spectra
        values_0 = self._values_0(x, spectra)
        for place, (block, spectrum) in enumerate(zip(self.layers, spectra, strict=True)):
            if cache is not None:
                x, found = block(x, spectrum, values_0, return_norms, cache.blocks[place])
            elif self.grad_checkpointing and self.training:
                x, found = checkpoint(block, x, spectrum, values_0, return_norms, use_reentrant=False)
            else:
                x, found = block(x, spectrum, values_0, return_norms)
            norms += [] if found is None else [found]
        if not return_norms:
            return x, None
        low, high = zip(*norms, strict=True)
        return x, FrequencyNorms(torch.stack(low), torch.stack(high))

    def _values_0(self, x: Tensor, spectra: list[Spectrum | None]) -> Tensor | None:
        """V⁰ of the methods that want it; in the first layer itself V⁰ − V is zero."""
        if self.config.method not in ("neutreno", "value_residual"):
            return None
        first = self.layers[0]
        return first.attn.project(first.attention_input(x), spectra[0]).value
