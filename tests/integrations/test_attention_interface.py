"""attn_implementation="overtone": the numbers of transformers' own, norms through a callback, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from support import optional
from support.accuracy import FORWARD_FACTOR, assert_error_within, max_error

import overtone as ot
from overtone.integrations import register_hf_attention

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 32}
WORDS = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "vit": {**SIZES, "image_size": 32, "patch_size": 16},
    "bert": {**SIZES, **WORDS},
    "gpt2": {**WORDS, "n_embd": 24, "n_layer": 2, "n_head": 6},
    "llama": {**SIZES, **WORDS, "num_key_value_heads": 2},
    "mistral": {**SIZES, **WORDS, "num_key_value_heads": 1, "sliding_window": 4},
}


def build(kind, implementation, **options):
    transformers = optional.transformers()
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **options})
    auto = transformers.AutoModelForCausalLM if kind in ("gpt2", "llama", "mistral") else transformers.AutoModel
    torch.manual_seed(0)
    return auto.from_config(config, attn_implementation=implementation).eval()


def inputs(kind, padded):
    generator = torch.Generator().manual_seed(0)
    if kind == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    words = {"input_ids": torch.randint(3, 50, (2, 9), generator=generator)}
    if padded:
        words["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
        words["attention_mask"][1, :3] = 0  # on the left, as for writing
    return words


@pytest.fixture
def norms():
    optional.transformers()
    found = []
    register_hf_attention(lambda module, norms: found.append((module, norms)))
    return found


@pytest.mark.parametrize(
    ("kind", "padded"), [(kind, padded) for kind in CONFIGS for padded in (False, True)[: 1 + (kind != "vit")]]
)
def test_the_numbers_are_transformers_own(kind, padded, norms):
    theirs, ours = build(kind, "sdpa"), build(kind, "overtone")
    given = inputs(kind, padded)
    valid = given.get("attention_mask", torch.ones(2, 1)).bool()
    with torch.no_grad():
        truth, plain, found = copy.deepcopy(theirs).double(), theirs(**given)[0], ours(**given)[0]
        truth = truth(**{name: x.double() if x.is_floating_point() else x for name, x in given.items()})[0]
    valid = valid.expand(truth.shape[:2])  # what padding is given differs, and is nobody's
    assert_error_within(
        found[valid], truth[valid], max_error(plain[valid], truth[valid]), factor=FORWARD_FACTOR, what=kind
    )
    assert len(norms) == 2 and all(each.low.shape == (2,) for _, each in norms)


def test_norms_are_those_of_the_heads(norms):
    model = build("llama", "overtone")
    seen = []
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(**inputs("llama", False))
    for (module, found), layer, heads in zip(norms, model.model.layers, seen, strict=True):
        assert module is layer.self_attn
        torch.testing.assert_close(found, ot.reference.frequency_norms(heads))
    sum(found.ratio.sum() for _, found in norms).backward()
    assert model.model.embed_tokens.weight.grad.abs().max() > 0


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_writing_with_a_cache(kind, norms):
    theirs, ours = build(kind, "sdpa").double(), build(kind, "overtone").double()
    given, options = inputs(kind, True), {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ours.generate(**given, **options), theirs.generate(**given, **options))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_several_tokens_after_those_of_a_cache(kind, norms):
    model, tokens = build(kind, "overtone").double(), inputs(kind, False)["input_ids"]
    first = model(tokens[:, :5], use_cache=True)
    second = model(tokens[:, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat((first.logits, second.logits), 1), model(tokens).logits)


def test_it_compiles_and_trains():
    optional.transformers()
    register_hf_attention()
    torch._dynamo.reset()
    model = build("llama", "overtone").train()
    tokens = inputs("llama", False)["input_ids"]
    logits = torch.compile(lambda x: model(x, use_cache=False).logits, fullgraph=True, backend="aot_eager")(tokens)
    torch.testing.assert_close(logits, model(tokens).logits)
    logits.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_it_does_not_have_is_refused(norms):
    with pytest.raises(ValueError, match=r"GPT2Attention: dropout: got 0.1, wanted 0: set the configuration's"):
        build("gpt2", "overtone").train()(**inputs("gpt2", False))
    module = build("llama", "overtone").model.layers[0].self_attn
    attend = optional.transformers().AttentionInterface()["overtone"]
    x = torch.zeros(1, 6, 3, 4)
    for name in ("softcap", "s_aux", "position_bias"):
        with pytest.raises(ValueError, match=rf"LlamaAttention: {name}: got float 0.5, wanted None: load with"):
            attend(module, x, x, x, None, **{name: 0.5})
