"""Calls every CPU op, forward and backward, with the sizes, strides and masks where memory errors hide.

A script for processes that watch memory (test_sanitizers.py); that the values are right is for other tests.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from support import shapes

import overtone as ot
from overtone import _C
from overtone.ops import layer_norm, linear
from overtone.ops.linalg.inverse import inverse_ex

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# Around the kernels' blocks of channels, without samples, tokens or channels, and with no leading dimension.
SIZES = [(2, 3, 1), (1, 5, 7), (3, 1, 16), (2, 9, 63), (2, 4, 64), (1, 7, 65), (2, 3, 130), (2, 2, 3, 17), (6, 33)]
EMPTY_SIZES = [(0, 5, 8), (2, 0, 8), (2, 5, 0), (0, 0, 0), (2, 0, 3, 4)]


def exercise(x: torch.Tensor, mask: torch.Tensor | None) -> int:
    """Every op on one input; returns the number of calls."""
    leaf = x.detach().requires_grad_()
    norms = ot.frequency_norms(leaf, mask=mask, backend="cpu")
    (norms.low.sum() + norms.high.sum()).backward()
    calls = 2
    channels = x.shape[-1]
    for low, high in ((0.5, 2.0), (torch.randn(channels, requires_grad=True), torch.randn(2 * channels)[::2])):
        for is_causal in (False, True):
            y = ot.frequency_filter(leaf, low, high, mask=mask, is_causal=is_causal, backend="cpu")
            # The gradient has strides of its own: those of an expanded tensor, then those of a transposed one.
            y.sum().backward(retain_graph=True)
            y.backward(torch.ones_like(y).transpose(-1, -2).contiguous().transpose(-1, -2))
            calls += 3
    return calls


# (batch, heads, queries, keys, width, channels): around the kernels' strips and blocks, and with nothing in them.
ATTENTION_SIZES = [(1, 1, 1, 1, 1, 1), (2, 3, 25, 49, 17, 5), (1, 2, 49, 23, 72, 65), (1, 1, 30, 481, 16, 16)]
EMPTY_ATTENTION_SIZES = [(0, 2, 3, 4, 5, 6), (1, 2, 0, 4, 5, 6), (1, 2, 3, 0, 5, 6), (1, 2, 3, 4, 5, 0)]


def exercise_attention(size: tuple[int, ...], dtype: torch.dtype, strided: bool) -> int:
    """spectral_attention with every mask, causal or not; returns the number of calls."""
    _, heads, queries, keys, _, _ = size
    layout = "channels_strided" if strided else "offset"
    inputs = attention_inputs(size, dtype, itertools.repeat(layout))
    bias = torch.randn(heads, 1, keys).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    calls = 0
    for mask in (None, torch.rand(queries, keys) > 0.5, bias):
        for is_causal in (False, True):
            attend_there_and_back(inputs, mask, is_causal)
            calls += 2
    return calls


def attention_inputs(size: tuple[int, ...], dtype: torch.dtype, layouts: Iterator[str]) -> tuple[torch.Tensor, ...]:
    """query, key, value, eigenvalues, basis and residual, each but the eigenvalues in the next layout."""
    batch, heads, queries, keys, width, channels = size

    def random(*shape: int) -> torch.Tensor:
        return shapes.with_layout(torch.randn(shape).to(dtype), next(layouts)).detach().requires_grad_()

    query, key, value = (random(batch, heads, n, width) for n in (queries, keys, keys))
    eigenvalues = torch.randn(heads * width).to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    return query, key, value, eigenvalues, random(heads * width, channels), random(batch, queries, channels)


def attend_there_and_back(inputs: tuple[torch.Tensor, ...], mask: torch.Tensor | None, is_causal: bool) -> None:
    *rest, residual = inputs
    y, norms = ot.spectral_attention(
        *rest, residual=residual, attn_mask=mask, is_causal=is_causal, return_norms=True, backend="cpu"
    )
    (y.float().sum() + norms.high.sum()).backward()


# Calls of fuzz_attention at each level: a second or two under the sanitizers.
FUZZ_CALLS = 60


@seed(0)
@settings(max_examples=FUZZ_CALLS, deadline=None, database=None, phases=[Phase.generate])
@given(
    size=st.tuples(
        st.integers(0, 2), st.integers(1, 3), st.integers(0, 130), st.integers(0, 130), st.integers(1, 70),
        st.integers(0, 70),
    ),
    dtype=st.sampled_from(DTYPES),
    layouts=st.lists(st.sampled_from(shapes.LAYOUTS), min_size=5, max_size=5),
    mask=st.sampled_from(["none", "bool", "bias"]),
    mask_dims=st.tuples(*(st.booleans() for _ in range(4))),
    mask_layout=st.sampled_from(shapes.LAYOUTS),
    is_causal=st.booleans(),
)  # fmt: skip
def fuzz_attention(size, dtype, layouts, mask, mask_dims, mask_layout, is_causal):
    """spectral_attention with any sizes, every tensor in a layout of its own, and a mask broadcast in any dimension."""
    batch, heads, queries, keys, _, _ = size
    attn_mask = None
    if mask != "none":
        full = (batch, heads, queries, keys)
        shape = [n if is_full else 1 for n, is_full in zip(full, mask_dims, strict=True)]
        values = torch.randn(shape).to(torch.promote_types(dtype, torch.float32))
        values = values > 0 if mask == "bool" else values
        attn_mask = shapes.with_layout(values, mask_layout).detach().requires_grad_(mask == "bias")
    attend_there_and_back(attention_inputs(size, dtype, iter(layouts)), attn_mask, is_causal)


# (batch, n): around the lanes, the blocks of rows and the change to LAPACK; nothing in them.
EIGH_SIZES = [(1, 1), (3, 2), (33, 3), (17, 4), (9, 8), (40, 16), (5, 17), (33, 33), (2, 70), (0, 4), (3, 0)]


def exercise_eigh(size: tuple[int, int], dtype: torch.dtype) -> int:
    """eigh and eigvalsh, forward and backward, every layout, equal eigenvalues and a bad member too; the calls."""
    batch, n = size
    calls = 0
    for layout in shapes.LAYOUTS:
        a = torch.randn(batch, n, n).to(dtype)
        a[:1] = torch.eye(n)
        a[2:3] = float("nan")
        leaf = shapes.with_layout(a, layout).detach().requires_grad_()
        for uplo in ("L", "U"):
            values, vectors, _ = ot.linalg.eigh_ex(leaf, uplo, backend="cpu")
            (values.nan_to_num().sum() + (vectors * values[..., None, :]).nan_to_num().square().sum()).backward()
            ot.linalg.eigvalsh_ex(leaf.detach(), uplo, backend="cpu")
            calls += 3
    return calls


# (batch, n): around the lanes, the blocks of reflectors and vectors, matrices reduced by rows, and LAPACK.
EIG_SIZES = [(1, 1), (3, 2), (33, 3), (17, 4), (9, 5), (18, 21), (5, 33), (9, 81), (1, 100), (0, 4), (3, 0)]


def exercise_eig(size: tuple[int, int], dtype: torch.dtype) -> int:
    """eig and eigvals, forward and backward: strides, isolated eigenvalues, bad scales and members; the calls."""
    batch, n = size
    calls = 0
    for layout in ("contiguous", "transposed", "offset"):
        a = torch.randn(batch, n, n).to(dtype)
        a[:1] = a[:1].tril()
        a[1:2] *= torch.logspace(-6, 6, n, dtype=dtype)
        a[2:3] = float("nan")
        a[3:4] *= torch.finfo(dtype).tiny
        leaf = shapes.with_layout(a, layout).detach().requires_grad_()
        values, vectors, info = ot.linalg.eig_ex(leaf, backend="cpu")
        with contextlib.suppress(torch.linalg.LinAlgError):  # a matrix that is defective to rounding
            (values[4:].abs().sum() + vectors[4:].abs().square().sum()).backward()
        ot.linalg.eigvals_ex(leaf.detach(), backend="cpu")
        ot.linalg.eigvals_ex(leaf.detach().softmax(-1), row_stochastic=True, backend="cpu")
        calls += 4
    return calls


# Around the lanes' groups and the blocks of columns of QR, tall, wide, and with nothing in them.
QR_SIZES = [(1, 1, 1), (17, 5, 5), (3, 40, 40), (2, 41, 41), (2, 7, 3), (2, 3, 7), (1, 33, 97), (1, 97, 33)]
EMPTY_QR_SIZES = [(0, 3, 3), (2, 0, 0), (2, 3, 0), (2, 0, 3)]


def exercise_qr(size: tuple[int, ...], dtype: torch.dtype, layout: str) -> int:
    """qr in every mode and, of square matrices, their inverses; returns the number of calls."""
    a = shapes.with_layout(torch.randn(size).to(dtype), layout).detach().requires_grad_()
    calls = 2
    for mode in ("complete", "r"):
        ot.linalg.qr(a, mode, backend="cpu")
    q, r = ot.linalg.qr(a, backend="cpu")
    (q.sum() + r.mT.contiguous().mT.sum()).backward()
    if size[-1] == size[-2]:
        inverse_ex(a, backend="cpu").inverse.sum().backward()
        calls += 1
    return calls + 2


# (tokens, inputs, hidden, outputs): around vectors, blocks of channels and of tokens, and no tokens.
LINEAR_SIZES = [(1, 1, 1, 1), (129, 17, 50, 9), (113, 48, 193, 33), (0, 5, 6, 7), (260, 96, 97, 16)]


def exercise_linear(size: tuple[int, ...], dtype: torch.dtype, layout: str) -> int:
    """linear and mlp there and back; returns the number of calls."""
    tokens, inputs, hidden, outputs = size
    x, w1, w2 = (
        shapes.with_layout(torch.randn(rows, columns).to(dtype), layout).requires_grad_()
        for rows, columns in ((tokens, inputs), (hidden, inputs), (outputs, hidden))
    )
    b1, b2 = (torch.randn(2 * n, dtype=dtype)[::2].requires_grad_() for n in (hidden, outputs))
    wide = torch.promote_types(dtype, torch.float32)
    residual = shapes.with_layout(torch.randn(tokens, outputs, dtype=wide), layout).requires_grad_()
    linear.linear(x, w1, b1, backend="cpu").sum().backward()
    linear.linear(x, w1.to(wide), backend="cpu").sum().backward()
    linear.mlp(x, w1, b1, w2, b2, residual=residual, backend="cpu").sum().backward()
    with torch.no_grad():
        linear.mlp(x, w1, b1, w2, b2, backend="cpu")
    return 7


def exercise_layer_norm(size: tuple[int, ...]) -> int:
    *_, channels = size
    x, weight, bias = (torch.randn(shape, requires_grad=True) for shape in (size, channels, channels))
    layer_norm.rounded_layer_norm(x, weight, bias).sum().backward()
    return 2


# Levels that multiply bfloat16; all their other kernels are those of another level.
BF16_LEVELS = ("avx512_bf16", "amx", "avx512_bf16_emulated", "amx_emulated")


def exercise_bfloat16() -> int:
    """What multiplies bfloat16: the machine's own instructions, if it has them, and emulated ones."""
    calls = 0
    for level in BF16_LEVELS:
        if not level.endswith("emulated") and level not in _C.available_isas():
            continue
        _C.set_isa(level)
        for size in LINEAR_SIZES:
            calls += sum(exercise_linear(size, torch.bfloat16, layout) for layout in shapes.LAYOUTS)
        assert _C.last_kernel().endswith(f"/{level}"), (_C.last_kernel(), level)
        fuzz_attention()
        calls += 2 * FUZZ_CALLS
        for size in ATTENTION_SIZES + EMPTY_ATTENTION_SIZES:
            calls += sum(exercise_attention(size, torch.bfloat16, strided) for strided in (False, True))
        assert _C.last_kernel().endswith(f"/{level}"), (_C.last_kernel(), level)
    return calls


def main() -> None:
    calls = exercise_bfloat16()
    for level in _C.available_isas():
        if level in BF16_LEVELS:
            continue
        _C.set_isa(level)
        for dtype, size, layout in itertools.product(DTYPES, SIZES + EMPTY_SIZES, shapes.LAYOUTS):
            x = shapes.with_layout(torch.randn(size).to(dtype), layout)
            generator = torch.Generator().manual_seed(0)
            for mask in (None, shapes.random_mask(size[:-1], generator), torch.zeros(size[:-1], dtype=torch.bool)):
                calls += exercise(x, mask)
        calls += sum(exercise_layer_norm(size) for size in SIZES + EMPTY_SIZES if size[-1] > 0)
        calls += sum(exercise_eig(size, dtype) for size in EIG_SIZES for dtype in DTYPES[:2])
        calls += sum(exercise_eigh(size, dtype) for size in EIGH_SIZES for dtype in DTYPES[:2])
        for size, dtype in itertools.product(ATTENTION_SIZES + EMPTY_ATTENTION_SIZES, DTYPES):
            calls += sum(exercise_attention(size, dtype, strided) for strided in (False, True))
        for size, dtype in itertools.product(LINEAR_SIZES, DTYPES):
            calls += sum(exercise_linear(size, dtype, layout) for layout in shapes.LAYOUTS)
        fuzz_attention()
        calls += 2 * FUZZ_CALLS
        for size, dtype in itertools.product(QR_SIZES + EMPTY_QR_SIZES, (torch.float32, torch.float64)):
            calls += sum(exercise_qr(size, dtype, layout) for layout in shapes.LAYOUTS)
        assert _C.last_kernel().endswith(f"/{level}"), (_C.last_kernel(), level)
    print(f"{calls} calls at {', '.join(_C.available_isas())}; sanitizers: {_C.build_info()['sanitizers']}")


if __name__ == "__main__":
    main()
