"""The bases of spectra, of all layers of a model in one call, and not again until they change.

A factorisation is kept with a copy of what was factorised, and holds while the values are the same. Comparing values is
one pass over memory, and no way of writing to a parameter escapes it: `.data`, collectives, loading, another copy of
the model. What the ops return are copies, since a compiler may reuse the memory of an op's result.

Gradients, which never divide by the distance of two eigenvalues (a second derivative is taken through the reference):
    Q of Θ = QR:  ∂Θ = (G + Q copyltu(−Gᵀ Q)) R⁻ᵀ,  copyltu(M) = tril(M) + stril(M)ᵀ
    V⁻¹ of V:     ∂V = −V⁻ᵀ G V⁻ᵀ
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from overtone import _transforms as transforms
from overtone import _validate as validate
from overtone import reference
from overtone.backends import select
from overtone.ops import registry
from overtone.ops.linalg import batched
from overtone.ops.linalg.inverse import inverse_ex

__all__ = ["BasisCache", "inverse_basis", "orthonormal_basis"]


class _Entry(NamedTuple):
    matrix: Tensor
    results: tuple[Tensor, ...]


# Entries of a cache: a model has one per kind and width of its spectra.
_MOST = 16


class BasisCache:
    """The last factorisation of every kind and shape, for one model. A copy, deep or pickled, is an empty one.

    Entries never change once they are there, so threads may share a cache.
    """

    _alive: WeakValueDictionary[str, BasisCache] = WeakValueDictionary()
    _names = map(str, itertools.count())

    def __init__(self) -> None:
        # Ops take the name: a string, which torch.compile never makes a symbol of.
        self.name = next(BasisCache._names)
        self._entries: dict[tuple, _Entry] = {}
        BasisCache._alive[self.name] = self

    def __deepcopy__(self, memo: dict) -> BasisCache:
        return BasisCache()

    def __reduce__(self):
        return BasisCache, ()

    def clear(self) -> None:
        """Factorise anew at the next call."""
        self._entries.clear()

    @staticmethod
    def find(name: str, kind: str, matrix: Tensor, options: tuple) -> tuple[Tensor, ...] | None:
        """Copies of the results for this very matrix, if they are known; `options` is all else they depend on."""
        entry = BasisCache._entries_of(name).get(_key(kind, matrix, options))
        if entry is None or not torch.equal(entry.matrix, matrix):
            return None
        return tuple(result.clone() for result in entry.results)

    @staticmethod
    def store(name: str, kind: str, matrix: Tensor, options: tuple, results: tuple[Tensor, ...]) -> None:
        entries = BasisCache._entries_of(name)
        key, copies = _key(kind, matrix, options), tuple(result.clone() for result in results)
        entries.pop(key, None)  # the latest is the last
        entries[key] = _Entry(matrix.clone(), copies)
        for oldest in list(entries)[:-_MOST]:
            entries.pop(oldest, None)

    @staticmethod
    def _entries_of(name: str) -> dict[tuple, _Entry]:
        cache = BasisCache._alive.get(name)
        return {} if cache is None else cache._entries


def _key(kind: str, matrix: Tensor, options: tuple) -> tuple:
    return kind, *options, matrix.shape, matrix.dtype, matrix.device


def orthonormal_basis(theta: Tensor, cache: BasisCache) -> Tensor:
    """The orthonormal factor Q of theta [..., n, n] = QR with diag(R) > 0."""
    validate.matrices("orthonormal_basis", "theta", theta, square=True)
    return torch.ops.overtone.orthonormal_basis(theta, cache.name)[0]


def inverse_basis(v: Tensor, max_condition: float, cache: BasisCache) -> Tensor:
    """The inverse of v [..., n, n]; raises where ‖v‖₁ ‖v⁻¹‖₁, its condition number, exceeds max_condition."""
    validate.matrices("inverse_basis", "v", v, square=True)
    return torch.ops.overtone.inverse_basis(v, max_condition, cache.name)


def _orthonormal(theta: Tensor, cache: str) -> tuple[Tensor, Tensor]:
    backend = select("orthonormal_basis", None, theta)
    known = BasisCache.find(cache, "orthonormal", theta, (backend,))
    if known is not None:
        return known[0], known[1]
    if backend == "reference":
        q, r = reference.linalg.qr(theta)
    elif backend == "cuda":
        q, r = batched.orthonormal(theta)
    else:
        q, r, _ = torch.ops.overtone.qr(theta, False, True, "orthonormal_basis")
    BasisCache.store(cache, "orthonormal", theta, (backend,), (q, r))
    return q, r


def _inverse(v: Tensor, max_condition: float, cache: str) -> Tensor:
    backend = select("inverse", None, v)
    known = BasisCache.find(cache, "inverse", v, (backend, max_condition))
    if known is not None:
        return known[0]
    inverse = _checked_inverse(partial(inverse_ex, backend=backend), v, max_condition)
    BasisCache.store(cache, "inverse", v, (backend, max_condition), (inverse,))
    return inverse


def _checked_inverse(solve: Callable, v: Tensor, max_condition: float) -> Tensor:
    _raise_unless(v.detach().isfinite().all(-1).all(-1), lambda _: "is not finite")
    inverse, info = solve(v)
    _raise_unless(info == 0, lambda _: "has no inverse: it is singular")
    condition = torch.linalg.matrix_norm(v.detach(), 1) * torch.linalg.matrix_norm(inverse.detach(), 1)
    condition = transforms.beneath(condition)
    _raise_unless(condition <= max_condition, lambda first: _too_large(condition[first].item(), max_condition))
    return inverse


def _too_large(condition: float, limit: float) -> str:
    return (
        f"has a condition number of {condition:.2g}, above max_condition={limit:g}: its inverse is not accurate. "
        "Lower the learning rate, start from an orthogonal basis, or take kind='symmetric'"
    )


def _raise_unless(holds: Tensor, complaint: Callable[[tuple[int, ...]], str]) -> None:
    holds = transforms.beneath(holds)
    if transforms.readable(holds) and not holds.all():
        first = tuple((~holds).nonzero()[0].tolist())
        raise torch.linalg.LinAlgError(f"inverse_basis: v: basis {first or ''} {complaint(first)}".replace("  ", " "))


def _fake_orthonormal(theta, cache):
    return theta.new_empty(theta.shape), theta.new_empty(theta.shape)


def _fake_inverse(v, max_condition, cache):
    return v.new_empty(v.shape)


def _save_orthonormal(ctx, inputs, output) -> None:
    theta, _ = inputs
    q, r = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(r)
    ctx.save_for_backward(theta, q, r)


def _orthonormal_backward(ctx, grad_q, _grad_r):
    theta, q, r = ctx.saved_tensors
    if grad_q is None:
        return None, None
    if transforms.open_for(grad_q):
        return (*registry.double_backward_via_reference(lambda x: reference.linalg.qr(x).Q, (theta,), (grad_q,)), None)
    if select("orthonormal_basis", None, theta) != "reference":
        return torch.ops.overtone.qr_backward(grad_q, None, q, r), None
    with torch.autocast(theta.device.type, enabled=False):
        m = -grad_q.mT @ q
        total = grad_q + q @ (m.tril() + m.tril(-1).mT)
        return torch.linalg.solve_triangular(r.mT, total, upper=False, left=False), None


def _save_inverse(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output)


def _inverse_backward(ctx, grad):
    v, inverse = ctx.saved_tensors
    with torch.autocast(v.device.type, enabled=False):
        if torch.is_grad_enabled():
            return (
                *registry.double_backward_via_reference(
                    lambda v: reference.linalg.inverse_ex(v).inverse, (v,), (grad,)
                ),
                None,
                None,
            )
        return -inverse.mT @ grad @ inverse.mT, None, None


registry.register(
    registry.Op(
        schema="orthonormal_basis(Tensor theta, str cache) -> (Tensor q, Tensor r)",
        fake=_fake_orthonormal,
        composite=_orthonormal,
        save=_save_orthonormal,
        backward=_orthonormal_backward,
        reference=lambda theta, _: tuple(reference.linalg.qr(theta)),
        vmap=registry.Vmap(batched=(0,)),
    )
)
registry.register(
    registry.Op(
        schema="inverse_basis(Tensor v, float max_condition, str cache) -> Tensor inverse",
        fake=_fake_inverse,
        composite=_inverse,
        save=_save_inverse,
        backward=_inverse_backward,
        reference=lambda v, max_condition, _: _checked_inverse(reference.linalg.inverse_ex, v, max_condition),
        vmap=registry.Vmap(batched=(0,)),
    )
)
