"""What torch.utils.flop_counter.FlopCounterMode counts for every op.

Products of matrices count 2 per multiplication and addition, as the mode counts PyTorch's: an op has the count of its
plain formulation, whatever its kernels compute again. Solvers have LAPACK's operation counts (Golub and Van Loan's for
eigenvalues), which depend on the sizes alone; a basis counts as factorised also where the cache has it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from math import prod
from typing import Any

import torch


def _attention(query: tuple[int, ...], key: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, int]:
    """Of one product of attention, as Q Kᵀ, and of that with the weight."""
    batch, num_heads, q_len, head_dim = query
    kv_len, out_dim = key[2], weight[1]
    return 2 * batch * num_heads * q_len * kv_len * head_dim, 2 * batch * q_len * num_heads * head_dim * out_dim


def _attention_forward(query, key, value, weight, *_) -> int:
    inner, outer = _attention(query, key, weight)
    return 2 * inner + outer


def _attention_backward(grad_y, query, key, value, weight, *rest) -> int:
    inner, outer = _attention(query, key, weight)
    output_mask = rest[-1]
    query_, key_, value_, weight_, mask_, gain_, addend_ = (output_mask >> bit & 1 for bit in range(7))
    softmax = query_ | key_ | mask_ | gain_
    return inner * (query_ + key_ + value_ + softmax) + outer * (weight_ + (softmax | value_ | addend_))


def _unpack_qkv(qkv: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    batch, tokens, _, num_heads, head_dim = qkv
    return ((batch, num_heads, tokens, head_dim),) * 3


def _qkvpacked_forward(qkv, *rest) -> int:
    return _attention_forward(*_unpack_qkv(qkv), *rest)


def _qkvpacked_backward(grad_y, qkv, *rest) -> int:
    return _attention_backward(grad_y, *_unpack_qkv(qkv), *rest)


def _linear(x, weight, *_) -> int:
    return 2 * x[0] * prod(weight)


def _linear_backward(grad_y, x, weight, need_x, need_weight) -> int:
    return _linear(x, weight) * (need_x + need_weight)


def _mlp(x, w1, b1, w2, *_) -> int:
    return _linear(x, w1) + _linear(x, w2)


def _mlp_backward(grad_y, x, w1, w2, pre, need_x, need_weights) -> int:
    return _linear(x, w1) * (need_x + need_weights) + _linear(x, w2) * (1 + need_weights)


def _cubes(shape: tuple[int, ...], count: float) -> int:
    """`count` n³ of every matrix [..., n, n]."""
    return round(count * prod(shape[:-1]) * shape[-1] ** 2)


def _eigh(A, upper, vectors, *_) -> int:
    return _cubes(A, 9 if vectors else 4 / 3)


def _eigh_gradient(grad_values, grad_vectors, values, vectors, info) -> int:
    return _cubes(vectors, 2 if grad_vectors is None else 6)


def _eig(A, row_stochastic, right, *_) -> int:
    return _cubes(A, 25 if right else 10)


def _eig_gradient(grad_values, grad_vectors, norm, values, right, *_) -> int:
    return _cubes(right, 4 if grad_vectors is None else 8)


def _reflections(rows: int, columns: int, count: int) -> float:
    """Of `count` Householder reflections found in a matrix, or multiplied out into one, of this size."""
    return 4 * rows * columns * count - 2 * (rows + columns) * count**2 + 4 / 3 * count**3


def _qr(A, complete, need_q, *_) -> int:
    *batch, rows, columns = A
    count = min(rows, columns)
    form_q = _reflections(rows, rows if complete else count, count) if need_q else 0
    return round(prod(batch) * (_reflections(rows, columns, count) + form_q))


def _qr_backward(grad_q, grad_r, q, r) -> int:
    *batch, rows, columns = q
    products = 3 * rows + (0 if grad_q is None else 2 * rows) + (0 if grad_r is None else 2 * columns)
    return prod(batch) * products * columns**2


def _orthonormal(theta, *_) -> int:
    return _qr(theta, False, True)


def _inverse(A, *_) -> int:
    return _cubes(A, 2)  # LU and two substitutions


FORMULAS: dict[str, Callable[..., int]] = {
    "spectral_attention": _attention_forward,
    "spectral_attention_backward": _attention_backward,
    "spectral_attention_qkvpacked": _qkvpacked_forward,
    "spectral_attention_qkvpacked_backward": _qkvpacked_backward,
    "linear": _linear,
    "linear_backward": _linear_backward,
    "mlp": _mlp,
    "mlp_backward": _mlp_backward,
    "eigh": _eigh,
    "eigh_ex": _eigh,
    "eigh_gradient": _eigh_gradient,
    "eigh_backward": _eigh_gradient,
    "eig": _eig,
    "eig_ex": _eig,
    "eig_gradient": _eig_gradient,
    "qr_ex": _qr,
    "qr": _qr,
    "qr_backward": _qr_backward,
    "orthonormal_basis": _orthonormal,
    "inverse": _inverse,
    "inverse_ex": _inverse,
    "inverse_basis": _inverse,
}

# Sums and scalings of tokens, which the mode does not count.
WITHOUT_PRODUCTS = (
    "rounded_layer_norm",
    "rounded_layer_norm_backward",
    "frequency_norms",
    "frequency_norms_backward",
    "frequency_filter",
    "frequency_filter_backward",
)

_COUNTER = "torch.utils.flop_counter"


def _register() -> None:
    for name, formula in FORMULAS.items():
        sys.modules[_COUNTER].register_flop_formula(getattr(torch.ops.overtone, name))(_of_shapes(formula))


def _of_shapes(formula: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, out_shape=None, **_: formula(*args)


class _WhenImported(MetaPathFinder):
    """Registers the formulas when somebody imports the counter, which itself imports Triton: we must not."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == _COUNTER else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module) -> None:
            execute(module)
            _register()

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _COUNTER in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WhenImported())
