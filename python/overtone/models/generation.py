"""Writing with a decoder: one token after the other, each drawn from what the model says of the last."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from overtone import _validate as validate

__all__ = ["generate"]

_NAME = "GPT.generate"


@torch.no_grad()
def generate(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
) -> Tensor:
    """What `GPT.generate` does."""
    max_new_tokens = validate.count(_NAME, "max_new_tokens", max_new_tokens)
    top_k = None if top_k is None else validate.count(_NAME, "top_k", top_k)
    number = validate.optional_number(_NAME, "temperature", temperature)
    if number is None or not 0 <= number < math.inf:
        raise ValueError(f"{_NAME}: temperature: got {temperature!r}, wanted 0 or more")
    total, longest = _prompt_length(prompt) + max_new_tokens, model.config.context_length
    if total > longest:
        got = f"{prompt.shape[1]} tokens of the prompt and {max_new_tokens} new ones"
        raise ValueError(f"{_NAME}: max_new_tokens: got {got}, wanted at most context_length = {longest} together")
    tokens = [prompt.long()]
    with _evaluating(model):
        cache = model.new_cache(total)
        for _ in range(max_new_tokens):
            x, _ = model._features(tokens[-1], False, cache)
            logits = model._logits(x[:, -1])
            tokens.append(_draw(logits, number, top_k, generator))
    return torch.cat(tokens, 1)


def _prompt_length(prompt: Any) -> int:
    if not isinstance(prompt, Tensor) or prompt.dim() != 2 or prompt.shape[1] == 0:
        kind = ValueError if isinstance(prompt, Tensor) else TypeError
        raise kind(f"{_NAME}: prompt: got {validate.describe(prompt)}, wanted integers [B, N] with N ≥ 1")
    return prompt.shape[1]


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token for each row of logits [B, vocab_size]: [B, 1]."""
    if not bool(logits.isfinite().all()):
        raise FloatingPointError(f"{_NAME}: the model's logits are not finite: its weights may have diverged")
    if temperature == 0 or len(logits) == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    # The largest is taken off first: a tiny temperature would make infinities.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        logits, ids = logits.topk(top_k)
        return ids.gather(-1, torch.multinomial(logits.softmax(-1), 1, generator=generator))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
