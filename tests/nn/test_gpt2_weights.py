"""GPT.from_hf: the same logits as transformers' GPT-2, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from support import optional
from support.accuracy import FORWARD_FACTOR, assert_error_within, max_error

import overtone as ot
from overtone.models import GPT

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocab_size": 40, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3}
TOKENS = torch.arange(32).view(2, 16) * 7 % 40


def gpt2(kind="GPT2LMHeadModel", **options):
    """With weights and biases that are neither zero nor one."""
    transformers = optional.transformers()
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = getattr(transformers, kind)(transformers.GPT2Config(**{**SIZES, **ids, **options})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation_function": "gelu", "n_inner": 50, "layer_norm_epsilon": 1e-3},
        {"activation_function": "gelu_pytorch_tanh", "n_inner": 19},
        {"tie_word_embeddings": False},
    ],
)
def test_the_logits_are_the_same(options):
    theirs = gpt2(**options)
    ours = GPT.from_hf(theirs)
    assert not ours.training and ours.config.tied == theirs.config.tie_word_embeddings
    with torch.no_grad():
        truth, plain = copy.deepcopy(theirs).double()(TOKENS).logits, theirs(TOKENS).logits
        assert_error_within(ours(TOKENS), truth, max_error(plain, truth), factor=FORWARD_FACTOR, what="logits")
        prompt = TOKENS[:, :4]
        ids = {"pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(prompt)}
        wanted = theirs.generate(prompt, max_new_tokens=12, do_sample=False, **ids)
    assert torch.equal(ours.generate(prompt, 12, temperature=0), wanted)


def test_without_a_head_and_in_other_dtypes():
    theirs = gpt2("GPT2Model").double()
    ours = GPT.from_hf(theirs)
    with torch.no_grad():
        torch.testing.assert_close(ours.norm(ours.forward_features(TOKENS)), theirs(TOKENS).last_hidden_state)
    assert GPT.from_hf(gpt2().bfloat16().train()).training
    assert GPT.from_hf(gpt2().bfloat16()).pos_embed.dtype == torch.bfloat16


def test_weights_are_copies():
    theirs = gpt2()
    ours, before = GPT.from_hf(theirs), copy.deepcopy(theirs.state_dict())
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in theirs.state_dict().items())


def test_what_differs_is_refused():
    for options, message in [
        ({"activation_function": "relu"}, "activation_function: got 'relu', wanted 'gelu' or"),
        ({"scale_attn_by_inverse_layer_idx": True}, "model: got one with scale_attn_by_inverse_layer_idx=True"),
        ({"scale_attn_weights": False}, "model: got one with scale_attn_weights=False, wanted True"),
    ]:
        with pytest.raises(ValueError, match=f"GPT.from_hf: {message}"):
            GPT.from_hf(gpt2(**options))
    model = gpt2()
    torch.nn.utils.parametrizations.weight_norm(model.transformer.h[1].mlp.c_fc)
    with pytest.raises(ValueError, match=r"h.1.mlp.c_fc.weight: got none, wanted one: merge or remove"):
        GPT.from_hf(model)
    converted = gpt2()
    ot.reparameterize(converted, regime="sharpen")
    with pytest.raises(ValueError, match=r"h.0.attn.c_attn.bias: got none, wanted one"):
        GPT.from_hf(converted)
    model = gpt2()
    model.transformer.h[0].register_buffer("extra", torch.zeros(2))
    with pytest.raises(ValueError, match=r"h.0.extra: got one, wanted none"):
        GPT.from_hf(model)
    with pytest.raises(TypeError, match="GPT.from_hf: model: got Linear, wanted transformers' GPT2Model or"):
        GPT.from_hf(torch.nn.Linear(2, 2))
