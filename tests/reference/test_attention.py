"""spectral_attention's reference against loops in float64 and the exact oracles of MATH §7, and its public contract."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import overtone as ot
from overtone import reference
from overtone.ops.attention import spectral_attention

HALVES = (torch.bfloat16, torch.float16)
B, H, N, M, D, E = 2, 3, 5, 7, 4, 6


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(n=N, m=M, dtype=torch.float64, batch=B, heads=H, width=D, out=E):
    """query, key, value, eigenvalues, basis"""
    keys = batch, heads, m, width
    sizes = (batch, heads, n, width), keys, keys, (heads * width,), (heads * width, out)
    return [randn(*size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]


def by_hand(query, key, value, eigenvalues, basis, residual=None, bias=None, scale=None, head_gain=None):
    """The formula, entry by entry; `bias` is [B, H, N, M], −inf where a key takes no part."""
    batch, heads, n, width = query.shape
    m = key.shape[2]
    y = torch.zeros(batch, n, basis.shape[1], dtype=torch.float64) if residual is None else residual.clone()
    scale = 1 / math.sqrt(width) if scale is None else scale
    for b in range(batch):
        for h in range(heads):
            rows = slice(h * width, (h + 1) * width)
            for i in range(n):
                keys = [j for j in range(m) if bias is None or bias[b, h, i, j] != -math.inf]
                if not keys:
                    continue
                logits = [
                    scale * float(query[b, h, i] @ key[b, h, j]) + (float(bias[b, h, i, j]) if bias is not None else 0)
                    for j in keys
                ]
                powers = [math.exp(logit - max(logits)) for logit in logits]
                out = sum(p / sum(powers) * value[b, h, j] for p, j in zip(powers, keys, strict=True))
                if head_gain is not None:
                    mean = sum(value[b, h, j] for j in keys) / len(keys)
                    out = (1 + head_gain[h]) * out - head_gain[h] * mean
                y[b, i] += (out * eigenvalues[rows]) @ basis[rows]
    return y


def future(n, m):
    return torch.tensor([[-math.inf if j > i else 0.0 for j in range(m)] for i in range(n)], dtype=torch.float64)


class TestFormula:
    def test_plain(self):
        args = inputs()
        torch.testing.assert_close(reference.spectral_attention(*args), by_hand(*args))

    def test_residual_scale_and_gain(self):
        args, residual, gain = inputs(), randn(B, N, E, seed=8), randn(H, seed=9)
        ours = reference.spectral_attention(*args, residual=residual, scale=0.3, head_gain=gain)
        torch.testing.assert_close(ours, by_hand(*args, residual=residual, scale=0.3, head_gain=gain))

    @pytest.mark.parametrize("n, m", [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
    def test_causal_is_aligned_at_the_top_left(self, n, m):
        args = inputs(n, m)
        ours = reference.spectral_attention(*args, is_causal=True)
        torch.testing.assert_close(ours, by_hand(*args, bias=future(n, m).expand(B, H, n, m)))
        heads = torch.nn.functional.scaled_dot_product_attention(*args[:3], is_causal=True)
        projected = (heads.transpose(1, 2).flatten(2) * args[3]) @ args[4]
        torch.testing.assert_close(ours, projected)

    @pytest.mark.parametrize("shape", [(M,), (N, M), (N, 1), (H, 1, M), (B, 1, 1, M), (B, H, N, M), ()])
    @pytest.mark.parametrize("kind", ["bool", "float", "-inf"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_masks(self, shape, kind, is_causal):
        args, gain = inputs(), randn(H, seed=9)
        numbers = randn(*shape, seed=10)
        mask = {
            "bool": numbers > 0,
            "float": numbers,
            "-inf": numbers.masked_fill(numbers < 0, -math.inf),
        }[kind]
        bias = torch.zeros_like(numbers).masked_fill(~mask, -math.inf) if kind == "bool" else mask
        bias = bias.expand(B, H, N, M) + (future(N, M) if is_causal else 0)
        ours = reference.spectral_attention(*args, attn_mask=mask, is_causal=is_causal, head_gain=gain)
        torch.testing.assert_close(ours, by_hand(*args, bias=bias, head_gain=gain))

    def test_norms_are_those_of_y(self):
        y, norms = reference.spectral_attention(*inputs(), return_norms=True)
        mean = y.mean(1, keepdim=True)
        torch.testing.assert_close(norms.low, mean.norm(dim=(1, 2)) * N**0.5)
        torch.testing.assert_close(norms.high, (y - mean).norm(dim=(1, 2)))


class TestOracles:
    def test_zero_eigenvalues_give_the_residual_exactly(self):
        query, key, value, eigenvalues, basis = inputs()
        residual = randn(B, N, E, seed=8)
        y = reference.spectral_attention(query, key, value, 0 * eigenvalues, basis, residual=residual)
        assert torch.equal(y, residual)

    def test_constant_symmetric_spectrum_with_one_head(self):
        """B = V, U = Vᵀ, λ = c: Y = R + c·A X."""
        x, c, width = randn(B, N, E), -0.7, E
        v = torch.linalg.qr(randn(E, E, seed=1)).Q
        query, key = randn(B, 1, N, width, seed=2), randn(B, 1, N, width, seed=3)
        eigenvalues = torch.full((E,), c, dtype=torch.float64)
        y = reference.spectral_attention(query, key, (x @ v)[:, None], eigenvalues, v.T, residual=x)
        a = torch.softmax(query[:, 0] @ key[:, 0].mT / width**0.5, -1)
        torch.testing.assert_close(y, x + c * a @ x)

    @pytest.mark.parametrize("kind", ["symmetric", "general"])
    def test_all_heads_equal_apply_the_composed_weight(self, kind):
        """With the same A in every head the projection is A X W, W = basis_in diag(λ) basis_out."""
        theta, x = randn(H * D, H * D, seed=1), randn(B, N, H * D)
        if kind == "symmetric":
            spectrum = reference.spectrum.symmetric(theta, randn(H * D, seed=2))
        else:
            spectrum = reference.spectrum.general(theta, -torch.rand(H * D, dtype=torch.float64))
        query, key = (randn(B, 1, N, D, seed=seed).expand(B, H, N, D) for seed in (3, 4))
        value = (x @ spectrum.basis_in).unflatten(-1, (H, D)).transpose(1, 2)
        y = reference.spectral_attention(query, key, value, spectrum.eigenvalues, spectrum.basis_out)
        a = torch.softmax(query[:, 0] @ key[:, 0].mT / D**0.5, -1)
        torch.testing.assert_close(y, a @ x @ reference.spectrum.compose(spectrum))

    def test_a_constant_added_to_a_row_of_logits_changes_nothing(self):
        args = inputs()
        shift = 50 * randn(B, H, N, 1, seed=8)
        plain = reference.spectral_attention(*args)
        torch.testing.assert_close(reference.spectral_attention(*args, attn_mask=shift), plain, rtol=1e-11, atol=1e-11)

    def test_permuting_tokens_permutes_y_and_leaves_the_norms_alone(self):
        query, key, value, eigenvalues, basis = inputs(N, N)
        order = torch.tensor([3, 0, 4, 1, 2])
        y, norms = reference.spectral_attention(query, key, value, eigenvalues, basis, return_norms=True)
        permuted = (t[:, :, order] for t in (query, key, value))
        y_permuted, norms_permuted = reference.spectral_attention(*permuted, eigenvalues, basis, return_norms=True)
        torch.testing.assert_close(y_permuted, y[:, order])
        torch.testing.assert_close(norms_permuted, norms)

    def test_zero_queries_average_the_values(self):
        query, key, value, eigenvalues, basis = inputs()
        y = reference.spectral_attention(0 * query, key, value, eigenvalues, basis)
        mean = value.mean(2).flatten(1) * eigenvalues
        torch.testing.assert_close(y, (mean @ basis)[:, None].expand(B, N, E))

    def test_gain_minus_one_leaves_the_mean_and_zero_changes_nothing(self):
        args = inputs()
        minus_one = reference.spectral_attention(*args, head_gain=torch.full((H,), -1.0, dtype=torch.float64))
        uniform = reference.spectral_attention(0 * args[0], *args[1:])
        torch.testing.assert_close(minus_one, uniform)
        zero = reference.spectral_attention(*args, head_gain=torch.zeros(H, dtype=torch.float64))
        torch.testing.assert_close(zero, reference.spectral_attention(*args))

    def test_weights_sum_to_one_with_a_gain_too(self):
        query, key = inputs()[:2]
        for gain in (None, randn(H, seed=9)):
            weights = reference.attention_weights(query, key, is_causal=True, head_gain=gain)
            torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, N, dtype=torch.float64))


class TestGradients:
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    def test_gradcheck(self, is_causal, masked):
        """Every argument, the bias and both norms included; a row without keys and −inf biases too."""
        small = inputs(3, 4, batch=1, heads=2, width=2, out=2)
        args = [*small, randn(1, 3, 2, seed=8), randn(2, 3, 4, seed=9), randn(2, seed=10)]
        if masked:
            args[6][:, 1, :] = -math.inf
            args[6][0, 0, 0] = -math.inf
        differentiable = [t.requires_grad_() for i, t in enumerate(args) if not (masked and i == 6)]

        def call(*tensors):
            given = list(tensors)
            if masked:
                given.insert(6, args[6])
            *first, residual, bias, gain = given
            y, norms = reference.spectral_attention(
                *first, residual=residual, attn_mask=bias, head_gain=gain, is_causal=is_causal, return_norms=True
            )
            return y, *norms

        assert gradcheck(call, differentiable)
        assert gradgradcheck(lambda *t: call(*t)[0], differentiable, fast_mode=True)

    def test_closed_form(self):
        """MATH §2: ∂U = Ōᵀ G, ∂λ = Σ O ⊙ (G Uᵀ), ∂R = G."""
        query, key, value, eigenvalues, basis = inputs()
        residual, grad = randn(B, N, E, seed=8).requires_grad_(), randn(B, N, E, seed=9)
        eigenvalues.requires_grad_(), basis.requires_grad_()
        reference.spectral_attention(query, key, value, eigenvalues, basis, residual=residual).backward(grad)
        o = torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(basis.grad, torch.einsum("bnm,bne->me", o * eigenvalues.detach(), grad))
        torch.testing.assert_close(eigenvalues.grad, (o * (grad @ basis.detach().T)).sum((0, 1)))
        assert torch.equal(residual.grad, grad)

    @pytest.mark.parametrize("how", ["bool", "float"])
    def test_fully_masked_rows_are_zero_with_zero_gradients(self, how):
        args = [t.requires_grad_() for t in inputs()]
        residual, gain = randn(B, N, E, seed=8), randn(H, seed=9)
        mask = torch.ones(N, M, dtype=torch.bool)
        mask[2] = False
        bias = torch.zeros(N, M, dtype=torch.float64).masked_fill(~mask, -math.inf).requires_grad_()
        y = reference.spectral_attention(
            *args, residual=residual, attn_mask=mask if how == "bool" else bias, head_gain=gain
        )
        assert torch.equal(y[:, 2], residual[:, 2])
        y.square().sum().backward()
        assert all(t.grad.isfinite().all() for t in args)
        assert (args[0].grad[:, :, 2] == 0).all()
        if how == "float":
            assert bias.grad.isfinite().all() and (bias.grad[2] == 0).all()

    @pytest.mark.filterwarnings("ignore:Anomaly Detection")
    def test_all_rows_masked(self):
        """Zeros, zero gradients, and no nan on the way to them, which anomaly detection would find."""
        args = [t.requires_grad_() for t in inputs()]
        with torch.autograd.detect_anomaly():
            y, norms = reference.spectral_attention(*args, attn_mask=torch.tensor(False), return_norms=True)
            (y.sum() + norms.low.sum() + norms.high.sum()).backward()
        assert (y == 0).all() and all((t.grad == 0).all() for t in args)


class TestDtypesAndShapes:
    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_types_are_rounded_once(self, dtype):
        args, residual = inputs(50, 65, dtype), randn(B, 50, E, dtype=dtype, seed=8)
        y, norms = reference.spectral_attention(*args, residual=residual, return_norms=True)
        exact, exact_norms = reference.spectral_attention(
            *(t.double() for t in args), residual=residual.double(), return_norms=True
        )
        assert y.dtype == dtype and norms.low.dtype == torch.float32
        single = torch.finfo(torch.float32).eps * exact.abs().max()
        rounding = torch.finfo(dtype).eps / 2 * exact.abs()
        assert ((y.double() - exact).abs() <= rounding + 16 * single).all()
        for ours, truth in zip(norms, exact_norms, strict=True):  # of y before it was rounded
            torch.testing.assert_close(ours.double(), truth, rtol=16 * torch.finfo(torch.float32).eps, atol=0)

    @pytest.mark.parametrize("dtype", HALVES)
    def test_half_gradients_have_their_arguments_dtypes(self, dtype):
        args = [t.requires_grad_() for t in inputs(dtype=dtype)]
        args[3] = args[3].detach().float().requires_grad_()
        reference.spectral_attention(*args).float().square().sum().backward()
        assert all(t.grad.dtype == t.dtype and t.grad.isfinite().all() for t in args)

    def test_large_logits_do_not_overflow(self):
        query, key, *rest = inputs(dtype=torch.float32)
        y = reference.spectral_attention(1e4 * query, 1e4 * key, *rest)
        assert y.isfinite().all()

    def test_strides_do_not_matter(self):
        n = 5
        packed = randn(B, n, 3, H, D)
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # SDPA's layout as views of a packed qkv
        _, _, _, eigenvalues, basis = inputs()
        strided = reference.spectral_attention(query, key, value, eigenvalues.flip(0).flip(0), basis.T.contiguous().T)
        plain = reference.spectral_attention(*(t.contiguous() for t in (query, key, value)), eigenvalues, basis)
        torch.testing.assert_close(strided, plain)

    @pytest.mark.parametrize("batch, n, m", [(0, 5, 7), (2, 0, 7), (2, 1, 1), (0, 0, 0)])
    def test_empty_and_single(self, batch, n, m):
        args = [t.requires_grad_() for t in inputs(n, m, batch=batch)]
        y, norms = reference.spectral_attention(*args, is_causal=True, return_norms=True)
        assert y.shape == (batch, n, E) and norms.low.shape == (batch,)
        y.sum().backward()
        assert all(t.grad.shape == t.shape for t in args)

    def test_no_keys_is_a_fully_masked_row(self):
        assert (reference.spectral_attention(*inputs(3, 0)) == 0).all()

    def test_one_token_attends_to_itself(self):
        query, key, value, eigenvalues, basis = inputs(1, 1)
        y = reference.spectral_attention(query, key, value, eigenvalues, basis)
        torch.testing.assert_close(y[:, 0], (value[:, :, 0].flatten(1) * eigenvalues) @ basis)


class TestContract:
    def test_the_reference_as_a_backend(self):
        args, mask = inputs(dtype=torch.float32), randn(N, M, dtype=torch.float32, seed=8)
        y, norms = spectral_attention(*args, attn_mask=mask, return_norms=True, backend="reference")
        wanted, wanted_norms = reference.spectral_attention(*args, attn_mask=mask, return_norms=True)
        assert torch.equal(y, wanted) and torch.equal(norms.high, wanted_norms.high)

    def test_a_backend_without_the_kernel_raises(self):
        with pytest.raises(ot.BackendError, match="no cuda kernel for spectral_attention"):
            spectral_attention(*inputs(), backend="cuda")

    def wrong(position, value):
        return lambda args, options: (args[:position] + [value(args[position])] + args[position + 1 :], options)

    def option(**options):
        return lambda args, _: (args, options)

    @pytest.mark.parametrize(
        "change, message",
        [
            (wrong(0, lambda t: t[0]), r"query: got torch.float64 of shape \[3, 5, 4\].*wanted .*\[B, H, N, D\]"),
            (wrong(0, lambda t: t.long()), r"query: got torch.int64.*wanted a floating-point tensor"),
            (wrong(0, lambda t: t[..., :0]), r"query: got .*\[2, 3, 5, 0\].*wanted .*D ≥ 1"),
            (wrong(0, lambda t: [1.0]), r"query: got list.*wanted a floating-point tensor"),
            (wrong(1, lambda t: t[:, :2]), r"key: got .*\[2, 2, 7, 4\].*wanted .*\[2, 3, M, 4\]"),
            (wrong(1, lambda t: t.float()), r"key: got torch.float32.*wanted torch.float64"),
            (wrong(1, lambda t: t.to("meta")), r"key: got .* on meta, wanted .* on cpu"),
            (wrong(2, lambda t: t[:, :, :6]), r"value: got .*\[2, 3, 6, 4\].*wanted .*\[2, 3, 7, 4\]"),
            (wrong(3, lambda t: t[:4]), r"eigenvalues: got .*\[4\].*wanted .*\[12\]"),
            (wrong(4, lambda t: t[:4]), r"basis: got .*\[4, 6\].*wanted .*\[12, E\]"),
            (option(residual=torch.zeros(B, N, E + 1).double()), r"residual: got .*\[2, 5, 7\].*wanted .*\[2, 5, 6\]"),
            (option(head_gain=torch.zeros(2).double()), r"head_gain: got .*\[2\].*wanted .*\[3\]"),
            (
                option(attn_mask=torch.zeros(N, N).double()),
                r"attn_mask: got .*\[5, 5\].*broadcastable to \[2, 3, 5, 7\]",
            ),
            (
                option(attn_mask=torch.zeros(N, M).int()),
                r"attn_mask: got torch.int32.*wanted torch.bool or torch.float64",
            ),
            (option(scale="large"), r"scale: got str 'large', wanted a number, or None"),
            (option(is_causal=1), r"is_causal: got int 1, wanted True or False"),
            (option(return_norms=None), r"return_norms: got NoneType None, wanted True or False"),
        ],
    )
    def test_errors_name_the_argument(self, change, message):
        args, options = change(inputs(), {})
        with pytest.raises((TypeError, ValueError), match="spectral_attention: " + message):
            spectral_attention(*args, **options)

    def test_autocast_casts_query_key_and_value_and_nothing_else(self):
        args = inputs(dtype=torch.float32)
        gain = randn(H, dtype=torch.float32, seed=9)
        residual = randn(B, N, E, dtype=torch.float32, seed=8)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, norms = spectral_attention(
                *args, residual=residual, head_gain=gain, return_norms=True, backend="reference"
            )
        query, key, value = (x.bfloat16() for x in args[:3])
        wanted, wanted_norms = reference.spectral_attention(
            query, key, value, *args[3:], residual=residual, head_gain=gain, return_norms=True
        )
        assert y.dtype == torch.float32 and torch.equal(y, wanted)  # as the residual
        assert norms.low.dtype == torch.float32 and torch.equal(norms.low, wanted_norms.low)

    def test_autocast_leaves_float64_alone(self):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = spectral_attention(*inputs(), backend="reference")
        assert torch.equal(y, reference.spectral_attention(*inputs()))

    def test_traces_into_one_graph(self):
        """fullgraph with dynamic shapes; aot_eager keeps the arithmetic, so the numbers are eager's."""
        torch._dynamo.reset()
        compiled = torch.compile(spectral_attention, fullgraph=True, dynamic=True, backend="aot_eager")
        for n, m in ((5, 7), (6, 9)):
            args = [t.requires_grad_() for t in inputs(n, m)]
            mask = randn(m, seed=8) > 0
            ours, norms = compiled(*args, attn_mask=mask, is_causal=True, return_norms=True)
            grads = torch.autograd.grad(ours.sum() + norms.high.sum(), args)
            eager, eager_norms = spectral_attention(*args, attn_mask=mask, is_causal=True, return_norms=True)
            wanted = torch.autograd.grad(eager.sum() + eager_norms.high.sum(), args)
            torch.testing.assert_close((ours, norms.low, grads), (eager, eager_norms.low, wanted))
