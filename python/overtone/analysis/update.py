"""What a layer does to its tokens beside X + A X H, and the verdict on the operator that it really applies.

Two methods change what happens to equal tokens and nothing else, so that the eigenvalues of A and H still decide:
- centered attention, A − Π, has A's eigenvalues but for the Perron one, which becomes 0: equal tokens pass unchanged;
- de-escalation, (I − τΠ) after the update, multiplies equal tokens by 1 − τ.
Everything else in a block is named, and the verdict is that of attention and weights alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from overtone.analysis.readers import own_attention
from overtone.analysis.sites import Site
from overtone.ops.dominance import dominance, eigenvalues
from overtone.reference.dominance import Dominance, Eigenvalues, Verdict

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Update:
    """What the eigenvalues are judged with, and what acts beside them."""

    gain: float = 1.0  #: of equal tokens, after the update: 1 − τ of de-escalation
    is_centered: bool = False
    beside: dict[str, None] = field(default_factory=dict)  #: what no eigenvalue knows, in order, as people call it

    @property
    def is_plain(self) -> bool:
        return self.gain == 1 and not self.is_centered

    def of_equal_tokens(self, plain: Any) -> Any:
        """By how much equal tokens grow, where X + A X H alone makes them grow by `plain`, |1 + λ^H|."""
        return abs(self.gain) * (torch.ones_like(plain) if self.is_centered else plain)

    def without_methods(self) -> Update:
        """Where the mean over tokens is not one number (causal attention, masks), the methods' Π is another one."""
        methods = ["centered attention"] * self.is_centered + ["de-escalation"] * (self.gain != 1)
        return Update(beside=self.beside | dict.fromkeys(methods))


def update_of(site: Site) -> Update:
    """What a block applies."""
    own = own_attention(site.module)
    method = getattr(site.block, "filter", None)  # of ot.models
    tau = getattr(method, "tau", None)
    beside: dict[str, None] = {}
    if getattr(own, "neutreno", 0):
        beside["NeuTRENO"] = None
    if isinstance(method, nn.Module) and tau is None and not _is_identity(method):
        beside[type(method).__name__] = None
    inside = {id(module) for module in site.module.modules()}
    others = [module for module in site.block.modules() if id(module) not in inside]
    norms = {type(module).__name__: None for module in others if "norm" in type(module).__name__.lower()}
    if any(type(module).__name__.startswith(("Linear", "Conv")) for module in others):
        norms["the MLP"] = None
    return Update(1.0 if tau is None else 1 - tau, bool(getattr(own, "centered", False)), norms | beside)


def _is_identity(method: nn.Module) -> bool:
    """FeatScale as it begins."""
    scales = [getattr(method, name, None) for name in ("low", "high")]
    return all(isinstance(scale, Tensor) and not scale.any() for scale in scales)


def applied_dominance(attention: Tensor, weight: Eigenvalues, update: Update, *, is_causal: bool = False) -> Dominance:
    """`dominance` of what the layer applies, for attention [..., N, N] and λ^H [..., d]."""
    plain = dominance(attention, weight, is_causal=is_causal)
    if update.is_plain:
        return plain
    case = _moved(plain, weight, update)
    # `dominance` stops at bounds that decide X + A X H; what they leave open here needs A's eigenvalues.
    is_open = case.verdict == Verdict.CLOSE
    if is_open.any():
        spectra = Eigenvalues(*(values.expand(*is_open.shape, -1)[is_open] for values in weight))
        sharper = _moved(_from_eigenvalues(eigenvalues(attention[is_open]), spectra), spectra, update)
        for found, values in zip(case, sharper, strict=True):
            found[is_open] = values
    return case


def _from_eigenvalues(attention: Eigenvalues, weight: Eigenvalues) -> Dominance:
    """Margin and error from all eigenvalues of A [..., N] and of H [..., d]; the verdict is left open."""
    is_perron = nn.functional.one_hot((attention.values - 1).abs().argmin(-1), attention.values.shape[-1]).bool()
    a, h, h_error = attention.values[..., None, :], weight.values[..., :, None], weight.error[..., :, None]
    # A's eigenvalues lie in the unit disk, those of what it was rounded from too: no error is larger than that is wide.
    a_error = attention.error.nan_to_num(nan=math.inf).clamp(max=2.1)[..., None, :]
    other = (1 + h * a).abs().masked_fill(is_perron[..., None, :], -math.inf)  # [..., d, N]
    off = h.abs() * a_error + h_error * (a.abs() + a_error) + 8 * EPS * (1 + h.abs() * a.abs())
    largest, low, high = (each.amax((-2, -1)) for each in (other, other - off, other + off))
    plain, plain_error = _of_equal_tokens(weight)
    error = torch.maximum(high - largest, largest - low) + plain_error
    return Dominance(torch.full_like(largest, Verdict.CLOSE, dtype=torch.int8), plain - largest, error)


def _of_equal_tokens(weight: Eigenvalues) -> tuple[Tensor, Tensor]:
    """max_j |1 + λ_j^H|, and how far it may be off."""
    modulus = (1 + weight.values).abs()
    plain, low, high = (each.amax(-1) for each in (modulus, modulus - weight.error, modulus + weight.error))
    return plain, torch.maximum(high - plain, plain - low) + 8 * EPS * (plain + 1)


def _moved(case: Dominance, weight: Eigenvalues, update: Update) -> Dominance:
    """Equal tokens grow by another factor, known to the error of λ^H: margin and error are moved by that."""
    plain, plain_error = _of_equal_tokens(weight)
    changed = update.of_equal_tokens(plain)
    share = 1.0 if update.is_centered else abs(1 - abs(update.gain))  # of `plain` that the margin loses
    margin = case.margin + changed - plain
    error = case.error + share * plain_error + 8 * EPS * (plain + changed + 1)
    verdict = torch.full_like(case.verdict, Verdict.CLOSE)
    verdict = verdict.masked_fill(margin > error, Verdict.PERRON).masked_fill(margin < -error, Verdict.OTHER)
    return Dominance(verdict.masked_fill(case.verdict == Verdict.INVALID, Verdict.INVALID), margin, error)
