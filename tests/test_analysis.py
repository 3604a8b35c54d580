"""analyze: it reads what models compute, facts of the papers come out, and what it cannot read it names."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from kit import libraries
from torch import nn

import overtone as ot
from overtone import reference
from overtone.analysis import METRICS, READERS, Reader, Weights, analyze
from overtone.analysis.observe import find_sites, observed

DIM, HEADS, TOKENS = 12, 3, 7


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
    timm = libraries.timm()
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    sites, recorders, seen = check_site(model, torch.randn(2, 3, 32, 32))
    assert [site.name for site in sites] == ["blocks.0.attn", "blocks.1.attn"]
    check_projection(sites[0], recorders[0], seen["y"])


@pytest.mark.parametrize("kind", ["vit", "deit", "bert", "gpt2"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_face(kind, implementation):
    transformers = libraries.transformers()
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
    timm = libraries.timm()
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", img_size=64, depth=3)
    result = analyze(model, torch.randn(2, 3, 64, 64))
    assert result.verdicts() == {"perron": 72, "other": 0, "tie": 0, "close": 0, "invalid": 0}
    assert (torch.stack([layer.dominance.margin for layer in result.layers]) > 0.05).all()


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
