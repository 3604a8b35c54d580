"""analyze: it reads what models compute, facts of the papers come out, and what it cannot read it names."""

from __future__ import annotations

import math
import re

import pytest
import torch
import torch.nn.functional as F
from support import optional
from torch import nn

import overtone as ot
from overtone import reference
from overtone.analysis import METRICS, READERS, Reader, Weights, analyze
from overtone.analysis.observe import find_sites, observed
from overtone.analysis.update import Update, applied_dominance
from overtone.analysis.words import percent

DIM, HEADS, TOKENS = 12, 3, 7
READERS_BY_NAME = {reader.name: reader for reader in READERS}


class Attention(nn.Module):
    """As timm's, by SDPA, or by a softmax."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.fused = HEADS, fused
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v)
        else:
            heads = (q @ k.mT / math.sqrt(DIM / HEADS)).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(DIM), Attention(fused), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, depth: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(fused) for _ in range(depth)])
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(self.dropout(x))
        return x.mean(1)


def tokens(count=5):
    return torch.randn(count, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


class Recorder:
    """A Listener that keeps everything."""

    def __init__(self) -> None:
        self.attention, self.heads, self.inputs, self.outputs = [], [], [], []

    def on_input(self, x):
        self.inputs.append(x)

    def on_attention(self, attention, heads):
        self.attention.append(attention)
        self.heads.append(heads)

    def on_output(self, x):
        self.outputs.append(x)


@torch.no_grad()
def record(model, *inputs, **kwargs):
    sites, unread = find_sites(model)
    recorders = [Recorder() for _ in sites]
    with observed(sites, recorders, unread):
        model.eval()(*inputs, **kwargs)
    assert not unread
    return sites, recorders


def check_projection(site, recorder, output):
    """The heads, put through W_proj, are what the module gave; A and the values it read make the heads."""
    w_v, w_proj, _ = site.weights()
    heads = recorder.heads[0].transpose(1, 2).flatten(2)
    difference = output - heads.to(output.dtype) @ w_proj
    bias = difference.flatten(0, 1)[0]  # the same for all tokens: the projection's bias
    torch.testing.assert_close(difference, bias.expand_as(difference), atol=1e-5, rtol=1e-4)
    assert torch.allclose(recorder.attention[0].sum(-1), torch.ones(()), atol=1e-5)
    assert w_v.shape == w_proj.mT.shape


def check_values(site, recorder, x):
    """heads = A (x W_V + bias): without the bias they differ by a constant per channel."""
    values = (x @ site.weights().w_v).unflatten(-1, (site.weights().num_heads, -1)).transpose(1, 2)
    difference = recorder.heads[0] - recorder.attention[0].to(x.dtype) @ values
    torch.testing.assert_close(difference, difference[:1, :, :1].expand_as(difference), atol=1e-5, rtol=1e-4)


def check_site(model, *inputs, **kwargs):
    """The first attention module of a model is read as it computes."""
    sites, _ = find_sites(model)
    seen = {}

    def keep(module, args, kwargs, output):
        seen["x"] = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        seen["y"] = output[0] if isinstance(output, tuple) else output

    handle = sites[0].module.register_forward_hook(keep, with_kwargs=True)
    sites, recorders = record(model, *inputs, **kwargs)
    handle.remove()
    check_values(sites[0], recorders[0], seen["x"])
    return sites, recorders, seen


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


class Protocol(nn.Module):
    """What ot.nn.SpectralAttention offers: attention_weights, value_projection, num_heads."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.w = nn.Parameter(torch.randn(2, DIM, DIM, generator=torch.Generator().manual_seed(1)) / 4)
        basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(2))).Q
        self.register_buffer("basis", basis)
        self.register_buffer("eigenvalues", sign * torch.linspace(0.2, 1, DIM))

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def queries_and_keys(self, x):
        return [self.split(F.layer_norm(x, (DIM,)) @ w) for w in self.w]

    def attention_weights(self, x, *, attn_mask=None, is_causal=False):
        q, k = self.queries_and_keys(x)
        return reference.attention_weights(q, k, attn_mask=attn_mask, is_causal=is_causal)

    def value_projection(self):
        return self.basis, self.eigenvalues[:, None] * self.basis.mT

    def forward(self, x):
        (q, k), v = self.queries_and_keys(x), self.split(x @ self.basis)
        return ot.spectral_attention(q, k, v, self.eigenvalues, self.basis.mT.contiguous(), residual=x)


@pytest.mark.parametrize("sign, name", [(1.0, "perron"), (-1.0, "other")])
def test_the_sign_of_the_spectrum_decides(sign, name):
    """λ ∈ (0, 1] smooths, [−1, 0) sharpens: every verdict, and the curves follow."""
    model = nn.Sequential(*(Protocol(sign) for _ in range(6)))
    result = analyze(model, tokens())
    assert result.verdicts()[name] == 6 * 5 * HEADS
    ratio = result.curve("ratio").mean(1)
    assert ratio[-1] < ratio[0] if sign > 0 else ratio[-1] > ratio[0]
    eigenvalues = result.layers[0].whole_eigenvalues.real.sort().values
    torch.testing.assert_close(
        eigenvalues, (sign * torch.linspace(0.2, 1, DIM)).sort().values.double(), atol=1e-5, rtol=0
    )


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


def test_random_vit_base_smooths_always():
    """DBK Table 1: 100 / 0 for a ViT-B/16 at random initialisation; three of its layers, images of 17 tokens.

    All layers at 197 tokens are a case of benchmarks/dominance.py.
    """
    timm = optional.timm()
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", img_size=64, depth=3)
    result = analyze(model, torch.randn(2, 3, 64, 64))
    assert result.verdicts() == {"perron": 72, "other": 0, "tie": 0, "close": 0, "invalid": 0}
    assert (torch.stack([layer.dominance.margin for layer in result.layers]) > 0.05).all()


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
        assert set(result.unread) == {f"layers.{i}.multihead_attn" for i in range(2)}
        assert (result.samples, result.layers[0].tokens) == (samples, count)
        reason = "keys are not computed from its tokens" if keys == count else f"of shape [{min(2, samples)}"
        assert all(reason in why for why in result.unread.values())
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

    def test_padding_is_refused(self):
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True)
        hidden = torch.zeros(5, 7, dtype=torch.bool)
        inputs = {"src": tokens(), "src_key_padding_mask": hidden}
        assert analyze(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), inputs, batch_size=2).samples == 5
        hidden[3, 6] = True
        with pytest.raises(ValueError, match="inputs: src_key_padding_mask hides tokens"):
            analyze(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), inputs)


def numbers_of(sentence):
    return [float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]\d+)?(?![\w])", sentence)]


def check_words(analysis):
    """Words and numbers of the summary agree: the direction with the curve, the shares with the verdicts."""
    subject, told, forecast, *_ = str(analysis).splitlines()
    assert subject == analysis.subject and told.startswith("Measured:") and forecast.startswith("Predicted by")
    assert not re.search(r"\b(yes|no)\b[,:]", (told + forecast).lower())
    first, last = (analysis.curve("ratio").double().mean(1)[place].item() for place in (0, -1))
    if not (math.isfinite(first) and math.isfinite(last)):
        assert "not finite" in told
        return
    assert numbers_of(told)[:2] == [float(f"{first:.3g}"), float(f"{last:.3g}")]
    words = {"falls": last < first, "more alike": last < first, "rises": last > first, "less alike": last > first}
    assert all(holds for word, holds in words.items() if word in told)
    assert ("hardly changes" in told) == (not any(word in told for word in words))
    if "by a factor" in told:
        assert (
            float(told.partition("by a factor of ")[2].split()[0])
            == float(f"{max(last / first, first / last):.3g}")
            > 1
        )
    counts, cases = analysis.verdicts(), sum(analysis.verdicts().values())
    shares = [float(text) for text in re.findall(r"([\d.]+) %", forecast)]
    undecided = cases - counts["perron"] - counts["other"]
    wanted = [counts["perron"], counts["other"], *([undecided] if undecided else [])]
    assert shares == pytest.approx([100 * number / cases for number in wanted], abs=0.1)
    did_otherwise = (counts["perron"] > cases / 2 and last > first) or (counts["other"] > cases / 2 and last < first)
    assert ("did otherwise" in forecast) == did_otherwise


class TestWords:
    @pytest.mark.parametrize("method", ot.models.METHODS)
    @pytest.mark.parametrize("regime", ["free", "sharpen", "smooth"])
    @pytest.mark.parametrize("norm", ["pre", "post"])
    def test_the_headline_is_what_was_measured(self, method, regime, norm):
        torch.manual_seed(0)
        sizes = {"image_size": 16, "patch_size": 8, "num_classes": 4, "dim": DIM, "num_heads": HEADS, "depth": 2}
        config = ot.models.ViTConfig(**sizes, regime=regime, norm=norm, method=method)
        model = ot.models.VisionTransformer(config)
        result = analyze(model, torch.randn(3, 3, 16, 16))
        check_words(result)
        forecast = str(result).splitlines()[2]
        acting = {"contranorm": "ContraNorm", "neutreno": "NeuTRENO"}
        judged = {"de_escalation": "de-escalation (τ = 1)", "centered": "centred attention"}
        for name, word in (acting | judged).items():
            assert (word in forecast) == (name == method)
            assert (word in forecast.partition("Not in")[2]) == (name == method and name in acting)
        assert "LayerNorm" in forecast and "the MLP" in forecast
        if method == "de_escalation":
            assert result.verdicts()["perron"] == 0  # equal tokens are taken away after every block

    def test_models_of_others(self):
        for model, inputs in (
            (Model(), tokens()),
            (nn.Sequential(*(Protocol(1.0) for _ in range(4))), tokens()),
            (nn.Sequential(*(Protocol(-1.0) for _ in range(4))), tokens()),
            (nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, 16), 2), tokens().transpose(0, 1)),
            (Model(), tokens()[:1].expand(5, -1, -1)[:, :1].expand(-1, TOKENS, -1)),  # equal tokens from the start
            (Model(), tokens() - tokens().mean(1, keepdim=True)),  # no mean
            (Model(), torch.zeros(5, TOKENS, DIM)),
        ):
            check_words(analyze(model, inputs))

    def test_a_share_is_not_rounded_to_all_or_nothing(self):
        assert [percent(*of) for of in ((0, 3), (3, 3), (1, 3), (1, 10**6), (10**6 - 1, 10**6))] == [
            "0 %", "100 %", "33.3 %", "0.0001 %", "over 99.9 %",
        ]  # fmt: skip


class TestOperator:
    """The verdict is on what the layer applies: against the eigenvectors of the whole map, X to the block's X."""

    @pytest.mark.parametrize("tau, is_centred", [(1.0, False), (0.5, False), (0.1, False), (1.7, False), (0.0, True)])
    def test_verdicts_are_those_of_the_map(self, tau, is_centred):
        generator = torch.Generator().manual_seed(0)
        count, dim, decided = 5, 3, 0
        mean = torch.full((count, count), 1 / count, dtype=torch.float64)
        for _ in range(60):
            attention = torch.randn(count, count, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
            weight = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
            spectrum = ot.analysis.eigenvalues(weight)
            case = applied_dominance(attention, spectrum, Update(1 - tau, is_centred))
            step = torch.kron(attention - mean * is_centred, weight.mT.contiguous()) + torch.eye(count * dim)
            step = torch.kron(torch.eye(count).double() - tau * mean, torch.eye(dim)) @ step
            values, vectors = torch.linalg.eig(step)
            order = values.abs().argsort(descending=True)
            winner = vectors[:, order[0]].unflatten(0, (count, dim))
            equal = (winner - winner.mean(0)).norm() < 1e-6 * winner.norm()
            if not case.undecided:
                decided += 1
                assert bool(equal) == bool(case.perron)
        assert decided > 50

    def test_without_a_method_nothing_is_changed(self):
        spectrum = ot.analysis.eigenvalues(torch.randn(3, 4, 4))
        attention = torch.randn(2, 3, 5, 5).softmax(-1)
        for one, other in zip(
            applied_dominance(attention, spectrum, Update()), ot.analysis.dominance(attention, spectrum), strict=True
        ):
            assert torch.equal(one, other)

    def test_a_mask_turns_the_mean_into_another(self):
        """Under a causal mask Π is a running mean, which the eigenvalues do not know: it is named as left out."""
        attend = ot.nn.SpectralAttention(DIM, HEADS, centered=True)
        model = nn.Sequential(attend)
        model.forward = lambda x: x + attend(x, is_causal=True)
        forecast = str(analyze(model, tokens())).splitlines()[2]
        assert "Not in the eigenvalues: centred attention" in forecast and "of attention and weights" in forecast


class TestMeasurements:
    def test_metrics_are_those_of_the_tokens(self):
        model = Model()
        _, recorders = record(model, tokens())
        result = analyze(model, tokens())
        for layer, recorder in zip(result.layers, recorders, strict=True):
            x, y = recorder.inputs[0], recorder.outputs[0]
            torch.testing.assert_close(layer.after["ratio"], ot.frequency_norms(y).ratio)
            torch.testing.assert_close(layer.after["cosine"], ot.cosine_similarity(y))
            torch.testing.assert_close(layer.after["effective_rank"], ot.effective_rank(y))
            torch.testing.assert_close(layer.after["stable_rank"], ot.stable_rank(y))
            torch.testing.assert_close(layer.after["similarity"], ot.token_similarity(y))
            torch.testing.assert_close(layer.escalation, ot.escalation_rate(x, y))
            torch.testing.assert_close(layer.heads["ratio"], ot.frequency_norms(recorder.heads[0]).ratio)
            torch.testing.assert_close(layer.gap, reference.spectral_gap(recorder.attention[0]), atol=1e-5, rtol=1e-4)

    def test_curve_and_shapes(self):
        result = analyze(Model(), tokens(), spectra=2)
        assert result.curve("ratio").shape == (3, 5)
        torch.testing.assert_close(result.curve("cosine")[0], ot.cosine_similarity(tokens()))
        layer = result.layers[0]
        assert layer.dominance.verdict.shape == layer.gap.shape == (5, HEADS)
        assert layer.mean_dominance.verdict.shape == (5,)
        assert layer.weight_eigenvalues.shape == (HEADS, DIM // HEADS)
        assert layer.attention_eigenvalues.shape == (2, HEADS, TOKENS)
        torch.testing.assert_close(layer.attention_eigenvalues[..., 0].abs(), torch.ones(2, HEADS), atol=1e-5, rtol=0)
        with pytest.raises(ValueError, match="curve: metric: got 'loss', wanted one of ratio"):
            result.curve("loss")

    def test_batches_do_not_matter(self):
        model, x = Model(), tokens()
        whole = analyze(model, x)
        pieces = {
            "small batches": analyze(model, x, batch_size=2),
            "an iterable": analyze(model, (part for part in x.split(3))),
            "pairs": analyze(model, [(part, torch.zeros(len(part))) for part in x.split(4)]),
            "a dict": analyze(model, {"x": x}, batch_size=2),
        }
        for result in pieces.values():
            assert result.samples == whole.samples == 5
            for metric in METRICS:
                torch.testing.assert_close(result.curve(metric), whole.curve(metric))
            for one, other in zip(result.layers, whole.layers, strict=True):
                torch.testing.assert_close(one.dominance.margin, other.dominance.margin)

    def test_memory_does_not_grow_with_the_batches(self):
        """Of every batch numbers per image and head stay, no tensor of tokens or attention."""
        result = analyze(Model(), (tokens(2) for _ in range(4)), spectra=1)
        layer = result.layers[0]
        kept = [*layer.after.values(), *layer.heads.values(), layer.gap, *layer.dominance, layer.attention_eigenvalues]
        assert max(tensor.numel() for tensor in kept) <= max(8 * HEADS, HEADS * TOKENS)

    def test_the_model_is_left_as_it_was(self):
        model = Model().train()
        model.blocks[0].eval()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        analyze(model, tokens())
        assert model.training and model.dropout.training and not model.blocks[0].training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        hooks = [module._forward_hooks or module._forward_pre_hooks for module in model.modules()]
        assert not any(hooks)

    def test_half_precision(self):
        result = analyze(Model(fused=False).bfloat16(), tokens().bfloat16())
        assert result.layers[0].gap.isfinite().all()

    def test_a_compiled_model_is_read(self):
        assert len(analyze(torch.compile(Model()), tokens()).layers) == 2


class Grouped(Attention):
    """Fewer values than the projection takes."""

    def __init__(self) -> None:
        super().__init__(True)
        self.qkv = nn.Linear(DIM, DIM)


class Strange(nn.Module):
    """Nothing that a reader knows."""

    def forward(self, x):
        return x


class StrangeAttention(Strange):
    pass


class TestUnread:
    def test_names_what_it_could_not_read(self):
        model = Model()
        model.extra = StrangeAttention()
        result = analyze(model, tokens())
        assert len(result.layers) == 2
        assert result.unread == {"extra": "no reader for StrangeAttention; see overtone.analysis.readers"}
        assert "not read: extra: no reader for StrangeAttention" in str(result)

    def test_cross_attention_is_not_square(self):
        class Cross(Attention):
            def forward(self, x):
                q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
                heads = F.scaled_dot_product_attention(q, k[:, :, 1:], v[:, :, 1:])
                return self.proj(heads.transpose(1, 2).flatten(2))

        model = Model()
        model.blocks[1].attn = Cross(True)
        result = analyze(model, tokens())
        assert [layer.name for layer in result.layers] == ["blocks.0.attn"]
        assert "attention of shape [5, 3, 7, 6], wanted [B, H, N, N]" in result.unread["blocks.1.attn"]

    def test_nothing_to_read(self):
        with pytest.raises(
            ValueError, match=r"no attention of Strange could be read \(no module looks like attention\)"
        ):
            analyze(Strange(), tokens())
        with pytest.raises(ValueError, match="could be read .*do not make a square weight"):
            analyze(nn.Sequential(Grouped()), tokens())

    def test_a_reader_of_ones_own(self):
        reader = Reader(
            "mine",
            matches=lambda module: isinstance(module, Grouped),
            weights=lambda module: Weights(torch.eye(DIM), module.proj.weight.mT, HEADS),
            projection=lambda module: module.proj,
        )
        READERS.insert(0, reader)
        try:
            assert find_sites(nn.Sequential(Grouped()))[0][0].reader.name == "mine"
        finally:
            READERS.remove(reader)

    @pytest.mark.parametrize(
        "inputs, message",
        [
            (torch.zeros(0, TOKENS, DIM), "got no samples"),
            ([], "got no samples"),
            ({"x": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, "attention_mask hides"),
        ],
    )
    def test_inputs_that_cannot_be_used(self, inputs, message):
        with pytest.raises(ValueError, match=f"analyze: inputs: .*{message}"):
            analyze(Model(), inputs)

    def test_inputs_of_a_wrong_type(self):
        with pytest.raises(TypeError, match="analyze: inputs: got int"):
            analyze(Model(), 3)
        with pytest.raises(ValueError, match="batch_size: got 0"):
            analyze(Model(), tokens(), batch_size=0)
