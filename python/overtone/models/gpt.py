"""Decoder language models with a regime per layer.

No token sees a later one, in any regime and with any method. Plain models ("free") take the weights of Hugging Face's
GPT-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone import _validate as validate
from overtone.models.blocks import Block, Transformer
from overtone.models.cache import TokenCache
from overtone.models.config import GPTConfig
from overtone.models.generation import generate
from overtone.models.huggingface import read_gpt2
from overtone.types import FrequencyNorms

__all__ = ["GPT", "gpt"]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class GPT(Transformer):
    """A decoder language model whose layers have a regime each: learned positions, then blocks of causal attention.

    Args:
        config: everything that decides the model; `gpt` makes it of keywords.

    `grad_checkpointing` may be switched on a model that exists.
    """

    config: GPTConfig

    def __init__(self, config: GPTConfig, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__(config, GPTConfig)
        factory = {"device": device, "dtype": dtype}
        self.tok_embed = nn.Embedding(config.vocab_size, config.dim, **factory)
        self.pos_embed = nn.Parameter(torch.empty(1, config.context_length, config.dim, **factory))
        self.blocks = nn.ModuleList(Block(config, layer, **factory) for layer in range(config.depth))
        self.norm = nn.LayerNorm(config.dim, eps=config.norm_eps, **factory)
        self.head = None if config.tied else nn.Linear(config.dim, config.vocab_size, bias=False, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.tok_embed.weight, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=float(self.config.pos_embed_std))

    @classmethod
    def from_hf(cls, model: nn.Module) -> GPT:
        """A GPT that computes what a GPT-2 of Hugging Face's transformers computes, in its dtype, device and mode.

        Weights are copied. GPT's layers have no dropout, which GPT-2's have in training.

        Args:
            model: a GPT2LMHeadModel, or a GPT2Model, whose logits are those of tied embeddings then.
        """
        config, state = read_gpt2(model)
        first = state["tok_embed.weight"]
        with torch.random.fork_rng([]):
            result = cls(config, device=first.device, dtype=first.dtype)
        result.load_state_dict(state)
        return result.train(model.training)

    def forward(
        self, tokens: Tensor, return_norms: bool = False, cache: TokenCache | None = None
    ) -> Tensor | tuple[Tensor, FrequencyNorms]:
        """Logits of every token's successor, [B, N, vocab_size].

        Args:
            tokens: [B, N], integers from 0 to vocab_size − 1, at most context_length of them.
            return_norms: also return the FrequencyNorms of the residual stream right after every layer's attention,
                [depth, B]. They are measured over all tokens, the last included; nothing is computed from them.
            cache: of `new_cache`; the tokens follow those it has seen, and are added to it. Without gradients.
        """
        x, norms = self._features(tokens, return_norms, cache)
        logits = self._logits(x)
        return logits if norms is None else (logits, norms)

    def forward_features(self, tokens: Tensor) -> Tensor:
        """The residual stream after the last block, [B, N, dim]."""
        return self._features(tokens, False, None)[0]

    def new_cache(self, capacity: int | None = None) -> TokenCache:
        """An empty cache with room for so many tokens; default: context_length. Valid until the weights change."""
        longest = self.config.context_length
        capacity = longest if capacity is None else validate.count("GPT.new_cache", "capacity", capacity)
        if capacity > longest:
            raise ValueError(f"GPT.new_cache: capacity: got {capacity}, wanted at most context_length = {longest}")
        with torch.no_grad():
            return TokenCache(self.evaluate_spectra(), capacity)

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The prompt and what the model writes after it, [B, N + max_new_tokens], int64.

        Runs in eval mode. On the CPU write with `ot.spectrum.fold(model)`: for single tokens PyTorch's own operations
        are faster than ours, and a spectrum is then multiplied out once.

        Args:
            prompt: [B, N] tokens, N ≥ 1.
            max_new_tokens: how many to write; with the prompt at most context_length.
            temperature: divides the logits; 0 always takes the likeliest token.
            top_k: draw from so many of the likeliest tokens; default: from all.
            seed: of the draws; default: torch's own generator.
            generator: in place of a seed, on the model's device.
        """
        generator = _generator(seed, generator, self.pos_embed.device)
        return generate(self, prompt, max_new_tokens, temperature=temperature, top_k=top_k, generator=generator)

    def _features(
        self, tokens: Tensor, return_norms: bool, cache: TokenCache | None
    ) -> tuple[Tensor, FrequencyNorms | None]:
        if cache is None:
            return self._run_blocks(self._embed(tokens, 0, self.config.context_length), return_norms)
        with torch.no_grad():
            x = self._embed(tokens, cache.length, cache.capacity)
            if cache.samples not in (None, len(x)):
                raise ValueError(f"GPT: tokens: got {len(x)} sequences, wanted {cache.samples}, as the cache has")
            return self._run_blocks(x, return_norms, cache)

    def _embed(self, tokens: Any, start: int, longest: int) -> Tensor:
        """Embeddings of tokens that begin at position `start`."""
        size = self.config.vocab_size
        if not isinstance(tokens, Tensor) or tokens.dtype not in _INTEGERS or tokens.dim() != 2:
            kind = ValueError if isinstance(tokens, Tensor) else TypeError
            raise kind(f"GPT: tokens: got {validate.describe(tokens)}, wanted integers [B, N] below {size}")
        end = start + tokens.shape[1]
        if end > longest:
            got = f"{tokens.shape[1]} per sequence" + (f" after the {start} of the cache" if start else "")
            raise ValueError(f"GPT: tokens: got {got}, wanted at most {longest - start}")
        try:
            embedded = self.tok_embed(tokens.long())
        except IndexError:
            low, high = (bound.item() for bound in tokens.aminmax())
            raise ValueError(f"GPT: tokens: got ids from {low} to {high}, wanted 0 to {size - 1}") from None
        return embedded + self.pos_embed[:, start:end]

    def _logits(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return F.linear(x, self.tok_embed.weight) if self.head is None else self.head(x)


def _generator(seed: int | None, generator: torch.Generator | None, device: torch.device) -> torch.Generator | None:
    if seed is None:
        return generator
    if generator is not None:
        raise ValueError("GPT.generate: generator: got both a seed and a generator, wanted one of them")
    return torch.Generator(device).manual_seed(seed)


def gpt(
    vocab_size: int = 256,
    context_length: int = 256,
    regime: str | Sequence[str] = "free",
    *,
    device=None,
    dtype: torch.dtype | None = None,
    **options,
) -> GPT:
    """A decoder language model: 192 channels, 3 heads and 6 layers, unless `options` say otherwise.

    Args:
        vocab_size: different tokens; 256 are the bytes.
        context_length: tokens that the model takes at most.
        regime: "free", "sharpen" or "smooth", or a list with one for each layer.
        device, dtype: of the parameters.
        **options: any other field of GPTConfig.
    """
    config = GPTConfig(vocab_size=vocab_size, context_length=context_length, regime=regime, **options)
    return GPT(config, device=device, dtype=dtype)
