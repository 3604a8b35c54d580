"""Spectra: modules whose forward() gives a weight W_V W_proj as basis_in · diag(eigenvalues) · basis_out (MATH §4).

The regime is the sign of the eigenvalues: "sharpen" has λ ≤ 0, "smooth" has λ ≥ 0. Where every λ is in [−1, 0) no
attention matrix makes the residual stream oversmooth; `guarantees` tells for every spectrum of a model.

Everything here is computed in float32, or float64 for float64 parameters, inside autocast too.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from functools import singledispatch
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone.ops.basis import (
    BasisCache,
    BasisResult,
    inverse_basis_ex,
    orthonormal_basis,
    orthonormal_basis_ex,
    too_large,
)
from overtone.types import SIGNS, Spectrum

__all__ = [
    "BasisCache",
    "BasisStatus",
    "FixedSpectrum",
    "GeneralSpectrum",
    "Guarantee",
    "SpectrumModule",
    "SymmetricSpectrum",
    "basis_status",
    "condition_numbers",
    "evaluate",
    "fold",
    "guarantees",
    "make_spectrum",
    "plain_magnitude",
    "well_conditioned",
]

# The smallest |λ| of a bounded general spectrum: zero is a tie between smoothing and sharpening.
SMALLEST = 1e-3


def plain_magnitude(dim: int) -> float:
    """The root mean square of the singular values of W_V W_proj in a plain ViT, whose weights start at std 0.02."""
    return min(0.02**2 * dim, 2 / 3)


class SpectrumModule(nn.Module):
    """What the two kinds share: parameters `basis` [dim, dim] and `raw_eigenvalues` [dim], a regime, a cache."""

    basis: nn.Parameter
    raw_eigenvalues: nn.Parameter
    #: What the latest training step said of the basis' condition; nan if it was singular or not finite. No state.
    condition: Tensor
    max_condition = math.inf

    def __init__(self, dim: int, regime: str, bounded: bool, device, dtype) -> None:
        super().__init__()
        name = type(self).__name__
        if not isinstance(dim, int) or dim < 1:
            raise ValueError(f"{name}: dim: got {dim!r}, wanted an integer of at least 1")
        self.dim = dim
        self.regime = validate.one_of(name, "regime", regime, tuple(SIGNS))
        self.bounded = validate.flag(name, "bounded", bounded)
        self.basis = nn.Parameter(torch.empty(dim, dim, device=device, dtype=dtype))
        self.raw_eigenvalues = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.register_buffer("condition", torch.ones((), device=device), persistent=False)
        self._cache = BasisCache()
        self.reset_parameters()

    @property
    def sign(self) -> int:
        return SIGNS[self.regime]

    def reset_parameters(self, magnitude: float | None = None) -> None:
        """A random orthogonal basis, and |λ| uniform around `magnitude`, by half of it: at the scale of a plain ViT.

        Never above 1, so that a sharpening spectrum starts inside its guarantee.
        """
        magnitude = plain_magnitude(self.dim) if magnitude is None else magnitude
        # In at least float32, whatever the parameters are stored in: there is no QR of halves.
        basis, spread = (torch.empty_like(_wide(x)) for x in (self.basis.detach(), self.raw_eigenvalues.detach()))
        nn.init.orthogonal_(basis)
        spread.uniform_(0.5, 1.5)
        self.set_spectrum(basis, self.sign * (magnitude * spread).clamp(max=1))

    def set_spectrum(self, basis: Tensor, eigenvalues: Tensor) -> None:
        """Start at this basis [dim, dim] and these eigenvalues [dim], which must have the regime's sign."""
        size = self.sign * _wide(eigenvalues)
        if not size.is_meta and not bool((size >= 0).all()):
            low, high = eigenvalues.aminmax()
            got, wanted = f"values from {low:.3g} to {high:.3g}", f"the sign of regime {self.regime!r} for all of them"
            raise ValueError(f"{type(self).__name__}: eigenvalues: got {got}, wanted {wanted}")
        with torch.no_grad():
            self.basis.copy_(basis)
            self.raw_eigenvalues.copy_(self._raw(size))

    def _raw(self, size: Tensor) -> Tensor:
        raise NotImplementedError

    def eigenvalues(self) -> Tensor:
        """λ, [dim]."""
        raise NotImplementedError

    def group(self) -> tuple[Hashable, ...]:
        """What modules whose bases are factorised together have in common."""
        return type(self).bases, self.dim, validate.accumulate_dtype(self.basis.dtype), self.basis.device

    @staticmethod
    def bases(matrices: Tensor, members: Sequence[SpectrumModule], cache: BasisCache) -> tuple[Tensor, BasisResult]:
        """basis_in and basis_out of every member of a group, [members, dim, dim] each, the second with conditions."""
        raise NotImplementedError

    def forward(self) -> Spectrum:
        return evaluate([self], self._cache)[0]

    def extra_repr(self) -> str:
        return f"dim={self.dim}, regime={self.regime!r}, bounded={self.bounded}"


class SymmetricSpectrum(SpectrumModule):
    """W = V Λ Vᵀ: V the orthonormal factor of `basis` (QR with diag R > 0), Λ = ±ψ² with ψ = `raw_eigenvalues`.

    Args:
        dim: of the tokens.
        regime: "sharpen" (Λ = −ψ²) or "smooth" (Λ = +ψ²).
        bounded: Λ = ±1/(1 + ψ²) instead, in [−1, 0) or (0, 1] whatever ψ is: sharpening stays guaranteed in training.
            Without it a ψ² above one loses the guarantee, and a spectrum of nothing but large ψ smooths; `guarantees`
            reports it.
    """

    def __init__(
        self, dim: int, regime: str = "sharpen", *, bounded: bool = False, device=None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(dim, regime, bounded, device, dtype)

    def eigenvalues(self) -> Tensor:
        squared = _wide(self.raw_eigenvalues).square()
        return self.sign / (1 + squared) if self.bounded else self.sign * squared

    def _raw(self, size: Tensor) -> Tensor:
        # A bounded λ of zero would need an infinite ψ.
        return (1 / size.clamp(SMALLEST, 1) - 1).sqrt() if self.bounded else size.sqrt()

    @staticmethod
    def bases(matrices: Tensor, members: Sequence[SpectrumModule], cache: BasisCache) -> tuple[Tensor, BasisResult]:
        q, condition = orthonormal_basis_ex(matrices, cache)
        return q, BasisResult(q.mT, condition)


class GeneralSpectrum(SpectrumModule):
    """W = V Λ V⁻¹: V = `basis` itself, Λ = `raw_eigenvalues` clipped to [−1, 0] (sharpen) or [0, 1] (smooth).

    Args:
        dim: of the tokens.
        regime: "sharpen" or "smooth".
        bounded: the clip interval leaves zero out, [−1, −0.001] or [0.001, 1]: zero is a tie.
        max_condition: the largest condition number ‖V‖₁‖V⁻¹‖₁ that forward accepts; above it, it raises.
        condition_limit: keeps the condition number of V (the ratio of its singular values) at or below this whatever
            `basis` is, so that training never meets a singular V; more than 1. V is then `well_conditioned(basis)`.
            None: no limit.
    """

    def __init__(
        self,
        dim: int,
        regime: str = "sharpen",
        *,
        bounded: bool = False,
        max_condition: float = 1e5,
        condition_limit: float | None = None,
        device=None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dim, regime, bounded, device, dtype)
        if condition_limit is not None and not 1 < condition_limit < math.inf:
            got, wanted = f"got {condition_limit!r}", "wanted a number above 1, or None"
            raise ValueError(f"GeneralSpectrum: condition_limit: {got}, {wanted}")
        self.max_condition = float(max_condition)
        self.condition_limit = None if condition_limit is None else float(condition_limit)

    def eigenvalues(self) -> Tensor:
        low, high = sorted((self.sign * (SMALLEST if self.bounded else 0.0), self.sign * 1.0))
        return _wide(self.raw_eigenvalues).clamp(low, high)

    def _raw(self, size: Tensor) -> Tensor:
        return self.sign * size.clamp(SMALLEST if self.bounded else 0, 1)

    def group(self) -> tuple[Hashable, ...]:
        return *super().group(), self.max_condition, self.condition_limit

    @staticmethod
    def bases(matrices: Tensor, members: Sequence[SpectrumModule], cache: BasisCache) -> tuple[Tensor, BasisResult]:
        first = cast(GeneralSpectrum, members[0])
        if first.condition_limit is not None:
            matrices = well_conditioned(matrices, first.condition_limit, cache)
        return matrices, inverse_basis_ex(matrices, first.max_condition, cache)


def well_conditioned(matrices: Tensor, limit: float, cache: BasisCache) -> Tensor:
    """V = Q + t(B D⁻¹ − Q) for B = QR [..., n, n], D = diag R: a basis whose condition number is at most `limit`.

    B D⁻¹ has the columns of B in other lengths, so V Λ V⁻¹ is that of B wherever t = 1. With N = QᵀB D⁻¹ − I, which is
    strictly triangular, V = Q(I + tN), and its condition number is at most (1 + t‖N‖)/(1 − t‖N‖): t is as much of 1 as
    keeps t‖N‖ at ρ = (limit − 1)/(limit + 1) or below, with tr((NᵀN)⁴)^⅛ in the place of ‖N‖, which it is never below.
    """
    q = orthonormal_basis(matrices, cache)
    smallest = torch.finfo(matrices.dtype).eps * torch.linalg.vector_norm(matrices.detach(), dim=-2, keepdim=True)
    lengths = torch.maximum((q * matrices).sum(-2, keepdim=True), smallest)
    skew = matrices / lengths - q
    scale = skew.detach().abs().amax((-2, -1), keepdim=True).clamp(min=1)  # powers of huge numbers would overflow
    radius = (limit - 1) / (limit + 1) / scale
    gram = (skew / scale).mT @ (skew / scale)
    # Clamped before the root, whose derivative at zero, where V is orthogonal, is infinite.
    eighth_power = (gram @ gram).square().sum((-2, -1), keepdim=True)
    floor = torch.maximum(radius**8, radius.new_tensor(torch.finfo(radius.dtype).tiny))
    return q + radius * torch.maximum(eighth_power, floor) ** -0.125 * skew


@torch.no_grad()
def condition_numbers(model: nn.Module, weights: Mapping[str, Tensor] | None = None) -> dict[str, float]:
    """The condition number (largest over smallest singular value) of V, by the name of every GeneralSpectrum.

    Args:
        model: that holds them.
        weights: whole parameters by their names, where the model's own are sharded or others are wanted.
    """
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, GeneralSpectrum):
            basis = part.basis if weights is None else weights[f"{name}.basis".lstrip(".")]
            v, _ = part.bases(_wide(basis.detach())[None], [part], BasisCache())
            found[name] = float(torch.linalg.cond(v[0].double()))
    return found


KINDS: dict[str, type[SpectrumModule]] = {"symmetric": SymmetricSpectrum, "general": GeneralSpectrum}


def make_spectrum(kind: str, dim: int, regime: str, **options) -> SpectrumModule:
    """A spectrum by the name of its kind, "symmetric" or "general"."""
    return KINDS[validate.one_of("make_spectrum", "kind", kind, tuple(KINDS))](dim, regime, **options)


def evaluate(spectra: Sequence[SpectrumModule], cache: BasisCache) -> list[Spectrum]:
    """Every module's Spectrum, from one batched factorisation per kind and width, which `cache` keeps until a basis
    changes."""
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for place, spectrum in enumerate(spectra):
        groups.setdefault(spectrum.group(), []).append(place)
    results: dict[int, Spectrum] = {}
    for places in groups.values():
        members = [spectra[place] for place in places]
        matrices = torch.stack([_wide(spectrum.basis) for spectrum in members])
        first, (second, condition) = members[0].bases(matrices, members, cache)
        if matrices.requires_grad and torch.is_grad_enabled() and not transforms.active():
            _remember(members, condition.detach())
        bases_in, bases_out = first.unbind(0), second.unbind(0)
        eigenvalues = [spectrum.eigenvalues() for spectrum in members]
        results |= dict(zip(places, map(Spectrum, bases_in, eigenvalues, bases_out), strict=True))
    return [results[place] for place in range(len(spectra))]


@torch.no_grad()
def _remember(members: Sequence[SpectrumModule], condition: Tensor) -> None:
    """On the device: nobody waits for it."""
    torch._foreach_copy_([member.condition for member in members], list(condition.unbind(0)))


class BasisStatus(NamedTuple):
    """What the latest training step said of a model's bases. The numbers stay on the device until somebody reads them.

    On a GPU a singular basis, or one that is not finite, makes a step's results nan without an error, for which the
    host would have to wait. Whoever fetches the loss can fetch `conditions` with it, and call `check`.
    """

    names: tuple[str, ...]  #: of the spectra
    limits: tuple[float, ...]  #: what their conditions may be
    conditions: Tensor  #: [spectra]; nan for a basis that is singular or not finite

    def check(self, conditions: Tensor | None = None) -> None:
        """Raise LinAlgError for the first bad basis. `conditions`: the same numbers, fetched earlier."""
        found = (self.conditions if conditions is None else conditions).tolist()
        for name, limit, condition in zip(self.names, self.limits, found, strict=True):
            if not math.isfinite(condition):
                raise torch.linalg.LinAlgError(f"{name or 'spectrum'}: basis is singular or not finite")
            if condition > limit:
                raise torch.linalg.LinAlgError(f"{name or 'spectrum'}: basis {too_large(condition, limit)}")


def basis_status(model: nn.Module) -> BasisStatus:
    """The conditions of all bases of the model after its latest training step, without waiting for the device."""
    found = {name: part for name, part in model.named_modules() if isinstance(part, SpectrumModule)}
    conditions = [part.condition.float() for part in found.values()]
    stacked = torch.stack([x.to(conditions[0].device) for x in conditions]) if conditions else torch.empty(0)
    return BasisStatus(tuple(found), tuple(part.max_condition for part in found.values()), stacked)


class FixedSpectrum(nn.Module):
    """A spectrum that is evaluated once: what `fold` leaves of one that stands outside attention."""

    basis_in: Tensor
    values: Tensor
    basis_out: Tensor

    def __init__(self, spectrum: Spectrum) -> None:
        super().__init__()
        for name, part in zip(("basis_in", "values", "basis_out"), spectrum, strict=True):
            self.register_buffer(name, part.detach().clone())

    def eigenvalues(self) -> Tensor:
        """λ, [dim]."""
        return self.values

    def forward(self) -> Spectrum:
        return Spectrum(self.basis_in, self.values, self.basis_out)


def fold(model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """A model with ordinary weights in the place of spectra, and of PyTorch's own operations: for export and inference.

    Attention becomes `qkv` and `proj`, named and shaped as in timm, with W_V = basis_in and W_proj = diag(λ) basis_out;
    filters, norms and MLPs become plain ones. No op of this package is left, so that torch.onnx.export, torch.export,
    torch.jit.trace and other tools take the model. What is not this package's stays as it is.

    Args:
        model: of ot.models, one that `reparameterize` has converted, or any other that holds this package's modules.
        inplace: change `model` itself rather than a deep copy; it has other parameters afterwards.

    Returns:
        The folded model, in the mode (train or eval), dtype and device of `model`: `model` itself where inplace, unless
        the model is itself one of this package's layers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fold: model: got {type(model).__name__}, wanted an nn.Module")
    validate.flag("fold", "inplace", inplace)
    model = model if inplace else copy.deepcopy(model)
    with torch.no_grad():
        return _fold_all(model, "", {})


def _fold_all(module: nn.Module, name: str, done: dict[int, tuple[nn.Module, nn.Module]]) -> nn.Module:
    """`done`: every module met, by id, and what became of it, so that shared modules stay shared."""
    if id(module) in done:
        return done[id(module)][1]
    result = folded(module, name)
    done[id(module)] = (module, result)
    if result is not module:
        return result.train(module.training)
    for attribute, child in list(module._modules.items()):
        if child is not None:
            changed = _fold_all(child, f"{name}.{attribute}".lstrip("."), done)
            if changed is not child:
                setattr(module, attribute, changed)
    return module


@singledispatch
def folded(module: nn.Module, name: str) -> nn.Module:
    """A module's plain form; itself where it has none. `name`: its place in the model, for errors.

    overtone.nn.plain says what becomes of this package's modules.
    """
    return module


class Guarantee(NamedTuple):
    """Whether a spectrum's eigenvalues are inside the interval for which its regime is guaranteed."""

    name: str
    regime: str
    holds: bool
    lowest: float
    highest: float
    outside: int  #: eigenvalues outside the interval
    condition: float = 1.0  #: of the basis at the latest training step; not finite if it was singular or not finite

    def __str__(self) -> str:
        interval = "[-1, 0)" if self.regime == "sharpen" else "(0, inf)"
        verdict = "guaranteed" if self.holds else f"NOT guaranteed: {self._reason(interval)}"
        return f"{self.name or 'spectrum'}: {self.regime}, λ from {self.lowest:.3g} to {self.highest:.3g}, {verdict}"

    def _reason(self, interval: str) -> str:
        if not math.isfinite(self.condition):
            return "its basis is singular or not finite"
        return f"{self.outside} eigenvalues outside {interval}"


@torch.no_grad()
def guarantees(model: nn.Module) -> list[Guarantee]:
    """For every spectrum in the model: is its regime guaranteed, whatever the attention is?

    Sharpening is for λ in [−1, 0), all of them; smoothing for λ > 0. An unbounded −ψ² may leave the interval in
    training, and where every ψ² exceeds 2/(1 + λ_1^A) it smooths (MATH §5).
    """
    return [_guarantee(name, part) for name, part in model.named_modules() if isinstance(part, SpectrumModule)]


def _guarantee(name: str, spectrum: SpectrumModule) -> Guarantee:
    eigenvalues = spectrum.eigenvalues()
    inside = (eigenvalues >= -1) & (eigenvalues < 0) if spectrum.regime == "sharpen" else eigenvalues > 0
    low, high, outside, condition = torch.stack(
        [x.double() for x in (*eigenvalues.aminmax(), (~inside).sum(), spectrum.condition)]
    ).tolist()
    holds = outside == 0 and math.isfinite(condition)
    return Guarantee(name, spectrum.regime, holds, low, high, int(outside), condition)


def _wide(x: Tensor) -> Tensor:
    return x.to(validate.accumulate_dtype(x.dtype))
