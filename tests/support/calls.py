"""One call of every op, in float64 and small: the table that tests of all ops together go through.

An op that is missing here fails tests/ops/test_transforms.py.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

import overtone as ot
import overtone.ops
from overtone.ops import attention, basis, linear
from overtone.ops.linalg.inverse import inverse, inverse_ex


class OpCall(NamedTuple):
    """`function` of `args`, all of them differentiable; its results are smooth and do not depend on choices that a
    decomposition is free to make. `options` go to it too: what has no derivative, and the backend."""

    function: Callable[..., tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]
    prepare: Callable[..., tuple[Tensor, ...]] = lambda *args: args
    takes_backend: bool = True

    def args(self, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        normal = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in self.shapes)
        return tuple(x.clone() for x in self.prepare(*normal))


def _eigenpairs(values: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
    """Sums over eigenpairs: neither their order nor a phase matters."""
    return torch.view_as_real(torch.einsum("...ik,...k->...i", vectors.abs().square().to(values.dtype), values))


def _powers(values: Tensor) -> Tensor:
    return torch.stack([(values**power).sum(-1).real for power in (1, 2, 3)], -1)


def _well_conditioned(A: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
    return A + 4 * torch.eye(*A.shape[-2:], dtype=A.dtype), *rest


# Bases are kept for a model; a table has a model of its own.
_CACHE = basis.BasisCache()
_MASK = torch.tensor([True, False, True, True])
_ATTENTION = ((2, 1, 3, 2), (2, 1, 4, 2), (2, 1, 4, 2), (2,), (2, 3), (2, 3, 3))


def _attend(query, key, value, eigenvalues, weights, residual, **options):
    y, norms = ot.spectral_attention(
        query, key, value, eigenvalues, weights, residual=residual, attn_mask=_MASK, return_norms=True, **options
    )
    return y, *norms


def _attend_with_gain(query, key, value, eigenvalues, weights, bias, gain, **options):
    return (
        ot.spectral_attention(
            query, key, value, eigenvalues, weights, attn_mask=bias, is_causal=True, head_gain=gain, **options
        ),
    )


def _attend_packed(qkv, eigenvalues, weights, residual, **options):
    y, norms = attention.spectral_attention_qkvpacked(
        qkv, eigenvalues, weights, residual=residual, is_causal=True, return_norms=True, **options
    )
    return y, *norms


def _symmetric(A: Tensor) -> Tensor:
    return A + A.mT


def _stochastic(A: Tensor) -> Tensor:
    return (A.softmax(-1),)


def _masked(function: Callable) -> Callable:
    return lambda x, **options: (function(x, mask=_MASK, **options),)


CALLS: dict[str, OpCall] = {
    "frequency_norms": OpCall(lambda x, **o: tuple(ot.frequency_norms(x, mask=_MASK, **o)), ((2, 4, 3),)),
    "frequency_filter": OpCall(
        lambda x, low, high, **o: (ot.frequency_filter(x, low, high, is_causal=True, **o),), ((2, 4, 3), (3,), (3,))
    ),
    "de_escalate": OpCall(lambda x, tau, **o: (ot.de_escalate(x, tau, mask=_MASK, **o),), ((2, 4, 3), ())),
    "token_similarity": OpCall(_masked(ot.token_similarity), ((2, 4, 3),)),
    "token_diversity": OpCall(_masked(ot.token_diversity), ((2, 4, 3),)),
    "escalation_rate": OpCall(lambda x, y, **o: (ot.escalation_rate(x, y, **o),), ((2, 4, 3), (2, 4, 3))),
    "cosine_similarity": OpCall(_masked(ot.cosine_similarity), ((2, 4, 3),)),
    "effective_rank": OpCall(_masked(ot.effective_rank), ((2, 4, 3),), takes_backend=False),
    "stable_rank": OpCall(_masked(ot.stable_rank), ((2, 4, 3),), takes_backend=False),
    "spectral_attention": OpCall(_attend, _ATTENTION),
    "spectral_attention with a gain": OpCall(_attend_with_gain, (*_ATTENTION[:5], (1, 3, 4), (1,))),
    "spectral_attention_qkvpacked": OpCall(_attend_packed, ((2, 3, 3, 1, 2), *_ATTENTION[3:])),
    "linear": OpCall(lambda *a, **o: (linear.linear(*a, **o),), ((2, 3, 4), (5, 4), (5,))),
    "mlp": OpCall(lambda *a, **o: (linear.mlp(*a, **o),), ((2, 3, 2), (4, 2), (4,), (3, 4), (3,))),
    "eigh": OpCall(lambda A, **o: (lambda w, v: (w, v.square()))(*ot.linalg.eigh(_symmetric(A), **o)), ((2, 3, 3),)),
    "eigh_ex": OpCall(
        lambda A, **o: (lambda w, v, _: (w, v.square()))(*ot.linalg.eigh_ex(_symmetric(A), "U", **o)), ((2, 3, 3),)
    ),
    "eigvalsh": OpCall(lambda A, **o: (ot.linalg.eigvalsh(_symmetric(A), **o),), ((2, 3, 3),)),
    "eigvalsh_ex": OpCall(lambda A, **o: (ot.linalg.eigvalsh_ex(_symmetric(A), **o).eigenvalues,), ((2, 3, 3),)),
    "eig": OpCall(lambda A, **o: (_eigenpairs(*ot.linalg.eig(A, **o)),), ((2, 3, 3),)),
    "eig_ex": OpCall(lambda A, **o: (_eigenpairs(*ot.linalg.eig_ex(A, **o)[:2]),), ((2, 3, 3),)),
    "eigvals": OpCall(lambda A, **o: (_powers(ot.linalg.eigvals(A, **o)),), ((2, 3, 3),)),
    "eigvals_ex": OpCall(
        lambda A, **o: (_powers(ot.linalg.eigvals_ex(A.softmax(-1), row_stochastic=True, **o).eigenvalues),),
        ((2, 3, 3),),
    ),
    "qr": OpCall(lambda A, **o: tuple(ot.linalg.qr(A, **o)), ((2, 4, 3),)),
    "qr_ex": OpCall(lambda A, **o: tuple(ot.linalg.qr_ex(A, **o)[:2]), ((2, 2, 3),)),
    "inverse": OpCall(lambda *a, **o: (inverse(*a, **o),), ((2, 3, 3),), _well_conditioned),
    "inverse_ex": OpCall(lambda *a, **o: (inverse_ex(*a, **o).inverse,), ((2, 3, 3),), _well_conditioned),
    "orthonormal_basis": OpCall(
        lambda theta: (basis.orthonormal_basis(theta, _CACHE),), ((2, 3, 3),), _well_conditioned, takes_backend=False
    ),
    "inverse_basis": OpCall(
        lambda v: (basis.inverse_basis(v, 1e5, _CACHE),), ((2, 3, 3),), _well_conditioned, takes_backend=False
    ),
    "orthonormal_basis_ex": OpCall(
        lambda theta: (basis.orthonormal_basis_ex(theta, _CACHE).basis,),
        ((2, 3, 3),),
        _well_conditioned,
        takes_backend=False,
    ),
    "inverse_basis_ex": OpCall(
        lambda v: (basis.inverse_basis_ex(v, 1e5, _CACHE).basis,), ((2, 3, 3),), _well_conditioned, takes_backend=False
    ),
}

# Public functions that have no derivative, and say so.
WITHOUT_DERIVATIVE = {"extremal_eigvals", "extremal_eigvals_ex"}
# Public functions of float32 that round to bfloat16: no float64 to compare with. tests/ops/test_layer_norm.py has them.
ROUNDED = {"rounded_layer_norm"}


def public_functions() -> set[str]:
    """The names of the functions that the modules of overtone.ops make public."""
    modules = [import_module(m.name) for m in pkgutil.walk_packages(overtone.ops.__path__, "overtone.ops.")]
    names = {name: getattr(m, name) for m in modules for name in getattr(m, "__all__", ())}
    return {name for name, value in names.items() if inspect.isfunction(value)}


def registered_ops() -> set[str]:
    """Every op of torch.ops.overtone."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("overtone::") for name in names if name.startswith("overtone::")}
