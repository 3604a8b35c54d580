"""What the observer sees of models: our own, timm's, Hugging Face's and torch's, as they compute it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from support import optional
from support.attention_models import (
    DIM,
    HEADS,
    TOKENS,
    Attention,
    Model,
    Protocol,
    check_projection,
    check_site,
    check_values,
    record,
    tokens,
)
from torch import nn

import overtone as ot
from overtone.analysis import METRICS, READERS, analyze

READERS_BY_NAME = {reader.name: reader for reader in READERS}


@pytest.mark.parametrize("fused", [True, False])
def test_own_model(fused):
    sites, recorders, seen = check_site(Model(fused=fused), tokens())
    assert [site.name for site in sites] == ["blocks.0.attn", "blocks.1.attn"]
    check_projection(sites[0], recorders[0], seen["y"])
    torch.testing.assert_close(recorders[0].inputs[0], tokens())
    torch.testing.assert_close(recorders[1].inputs[0], recorders[0].outputs[0])


def test_fused_and_plain_attention_are_read_alike():
    fused, plain = Model(fused=True), Model(fused=False)
    plain.load_state_dict(fused.state_dict())
    for one, other in zip(analyze(fused, tokens()).layers, analyze(plain, tokens()).layers, strict=True):
        for metric in METRICS:
            torch.testing.assert_close(one.heads[metric], other.heads[metric])
        torch.testing.assert_close(one.dominance.margin, other.dominance.margin)


@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoder_layer(batch_first):
    layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = tokens() if batch_first else tokens().transpose(0, 1)
    sites, recorders = record(model, x)
    assert [site.name for site in sites] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert recorders[0].attention[0].shape == (5, HEADS, TOKENS, TOKENS)
    check_values(sites[0], recorders[0], tokens())
    plain = model.eval()(x)
    torch.testing.assert_close(recorders[1].outputs[0], plain if batch_first else plain.transpose(0, 1))


def test_timm_vit():
    timm = optional.timm()
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    sites, recorders, seen = check_site(model, torch.randn(2, 3, 32, 32))
    assert [site.name for site in sites] == ["blocks.0.attn", "blocks.1.attn"]
    check_projection(sites[0], recorders[0], seen["y"])


@pytest.mark.parametrize("kind", ["vit", "deit", "bert", "gpt2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_face(kind, implementation):
    transformers = optional.transformers()
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 32}
    if kind in ("vit", "deit"):
        config = transformers.AutoConfig.for_model(kind, image_size=32, patch_size=16, **sizes)
        inputs = torch.randn(2, 3, 32, 32)
    else:
        names = {"n_embd": 24, "n_layer": 2, "n_head": 3} if kind == "gpt2" else sizes
        config = transformers.AutoConfig.for_model(kind, vocab_size=50, **names)
        inputs = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
    sites, recorders, _ = check_site(model, inputs)
    assert len(sites) == 2
    is_causal = not recorders[0].attention[0].triu(1).any()
    assert is_causal == (kind == "gpt2")
    assert analyze(model, inputs).layers[0].is_causal == is_causal


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        *itertools.product(["llama", "mistral", "qwen3", "gemma", "phi", "phi3"], [1, 2, 6]),
        *itertools.product(["gpt_neox", "falcon"], [1]),
    ],
)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_decoders_with_grouped_queries_and_rotary_positions(kind, shared, implementation):
    """Heads that share values (all of them in multi-query attention), of another width than dim / num_heads."""
    transformers = optional.transformers()
    has_width = kind in ("llama", "mistral", "qwen3", "gemma")
    options = {"falcon": {"multi_query": False}}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=6 // shared, pad_token_id=0, **({"head_dim": 8} if has_width else options.get(kind, {})),
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config, attn_implementation=implementation)
    inputs = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    sites, recorders, seen = check_site(model, inputs)
    assert len(sites) == 2 and sites[0].weights().num_heads == 6
    check_projection(sites[0], recorders[0], seen["y"])
    result = analyze(model, inputs)
    assert all(layer.is_causal for layer in result.layers) and not result.skipped
    # Causal attention's eigenvalues are its diagonal, and a head's are those of W_V W_proj that are not zero.
    diagonal = recorders[0].attention[0].diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(result.layers[0].attention_eigenvalues.real, diagonal)
    assert result.layers[0].weight_eigenvalues.shape == (6, 8 if has_width else 4)


def test_grouped_queries_are_not_converted():
    transformers = optional.transformers()
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=50, hidden_size=24, num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config)
    with pytest.raises(ValueError, match=r"self_attn is a .*LlamaAttention, whose formula is unknown, wanted a timm"):
        ot.reparameterize(model, regime="sharpen")


@pytest.mark.parametrize("method", ot.models.METHODS)
def test_own_language_model(method):
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "context_length": 9, "dim": DIM, "num_heads": HEADS, "depth": 2}
    model = ot.models.gpt(regime=["free", "smooth"], method=method, **sizes).eval()
    inputs = torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(0))
    result = analyze(model, inputs)
    assert [layer.is_causal for layer in result.layers] == [True, True] and not result.skipped
    first = model.blocks[0]
    stream = model.tok_embed(inputs) + model.pos_embed
    attention = first.attn.attention_weights(first.attention_input(stream), is_causal=True)
    assert not attention.triu(1).any()
    torch.testing.assert_close(result.layers[0].attention_eigenvalues.real, attention.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(result.layers[0].before["ratio"], ot.frequency_norms(stream).ratio)


def test_a_module_around_a_core_is_read():
    """As ot.reparameterize leaves it: the outer module calls the core's parts, not its forward."""

    class Outer(nn.Module):
        is_causal = True

        def __init__(self):
            super().__init__()
            self.core = Protocol(-1.0)

        def forward(self, hidden_states):
            q, k = self.core.queries_and_keys(hidden_states)
            v = self.core.split(hidden_states @ self.core.basis)
            basis = self.core.basis.mT.contiguous()
            return ot.spectral_attention(q, k, v, self.core.eigenvalues, basis, is_causal=True), None

    model = nn.ModuleList([Outer()])
    model.forward = lambda x: model[0](hidden_states=x)[0]
    result = analyze(model, tokens())
    assert result.layers[0].name == "0" and result.layers[0].is_causal
    assert result.verdicts()["other"] == 5 * HEADS


def test_spectral_attention_module():
    model = nn.Sequential(*(ot.nn.SpectralAttention(DIM, HEADS, regime) for regime in ("sharpen", "free")))
    sites, recorders = record(model, tokens())
    assert [site.reader.name for site in sites] == ["overtone attention"] * 2
    check_values(sites[0], recorders[0], tokens())


def torch_attention_by_hand(module, x, mask=None):
    """A [B, H, N, N] and the heads A x W_V [B, H, N, k] of torch.nn.MultiheadAttention, for tokens [B, N, C]."""
    query, key, value = (
        (x.double() @ weight.double().mT + shift.double()).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
        for weight, shift in zip(
            module.in_proj_weight.chunk(3), (*module.in_proj_bias.chunk(3)[:2], torch.zeros(DIM)), strict=True
        )
    )
    logits = query @ key.mT / math.sqrt(DIM / module.num_heads)
    attention = (logits if mask is None else logits.masked_fill(mask, -math.inf)).softmax(-1)
    return attention, attention @ value


class Turned(nn.Module):
    """Samples first outside, sequences first inside, as some CLIPs are written."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Called(nn.Module):
    """torch.nn.MultiheadAttention on one sequence, or on two."""

    def __init__(self, batch_first, need_weights=False, average=True):
        super().__init__()
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=batch_first)
        torch.nn.init.normal_(self.attend.in_proj_bias, std=0.5)
        self.options = {"need_weights": need_weights, "average_attn_weights": average}
        self.weights = None

    def forward(self, x, memory=None, attn_mask=None):
        keys = x if memory is None else memory
        y, self.weights = self.attend(x, keys, keys, attn_mask=attn_mask, **self.options)
        return x + y


LENGTHS = [(5, 7), (6, 6), (1, 7), (5, 1)]  # samples, tokens


class TestModulesOfTorch:
    """Sequences first or samples first, with and without a batch dimension: every sample is whole, and none is cut."""

    @pytest.mark.parametrize("samples, count", [*LENGTHS, (None, 7)])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize(
        "masked, need_weights, average", [(True, True, True), (False, True, False), (True, False, True)]
    )
    def test_attention_is_that_of_the_formula(self, samples, count, batch_first, masked, need_weights, average):
        model = Called(batch_first, need_weights, average).eval()
        whole = torch.randn(samples or 1, count, DIM)
        mask = torch.ones(count, count).triu(1).bool() if masked else None
        attention, heads = torch_attention_by_hand(model.attend, whole, mask)
        x = whole[0] if samples is None else whole if batch_first else whole.transpose(0, 1)
        weights = ot.analysis.head_weights(*READERS_BY_NAME["torch.nn.MultiheadAttention"].weights(model.attend))
        truth = ot.analysis.dominance(attention.float(), weights.detach(), is_causal=masked)
        inputs = {"x": x} if mask is None else {"x": x, "attn_mask": mask}
        result = analyze(model, inputs, batch_size=2)
        (layer,) = result.layers
        assert (result.samples, layer.tokens, layer.is_causal) == (samples or 1, count, masked or count == 1)
        torch.testing.assert_close(layer.heads["diversity"].double(), ot.token_diversity(heads), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.dominance.margin, truth.margin, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(layer.before["ratio"], ot.frequency_norms(whole).ratio)
        asked = model.weights  # of the last batch: the model gets what it asked for
        with torch.no_grad():
            model(**inputs)
        assert (asked is None) == (not need_weights)
        if need_weights:
            torch.testing.assert_close(asked, model.weights if samples is None else model.weights[-len(asked) :])

    @pytest.mark.parametrize("samples, count", LENGTHS[:2])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("form", ["a tensor", "batches", "inside a model that turns it"])
    def test_encoders_are_cut_along_the_samples(self, samples, count, batch_first, form):
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=batch_first)
        model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        whole = torch.randn(samples, count, DIM)
        x = whole if batch_first else whole.transpose(0, 1)
        with torch.no_grad():
            output = model(x) if batch_first else model(x).transpose(0, 1)
        if form == "batches":
            x = x.split(2, 0 if batch_first else 1)
        elif form.startswith("inside") and not batch_first:
            x, model = whole, Turned(model)
        result = analyze(model, x, batch_size=2)
        assert (result.samples, [layer.tokens for layer in result.layers]) == (samples, [count] * 2)
        torch.testing.assert_close(result.curve("ratio")[0], ot.frequency_norms(whole).ratio)
        torch.testing.assert_close(result.curve("ratio")[2], ot.frequency_norms(output).ratio, atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("samples, count, keys", [(5, 7, 7), (5, 7, 3), (6, 6, 6)])
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_cross_attention_is_known_by_its_keys(self, samples, count, keys, batch_first):
        """As many keys as queries do not make it self-attention; one memory for both arguments does."""
        layer = nn.TransformerDecoderLayer(DIM, HEADS, 16, batch_first=batch_first)
        decoder = nn.TransformerDecoder(layer, 2)
        x, memory = torch.randn(samples, count, DIM), torch.randn(samples, keys, DIM)
        if not batch_first:
            x, memory = x.transpose(0, 1), memory.transpose(0, 1)
        inputs = {"tgt": x, "memory": memory}
        result = analyze(decoder, inputs, batch_size=2)
        assert [layer.name for layer in result.layers] == [f"layers.{i}.self_attn" for i in range(2)]
        assert set(result.skipped) == {f"layers.{i}.multihead_attn" for i in range(2)}
        assert (result.samples, result.layers[0].tokens) == (samples, count)
        reason = "keys are not computed from its tokens" if keys == count else f"of shape [{min(2, samples)}"
        assert all(reason in why for why in result.skipped.values())
        bare = Called(batch_first)
        with pytest.raises(ValueError, match="no attention of Called could be read"):
            analyze(bare, {"x": x, "memory": memory})
        assert analyze(bare, {"x": x, "memory": x}).samples == samples

    def test_positions_added_to_queries_and_keys_are_self_attention(self):
        """As in DETR: query and key are one tensor, the value another; the heads are A times the values."""

        class Positions(Called):
            def forward(self, x):
                moved = x + torch.linspace(-1, 1, DIM)
                return x + self.attend(moved, moved, x, need_weights=False)[0]

        model, x = Positions(batch_first=False), torch.randn(5, 7, DIM)
        (layer,) = analyze(model, x.transpose(0, 1)).layers
        attention, _ = torch_attention_by_hand(model.attend, x + torch.linspace(-1, 1, DIM))
        w_v = READERS_BY_NAME["torch.nn.MultiheadAttention"].weights(model.attend).w_v.double()
        heads = attention @ (x.double() @ w_v).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        torch.testing.assert_close(layer.heads["diversity"].double(), ot.token_diversity(heads), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("fused", [True, False])
    @pytest.mark.parametrize("crosses", [True, False])
    def test_keys_of_modules_of_ones_own(self, fused, crosses):
        """Followed through every step from the module's arguments, with biases and scales on the way."""

        class Context(Attention):
            def forward(self, x, context, scale):
                q = self.qkv(x)[..., :DIM].unflatten(-1, (HEADS, -1)).transpose(1, 2) * scale
                k, v = self.qkv(context)[..., DIM:].unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
                k = torch.cat((k[:, :, :1], k[:, :, 1:] * scale), -2)
                heads = F.scaled_dot_product_attention(q, k, v) if fused else ((q @ k.mT) / 2 + scale).softmax(-1) @ v
                return self.proj(heads.transpose(1, 2).flatten(2))

        class Around(nn.Module):
            def __init__(self):
                super().__init__()
                self.attn = Context(fused)

            def forward(self, x, context):
                return x + self.attn(x, x if not crosses else context, torch.ones(()))

        inputs = {"x": tokens(), "context": tokens().flip(0)}
        if crosses:
            with pytest.raises(ValueError, match="keys are not computed from its tokens"):
                analyze(Around(), inputs)
        else:
            assert analyze(Around(), inputs).samples == 5
