"""Hugging Face's GPT-2 as a GPT's configuration and weights. transformers is not imported: the model tells all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overtone import _validate as validate
from overtone.models.config import GPTConfig

__all__ = ["read_gpt2"]

_NAME = "GPT.from_hf"
_KINDS = ("GPT2Model", "GPT2LMHeadModel")
# transformers' names of activation functions, and ours.
_GELUS = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
# What a GPT does not have, and the value that leaves it out.
_WITHOUT = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
# Parts of a block by transformers' names; its Conv1D layers keep weights [in, out].
_PARTS = {
    "ln_1": "norm1", "attn.c_attn": "attn.qkv", "attn.c_proj": "attn.proj", "ln_2": "norm2",
    "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
}  # fmt: skip


def read_gpt2(model: Any) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Configuration and tensors (copies) of a GPT that computes what this GPT2Model or GPT2LMHeadModel does."""
    if not isinstance(model, nn.Module) or type(model).__name__ not in _KINDS or not hasattr(model, "config"):
        wanted = f"transformers' {' or '.join(_KINDS)}"
        raise TypeError(f"{_NAME}: model: got {type(model).__name__}, wanted {wanted}")
    state = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()}
    config = _config(model.config, has_head="lm_head.weight" in state)
    return config, _renamed(config, state)


def _config(config: Any, has_head: bool) -> GPTConfig:
    for name, wanted in _WITHOUT.items():
        if getattr(config, name) != wanted:
            raise ValueError(f"{_NAME}: model: got one with {name}={getattr(config, name)}, wanted {wanted}")
    gelu = validate.one_of(_NAME, "activation_function", config.activation_function, tuple(_GELUS))
    hidden = 4 * config.n_embd if config.n_inner is None else config.n_inner
    return GPTConfig(
        vocab_size=config.vocab_size,
        context_length=config.n_positions,
        dim=config.n_embd,
        depth=config.n_layer,
        num_heads=config.n_head,
        mlp_ratio=_ratio(hidden, config.n_embd),
        norm_eps=config.layer_norm_epsilon,
        gelu=_GELUS[gelu],
        tied=config.tie_word_embeddings or not has_head,
    )


def _ratio(hidden: int, dim: int) -> float:
    """The mlp_ratio that makes int(dim · ratio) exactly `hidden`: the quotient itself may be rounded down."""
    ratio = hidden / dim
    return ratio if int(dim * ratio) == hidden else (hidden + 0.5) / dim


def _renamed(config: GPTConfig, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under our names. Any that is missing or left over is refused: it would be lost."""
    names = {"wte.weight": "tok_embed.weight", "wpe.weight": "pos_embed"}
    names |= {f"ln_f.{part}": f"norm.{part}" for part in ("weight", "bias")}
    if not config.tied:
        names["lm_head.weight"] = "head.weight"
    for layer in range(config.depth):
        for theirs, ours in _PARTS.items():
            for part in ("weight", "bias"):
                names[f"h.{layer}.{theirs}.{part}"] = f"blocks.{layer}.{ours}.{part}"
    unknown = set(given) - set(names) - ({"lm_head.weight"} if config.tied else set())
    odd = sorted(set(names) - set(given)) or sorted(unknown)
    if odd:
        got, wanted = ("none", "one") if odd[0] in names else ("one", "none")
        hint = "merge or remove what was put into the model"
        raise ValueError(f"{_NAME}: model: {odd[0]}: got {got}, wanted {wanted}: {hint}")
    result = {}
    for theirs, ours in names.items():
        value = given[theirs].detach()
        is_conv1d = theirs.endswith(".weight") and ".c_" in theirs
        value = value.mT if is_conv1d else value[None] if ours == "pos_embed" else value
        result[ours] = value.clone(memory_format=torch.contiguous_format)
    return result
