"""analyze: facts of the papers come out, memory stays bounded, and what it cannot read it names."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from support import optional
from support.attention_models import DIM, HEADS, TOKENS, Attention, Model, Protocol, record, tokens
from torch import nn

import overtone as ot
from overtone import reference
from overtone.analysis import METRICS, READERS, Reader, Weights, analyze
from overtone.analysis.measure import TokenMetrics, attention_spectrum
from overtone.analysis.sites import find_sites
from overtone.ops.linalg import extremal


@pytest.mark.parametrize("sign, name", [(1.0, "perron"), (-1.0, "other")])
def test_the_sign_of_the_spectrum_decides(sign, name):
    """λ ∈ (0, 1] smooths, [−1, 0) sharpens: every verdict, and the curves follow."""
    model = nn.Sequential(*(Protocol(sign) for _ in range(6)))
    result = analyze(model, tokens())
    assert result.verdicts()[name] == 6 * 5 * HEADS
    ratio = result.curve("ratio").mean(1)
    assert ratio[-1] < ratio[0] if sign > 0 else ratio[-1] > ratio[0]
    eigenvalues = result.layers[0].layer_eigenvalues.real.sort().values
    torch.testing.assert_close(
        eigenvalues, (sign * torch.linspace(0.2, 1, DIM)).sort().values.double(), atol=1e-5, rtol=0
    )


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
        result = analyze(Model(), tokens(), max_spectra=2)
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

    @pytest.mark.parametrize("max_spectra", [0, 1, 5])
    def test_the_gap_of_samples_whose_spectrum_is_not_kept(self, max_spectra):
        """Only |λ₂| is computed of them: equal to rounding, whichever samples they are."""
        torch.manual_seed(0)
        model, x = Model(), tokens()
        _, recorders = record(model, x)
        result = analyze(model, x, batch_size=2, max_spectra=max_spectra)
        for layer, recorder in zip(result.layers, recorders, strict=True):
            truth = reference.spectral_gap(recorder.attention[0].double())
            torch.testing.assert_close(layer.gap.double(), truth, atol=1e-5, rtol=1e-5)
            assert layer.attention_eigenvalues.shape == (max_spectra, HEADS, TOKENS)

    def test_the_gap_of_long_sequences_is_arnoldis(self, monkeypatch):
        """Of four matrices of 640 tokens none is solved whole, and the gap is that of their spectrum."""
        generator = torch.Generator().manual_seed(0)
        q, k = torch.randn(2, 1, 4, 640, 4, generator=generator, dtype=torch.float64)
        attention = (q @ k.mT / 2).softmax(-1)
        monkeypatch.setattr(extremal, "eigvals_ex", None)
        values, gap = attention_spectrum(attention, 0, is_causal=False)
        monkeypatch.undo()
        whole, wanted = attention_spectrum(attention, 1, is_causal=False)
        assert values.shape == (0, 4, 640) and whole.shape == (1, 4, 640)
        torch.testing.assert_close(gap, wanted, atol=1e-5, rtol=0)

    def test_attention_that_is_not_finite_has_no_gap(self):
        attention = torch.full((2, 1, 3, 3), 1 / 3)
        attention[0, 0, 1] = torch.nan
        for count in (0, 2):
            _, gap = attention_spectrum(attention, count, is_causal=False)
            assert gap[0].isnan().all() and gap[1].isfinite().all()

    def test_metrics_are_named_as_their_tables(self):
        assert [each.name for each in dataclasses.fields(TokenMetrics)] == list(METRICS)

    def test_memory_does_not_grow_with_the_batches(self):
        """Of every batch numbers per image and head stay, no tensor of tokens or attention."""
        result = analyze(Model(), (tokens(2) for _ in range(4)), max_spectra=1)
        layer = result.layers[0]
        metrics = [group[name] for group in (layer.after, layer.heads) for name in METRICS]
        kept = [*metrics, layer.gap, *layer.dominance, layer.attention_eigenvalues]
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


class TestSkipped:
    def test_names_what_it_could_not_read(self):
        model = Model()
        model.extra = StrangeAttention()
        result = analyze(model, tokens())
        assert len(result.layers) == 2
        assert result.skipped == {"extra": "no reader for StrangeAttention; see overtone.analysis.readers"}
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
        assert "attention of shape [5, 3, 7, 6], wanted [B, H, N, N]" in result.skipped["blocks.1.attn"]

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

    def test_the_old_names_work_and_warn(self):
        with pytest.warns(DeprecationWarning, match="analyze: spectra is deprecated, use max_spectra"):
            result = analyze(Model(), tokens(), spectra=1)
        assert len(result.layers[0].attention_eigenvalues) == 1
        with pytest.warns(DeprecationWarning, match="use Analysis.skipped"):
            assert result.unread is result.skipped

    def test_padding_is_refused(self):
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 16, batch_first=True)
        hidden = torch.zeros(5, 7, dtype=torch.bool)
        inputs = {"src": tokens(), "src_key_padding_mask": hidden}
        assert analyze(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), inputs, batch_size=2).samples == 5
        hidden[3, 6] = True
        with pytest.raises(ValueError, match="inputs: src_key_padding_mask hides tokens"):
            analyze(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), inputs)
