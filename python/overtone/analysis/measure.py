"""What is measured of one layer, batch by batch: numbers per sample and head are kept, tensors of tokens are not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import torch
from torch import Tensor

from overtone import linalg
from overtone.analysis.readers import Weights
from overtone.analysis.sites import Site
from overtone.analysis.update import Update, applied_dominance, update_of
from overtone.ops.dominance import eigenvalues
from overtone.ops.frequency import frequency_norms
from overtone.ops.metrics import cosine_similarity, effective_rank, stable_rank
from overtone.reference import metrics
from overtone.reference.dominance import Dominance, head_weights
from overtone.reference.enclosures import Eigenvalues

# The fields of TokenMetrics, as tables and figures name them.
METRICS = {
    "ratio": "‖HFC‖/‖LFC‖",
    "cosine": "cosine similarity",
    "effective_rank": "effective rank",
    "stable_rank": "stable rank",
    "similarity": "token similarity",
    "diversity": "token diversity",
}


@dataclass(frozen=True)
class TokenMetrics:
    """Metrics of tokens [..., N, C], a number per leading index. `metrics["ratio"]` is `metrics.ratio`."""

    ratio: Tensor
    cosine: Tensor
    effective_rank: Tensor
    stable_rank: Tensor
    similarity: Tensor
    diversity: Tensor

    @classmethod
    def of(cls, x: Tensor) -> TokenMetrics:
        """Measured where the tokens are, kept on the CPU."""
        norms = frequency_norms(x)
        return cls(
            ratio=norms.ratio.cpu(),
            cosine=cosine_similarity(x).cpu(),
            effective_rank=effective_rank(x).cpu(),
            stable_rank=stable_rank(x).cpu(),
            similarity=metrics.similarity_from_norms(norms).cpu(),
            diversity=metrics.diversity_from_norms(norms).cpu(),
        )

    @classmethod
    def concat(cls, parts: Sequence[TokenMetrics]) -> TokenMetrics:
        """Those of several batches."""
        return cls(**{each.name: torch.cat([part[each.name] for part in parts]) for each in fields(cls)})

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)


class AttentionSpectrum(NamedTuple):
    """What the eigenvalues of A [B, H, N, N] say; tensors on the CPU."""

    gap: Tensor  #: [B, H]
    dominance: Dominance  #: [B, H]
    mean_dominance: Dominance  #: [B]
    eigenvalues: Tensor  #: [b, H, N], of the first b samples

    @classmethod
    def concat(cls, parts: Sequence[AttentionSpectrum]) -> AttentionSpectrum:
        """Those of several batches."""
        gaps, cases, means, values = zip(*parts, strict=True)
        dominance, mean_dominance = (
            Dominance(*(torch.cat(same) for same in zip(*each, strict=True))) for each in (cases, means)
        )
        return cls(torch.cat(gaps), dominance, mean_dominance, torch.cat(values))


@dataclass(frozen=True)
class Layer:
    """The measurements of one attention layer; B samples, H heads, k the heads' width, all tensors on the CPU."""

    name: str
    reader: str
    tokens: int  #: N
    is_causal: bool
    before: TokenMetrics  #: of the tokens that enter the block, [B] each
    after: TokenMetrics  #: of the tokens that leave it, [B] each
    heads: TokenMetrics  #: of the heads' outputs A V, [B, H] each
    gap: Tensor  #: 1 − |λ₂(A)|, [B, H]
    dominance: Dominance  #: of what the layer applies (`update`), a case per sample and head, [B, H]
    mean_dominance: Dominance  #: of the heads' mean A and the layer's whole H, [B]
    weight_eigenvalues: Tensor  #: of every head's W_proj W_V, [H, k]
    layer_eigenvalues: Tensor  #: of the layer's H, [d]
    attention_eigenvalues: Tensor  #: of the first samples' A, the Perron one first, [b, H, N]
    update: Update = Update()  #: the method that the verdicts are on, and what they leave out

    @property
    def escalation(self) -> Tensor:
        """t_div before over t_div after the block, [B]: above one where the block made tokens more similar."""
        return self.before.diversity / self.after.diversity


@dataclass
class LayerRecorder:
    """Callbacks (see observe.py) that make a `Layer` of what they are given."""

    site: Site
    head_spectrum: Eigenvalues
    layer_spectrum: Eigenvalues
    max_spectra: int  #: of so many samples all eigenvalues of A are kept
    inputs: list[TokenMetrics] = field(default_factory=list)
    outputs: list[TokenMetrics] = field(default_factory=list)
    heads: list[TokenMetrics] = field(default_factory=list)
    attention: list[AttentionSpectrum] = field(default_factory=list)
    tokens: int = 0
    is_causal: bool = True
    update: Update = field(init=False)

    def __post_init__(self) -> None:
        self.update = update_of(self.site)

    def on_input(self, tokens: Tensor) -> None:
        self.inputs.append(TokenMetrics.of(tokens))

    def on_output(self, tokens: Tensor) -> None:
        self.outputs.append(TokenMetrics.of(tokens))

    def on_attention(self, attention: Tensor, heads: Tensor) -> None:
        self.tokens = attention.shape[-1]
        is_causal = not attention.triu(1).any()
        self.is_causal &= is_causal
        if not (self.update.is_plain or attention.amax((0, 1)).all()):  # the same zeros everywhere: a mask
            self.update = self.update.without_methods()
        self.heads.append(TokenMetrics.of(heads))
        kept = sum(len(part.eigenvalues) for part in self.attention)
        values, gap = attention_spectrum(attention, self.max_spectra - kept, is_causal)
        dominance = self._verdicts(attention, self.head_spectrum, is_causal)
        mean_dominance = self._verdicts(attention.mean(1), self.layer_spectrum, is_causal)
        self.attention.append(AttentionSpectrum(gap.cpu(), dominance, mean_dominance, values.cpu()))

    def layer(self) -> Layer:
        attention = AttentionSpectrum.concat(self.attention)
        return Layer(
            name=self.site.name,
            reader=self.site.reader.name,
            tokens=self.tokens,
            is_causal=self.is_causal,
            before=TokenMetrics.concat(self.inputs),
            after=TokenMetrics.concat(self.outputs),
            heads=TokenMetrics.concat(self.heads),
            gap=attention.gap,
            dominance=attention.dominance,
            mean_dominance=attention.mean_dominance,
            weight_eigenvalues=self.head_spectrum.values.cpu(),
            layer_eigenvalues=self.layer_spectrum.values.cpu(),
            attention_eigenvalues=attention.eigenvalues,
            update=self.update,
        )

    def _verdicts(self, attention: Tensor, spectrum: Eigenvalues, is_causal: bool) -> Dominance:
        case = applied_dominance(attention, spectrum, self.update, is_causal=is_causal)
        return Dominance(*(each.cpu() for each in case))


def attention_spectrum(attention: Tensor, count: int, is_causal: bool) -> tuple[Tensor, Tensor]:
    """All eigenvalues of the first `count` samples' A, complex64, the Perron one first, and 1 − |λ₂| of every A.

    A: [B, H, N, N]. Both are nan for a matrix that was not solved.
    """
    if is_causal:
        # Their diagonal; the first row attends to itself, so the Perron one is the first.
        values = attention.float().diagonal(dim1=-2, dim2=-1).to(torch.complex64)
        return values[: max(0, count)], 1 - _second_modulus(values)
    attention = attention.float()
    # Attention computed in half precision sums to one only to its own rounding.
    attention = attention / attention.sum(-1, keepdim=True)
    first, rest = attention[: max(0, count)], attention[max(0, count) :]
    values = linalg.eigvals_ex(first, row_stochastic=True).eigenvalues
    second = linalg.extremal_eigvals_ex(rest).second.abs()
    return values, 1 - torch.cat([_second_modulus(values), second])


def _second_modulus(values: Tensor) -> Tensor:
    """|λ₂| from all eigenvalues, the Perron one first; of one token 0: it has no second, and nothing to converge."""
    others = values[..., 1:].abs()
    return others.amax(-1) if others.shape[-1] else others.sum(-1)


def weight_spectra(weights: list[Weights]) -> list[tuple[Eigenvalues, Eigenvalues]]:
    """The eigenvalues of every layer's heads [H, k] and of its whole H [d]; equal shapes are solved together."""
    heads = _batched_by_shape([head_weights(w.w_v.double(), w.w_proj.double(), w.num_heads).float() for w in weights])
    layers = _batched_by_shape([(w.w_v.double() @ w.w_proj.double()).float() for w in weights])
    return list(zip(heads, layers, strict=True))


def _batched_by_shape(matrices: list[Tensor]) -> list[Eigenvalues]:
    """The eigenvalues of each, equal shapes solved as one batch."""
    places: dict[torch.Size, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        places[matrix.shape].append(place)
    solved: dict[int, Eigenvalues] = {}
    for group in places.values():
        spectra = eigenvalues(torch.stack([matrices[place] for place in group]))
        solved |= {place: Eigenvalues(*each) for place, *each in zip(group, *spectra, strict=True)}
    return [solved[place] for place in range(len(matrices))]
