"""The sentences of an analysis agree with its numbers, and the verdict is on what a layer really applies."""

from __future__ import annotations

import math
import re

import pytest
import torch
from support.attention_models import DIM, HEADS, TOKENS, Model, Protocol, tokens
from torch import nn

import overtone as ot
from overtone.analysis import analyze
from overtone.analysis.update import Update, applied_dominance
from overtone.analysis.words import percent


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
        judged = {"de_escalation": "de-escalation (τ = 1)", "centered": "centered attention"}
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

    @pytest.mark.parametrize("tau, is_centered", [(1.0, False), (0.5, False), (0.1, False), (1.7, False), (0.0, True)])
    def test_verdicts_are_those_of_the_map(self, tau, is_centered):
        generator = torch.Generator().manual_seed(0)
        count, dim, decided = 5, 3, 0
        mean = torch.full((count, count), 1 / count, dtype=torch.float64)
        for _ in range(60):
            attention = torch.randn(count, count, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
            weight = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
            spectrum = ot.analysis.eigenvalues(weight)
            case = applied_dominance(attention, spectrum, Update(1 - tau, is_centered))
            step = torch.kron(attention - mean * is_centered, weight.mT.contiguous()) + torch.eye(count * dim)
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
        assert "Not in the eigenvalues: centered attention" in forecast and "of attention and weights" in forecast
