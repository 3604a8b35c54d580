"""bfloat16 attention by products of bfloat16, vdpbf16ps' and AMX's: by the machine's own where it has them, and
everywhere with these instructions written out in C++, which tests all that surrounds them.

The products take bfloat16, so softmax weights, heads and their gradients are rounded to it. That is what plain PyTorch
does in bfloat16, and its errors, not the smaller ones of our float32 kernels, are the measure here.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.test_attention import as_call, random_call
from support import accuracy, repeat

import overtone as ot
from overtone import _extension, reference

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def plain_attention(
    query, key, value, eigenvalues, basis, *, residual, attn_mask, head_gain, return_norms, **options
):  # fmt: skip
    """What one writes in PyTorch: every product takes and gives tensors of the inputs' dtype."""
    weights = reference.attention_weights(query, key, attn_mask=attn_mask, head_gain=head_gain, **options)
    heads = (weights.to(value.dtype) @ value).transpose(1, 2).flatten(2)
    y = (heads * eigenvalues.to(heads.dtype)) @ basis
    y = y if residual is None else residual + y
    wide = y if y.dtype == torch.float64 else y.float()
    return (y, reference.frequency_norms(wide)) if return_norms else y


def check(args, return_norms=True, more_draws=(), **options):
    accuracy.check_against_truth(
        as_call(ot.spectral_attention, return_norms, backend="cpu", **options),
        as_call(plain_attention, return_norms, **options),
        args,
        more_draws=more_draws,
    )


def bfloat16_call(**options):
    return random_call(dtype=torch.bfloat16, **options)


def draws(count=5, **options):
    """Arguments, and more of their kind: norms are few numbers, whose errors in one draw say little."""
    return [bfloat16_call(seed=seed, **options) for seed in range(count)]


@pytest.mark.usefixtures("poisoned_empty")
class TestExactness:
    @pytest.mark.parametrize("tokens", [2, 15, 16, 17, 32, 33, 65, 197])
    def test_tokens(self, bf16_level, cpu_kernels, tokens):
        args, *more = draws(queries=tokens, keys=tokens, width=64, channels=48)
        check(args, more_draws=more)
        assert cpu_kernels.last_kernel() == f"spectral_attention_backward/{bf16_level}"

    @pytest.mark.parametrize("width", [1, 16, 24, 32, 72, 80, 88, 128])
    def test_widths(self, bf16_level, width):
        args, *more = draws(width=width, channels=width + 3)
        check(args, more_draws=more)

    @pytest.mark.parametrize("queries, keys", [(2, 40), (40, 2), (100, 17), (17, 100)])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_different_lengths(self, bf16_level, queries, keys, is_causal):
        args, *more = draws(queries=queries, keys=keys)
        check(args, is_causal=is_causal, more_draws=more)

    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_masks_and_gain(self, bf16_level, mask, is_causal):
        args, *more = draws(9, mask=mask, gain=True)
        check(args, is_causal=is_causal, more_draws=more)

    @pytest.mark.parametrize("queries, keys", [(40, 1100), (1100, 40), (700, 600)])
    def test_more_tokens_than_a_block(self, bf16_level, queries, keys):
        """Above 512 tokens softmax is collected over blocks of keys, and gradients over blocks of queries."""
        args, *more = draws(3, batch=1, queries=queries, keys=keys)
        check(args, is_causal=queries > keys, more_draws=more)

    def test_more_tokens_than_a_sum(self, bf16_level):
        """Above 2048 tokens the basis' gradient is collected over parts of the batch."""
        args, *more = draws(3, batch=33, queries=65, keys=9, heads=1, width=8, channels=5)
        check(args, more_draws=more)

    def test_packed_views(self, bf16_level):
        args, *more = draws(packed=True, width=64)
        check(args, more_draws=more)

    @pytest.mark.parametrize("scale", [-0.4, 0.0, 0.3])
    def test_scale(self, bf16_level, scale):
        args, *more = draws(residual=False)
        check(args, scale=scale, return_norms=False, more_draws=more)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(0, 3), heads=st.integers(1, 3), queries=st.integers(0, 60), keys=st.integers(2, 60),
    width=st.integers(1, 70), channels=st.integers(0, 60), mask=st.sampled_from(["none", "bool", "bias"]),
    is_causal=st.booleans(),
)  # fmt: skip
def test_any_shape(poisoned_empty, bf16_level, is_causal, **shape):
    args, *more = draws(9, **shape)
    check(args, is_causal=is_causal, more_draws=more)


class TestSpecialValues:
    def test_a_single_key_gives_its_value_and_no_gradient_to_the_logits(self, bf16_level):
        """Softmax of one logit is 1; what is left is rounding of float32 sums of products of order one."""
        query, key, value, eigenvalues, _, _, _, _ = bfloat16_call(queries=4, keys=1, width=64)
        basis = torch.eye(128, dtype=torch.bfloat16)
        y = ot.spectral_attention(query, key, value, torch.ones_like(eigenvalues), basis, backend="cpu")
        assert torch.equal(y, value.transpose(1, 2).flatten(2).expand_as(y))
        for gradient in torch.autograd.grad(y.sum(), (query, key)):
            assert gradient.abs().max() < 64 * 8 * torch.finfo(torch.float32).eps

    def test_no_keys(self, bf16_level):
        query, _, _, eigenvalues, basis, residual, _, _ = bfloat16_call()
        empty = torch.zeros(2, 2, 0, 16, dtype=torch.bfloat16, requires_grad=True)
        y = ot.spectral_attention(query, empty, empty, eigenvalues, basis, residual=residual, backend="cpu")
        assert torch.equal(y, residual)
        (gradient,) = torch.autograd.grad(y.sum(), query)
        assert torch.equal(gradient, torch.zeros_like(gradient))

    def test_fully_masked_rows_are_zero_and_send_nothing_back(self, bf16_level):
        query, key, value, eigenvalues, basis, _, _, _ = bfloat16_call()
        mask = torch.ones(33, 33, dtype=torch.bool)
        mask[5] = False
        y = ot.spectral_attention(query, key, value, eigenvalues, basis, attn_mask=mask, backend="cpu")
        assert torch.equal(y[:, 5], torch.zeros_like(y[:, 5]))
        gradients = torch.autograd.grad(y[:, 5].sum(), (query, key, value), retain_graph=True)
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)

    @pytest.mark.parametrize("shift", [300.0, -300.0])
    def test_large_logits(self, bf16_level, shift):
        """The keys that only fill a tile up have logits of zero: they must not count where others are far below."""
        args = list(bfloat16_call(queries=17, keys=17, mask="bias"))
        args[6] = (args[6].detach().float() + shift).requires_grad_()
        check(tuple(args), more_draws=draws(4, queries=17, keys=17, mask="bias"))

    @pytest.mark.parametrize("offset", [-1e6, 1e4, 1e6])
    @pytest.mark.parametrize("logits", [0.0, 1.0])
    def test_large_biases(self, bf16_level, offset, logits):
        """A float32 bias of order one on top of a common one loses no digits that PyTorch keeps."""

        def draw(seed):
            args = list(bfloat16_call(mask="bias", seed=seed))
            args[0] = (args[0].detach() * logits).requires_grad_()
            args[6] = (args[6].detach().float() + offset).requires_grad_()
            return tuple(args)

        check(draw(0), more_draws=[draw(seed) for seed in range(1, 5)])

    def test_a_nan_query_stays_in_its_row(self, bf16_level):
        args = list(bfloat16_call())
        args[0] = args[0].detach().clone()
        args[0][0, 1, 7, 3] = torch.nan
        y = as_call(ot.spectral_attention, return_norms=False, backend="cpu")(*args)
        assert y[0, 7].isnan().all()
        assert y.isfinite().all(-1).sum() == 2 * 33 - 1


class TestRepeatability:
    def test_bit_equal_over_repeats_and_threads(self, bf16_level):
        args = bfloat16_call(batch=3, queries=70, keys=70, width=64)
        repeat.check_bit_equal(as_call(ot.spectral_attention, backend="cpu"), args)

    def test_only_needed_gradients(self, bf16_level):
        """Each gradient alone is bit for bit what it is beside the others."""
        args = bfloat16_call(mask="bias")
        call = as_call(ot.spectral_attention, return_norms=False, backend="cpu")
        wanted = [x for x in args if x is not None]
        together = torch.autograd.grad(call(*args).float().square().sum(), wanted)
        for index, all_at_once in enumerate(together):
            alone = [x if x is None else x.detach().requires_grad_(i == index) for i, x in enumerate(args)]
            (gradient,) = torch.autograd.grad(call(*alone).float().square().sum(), [alone[index]])
            assert torch.equal(gradient, all_at_once), index


def test_other_dtypes_run_on_vectors(bf16_level, cpu_kernels):
    y = as_call(ot.spectral_attention, backend="cpu")(*random_call())
    vectors = "baseline" if bf16_level.endswith("emulated") else "avx512"
    assert cpu_kernels.last_kernel() == f"spectral_attention/{vectors}"
    assert y[0].isfinite().all()


def test_emulation_is_never_chosen_by_itself():
    assert not any("emulated" in level for level in _extension.module.available_isas())
