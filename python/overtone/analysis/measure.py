"""What is measured of one layer, batch by batch: numbers per image and head are kept, tensors are not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from overtone import linalg
from overtone.analysis.observe import Site
from overtone.analysis.readers import Weights
from overtone.analysis.update import Update, applied_dominance, update_of
from overtone.ops.dominance import eigenvalues
from overtone.ops.frequency import frequency_norms
from overtone.ops.metrics import cosine_similarity, effective_rank, stable_rank
from overtone.reference import metrics
from overtone.reference.dominance import Dominance, head_weights
from overtone.reference.enclosures import Eigenvalues

# Names of the metrics of tokens, as tables and figures show them.
METRICS = {
    "ratio": "‖HFC‖/‖LFC‖",
    "cosine": "cosine similarity",
    "effective_rank": "effective rank",
    "stable_rank": "stable rank",
    "similarity": "token similarity",
    "diversity": "token diversity",
}


@dataclass(frozen=True)
class Layer:
    """The measurements of one attention layer; B images, H heads, k the heads' width, all tensors on the CPU."""

    name: str
    reader: str
    tokens: int  #: N
    is_causal: bool
    before: dict[str, Tensor]  #: METRICS of the tokens that enter the block, [B] each
    after: dict[str, Tensor]  #: and of those that leave it
    heads: dict[str, Tensor]  #: METRICS of the heads' outputs A V, [B, H] each
    gap: Tensor  #: 1 − |λ₂(A)|, [B, H]
    dominance: Dominance  #: of what the layer applies (`update`), a case per image and head, [B, H]
    mean_dominance: Dominance  #: of the heads' mean A and the whole H, [B]
    weight_eigenvalues: Tensor  #: of every head's W_proj W_V, [H, k]
    whole_eigenvalues: Tensor  #: of the layer's H, [d]
    attention_eigenvalues: Tensor  #: of the first images' A, the Perron one first, [b, H, N]
    update: Update = Update()  #: the method that the verdicts are on, and what they leave out

    @property
    def escalation(self) -> Tensor:
        """t_div before over t_div after the block, [B]: above one where the block made tokens more similar."""
        return self.before["diversity"] / self.after["diversity"]


class Meter:
    """Collects a `Layer` from what an Observer hears."""

    def __init__(self, site: Site, head_spectrum: Eigenvalues, whole_spectrum: Eigenvalues, spectra: int) -> None:
        self.site = site
        self.head_spectrum, self.whole_spectrum = head_spectrum, whole_spectrum
        self.spectra = spectra  # images whose eigenvalues of A are kept
        self.kept = 0
        self.is_causal = True
        self.tokens = 0
        self.update = update_of(site)
        self.numbers: dict[str, list[Tensor]] = defaultdict(list)

    def on_input(self, tokens: Tensor) -> None:
        self._add("before", token_metrics(tokens))

    def on_output(self, tokens: Tensor) -> None:
        self._add("after", token_metrics(tokens))

    def on_attention(self, attention: Tensor, heads: Tensor) -> None:
        self.tokens = attention.shape[-1]
        is_causal = not attention.triu(1).any()
        self.is_causal &= is_causal
        if not (self.update.is_plain or attention.amax((0, 1)).all()):  # the same zeros everywhere: a mask
            self.update = self.update.without_methods()
        self._add("heads", token_metrics(heads))
        self._judge("dominance", attention, self.head_spectrum, is_causal)
        self._judge("mean", attention.mean(1), self.whole_spectrum, is_causal)
        values = attention_eigenvalues(attention, is_causal)
        # One token has no second eigenvalue, and nothing slows its convergence.
        second = values[..., 1:].abs().amax(-1) if self.tokens > 1 else torch.zeros(values.shape[:-1])
        self._add("gap", {"": 1 - second})
        self._add("attention", {"": values[: max(0, self.spectra - self.kept)]})
        self.kept += len(values)

    def layer(self) -> Layer:
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, parts in self.numbers.items():
            group, _, metric = name.partition("/")
            found[group][metric] = torch.cat(parts)
        return Layer(
            name=self.site.name,
            reader=self.site.reader.name,
            tokens=self.tokens,
            is_causal=self.is_causal,
            before=found["before"],
            after=found["after"],
            heads=found["heads"],
            gap=found["gap"][""],
            dominance=Dominance(**found["dominance"]),
            mean_dominance=Dominance(**found["mean"]),
            weight_eigenvalues=self.head_spectrum.values.cpu(),
            whole_eigenvalues=self.whole_spectrum.values.cpu(),
            attention_eigenvalues=found["attention"][""],
            update=self.update,
        )

    def _judge(self, group: str, attention: Tensor, spectrum: Eigenvalues, is_causal: bool) -> None:
        self._add(group, applied_dominance(attention, spectrum, self.update, is_causal=is_causal)._asdict())

    def _add(self, group: str, numbers: dict[str, Tensor]) -> None:
        for name, values in numbers.items():
            self.numbers[f"{group}/{name}"].append(values.cpu())


def token_metrics(x: Tensor) -> dict[str, Tensor]:
    """METRICS of tokens [..., N, C], one number per sample."""
    norms = frequency_norms(x)
    return {
        "ratio": norms.ratio,
        "cosine": cosine_similarity(x),
        "effective_rank": effective_rank(x),
        "stable_rank": stable_rank(x),
        "similarity": metrics.similarity_of_norms(norms),
        "diversity": metrics.diversity_of_norms(norms),
    }


def attention_eigenvalues(attention: Tensor, is_causal: bool = False) -> Tensor:
    """All eigenvalues of A [..., N, N], complex64, the Perron one first; nan for a matrix that was not solved."""
    attention = attention.float()
    if is_causal:
        return attention.diagonal(dim1=-2, dim2=-1).to(torch.complex64)  # the first row attends to itself: 1
    # Attention computed in half precision sums to one only to its own rounding.
    attention = attention / attention.sum(-1, keepdim=True)
    return linalg.eigvals_ex(attention, row_stochastic=True).eigenvalues


def weight_spectra(weights: list[Weights]) -> list[tuple[Eigenvalues, Eigenvalues]]:
    """The eigenvalues of every layer's heads [H, k] and of its whole H [d]; equal shapes are solved together."""
    heads = _solved_together([head_weights(w.w_v.double(), w.w_proj.double(), w.num_heads).float() for w in weights])
    wholes = _solved_together([(w.w_v.double() @ w.w_proj.double()).float() for w in weights])
    return list(zip(heads, wholes, strict=True))


def _solved_together(matrices: list[Tensor]) -> list[Eigenvalues]:
    places: dict[torch.Size, list[int]] = defaultdict(list)
    for place, matrix in enumerate(matrices):
        places[matrix.shape].append(place)
    solved: dict[int, Eigenvalues] = {}
    for group in places.values():
        spectra = eigenvalues(torch.stack([matrices[place] for place in group]))
        solved |= {place: Eigenvalues(*each) for place, *each in zip(group, *spectra, strict=True)}
    return [solved[place] for place in range(len(matrices))]
