"""What spectral_attention adds to attention: gain and addend of the heads, bias and sample_scale of the projection, and
float32 residuals beside bf16 and fp16 queries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ops.test_attention import DTYPES, random_call
from support import accuracy, compiling, repeat

import overtone as ot
from overtone.ops import attention

pytestmark = pytest.mark.usefixtures("cpu_kernels")

TERMS = ("gain", "addend", "bias", "sample_scale")
# How the addend is broadcast: in full, one for all tokens (a mean of values), one for all samples and heads.
ADDENDS = ("full", "token", "shared", "none")


def random_terms(batch=2, heads=2, queries=33, width=16, channels=24, dtype=torch.float32, addend="full", seed=0,
                 **_):  # fmt: skip
    generator = torch.Generator().manual_seed(100 + seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def random(*shape, dtype=wide):
        return torch.randn(shape, generator=generator).to(dtype)

    shapes = {"full": (batch, heads, queries, width), "token": (batch, heads, 1, width), "shared": (queries, width)}
    terms = {
        "gain": random(heads),
        "addend": None if addend == "none" else random(*shapes[addend], dtype=dtype),
        "bias": random(channels),
    }
    terms = {name: x if x is None else x.requires_grad_() for name, x in terms.items()}
    return terms | {"sample_scale": torch.rand(batch, generator=generator).to(wide) * 2}


def call_with_terms(residual_dtype=None, seed=0, addend="full", **options):
    args = list(random_call(seed=seed, **options))
    if residual_dtype is not None and args[5] is not None:
        args[5] = args[5].detach().to(residual_dtype).requires_grad_()
    return *args, *random_terms(seed=seed, addend=addend, **options).values()


def as_call(function, return_norms=True, **options):
    """Of the arguments of call_with_terms, the outputs in one tuple."""

    def call(query, key, value, eigenvalues, basis, residual, attn_mask, head_gain, *terms):
        result = function(
            query, key, value, eigenvalues, basis, residual=residual, attn_mask=attn_mask, head_gain=head_gain,
            return_norms=return_norms, **dict(zip(TERMS, terms, strict=True)), **options,
        )  # fmt: skip
        return (result[0], *result[1]) if return_norms else result

    return call


def check(draw, return_norms=True, draws=5, **options):
    args, *more = (draw(seed) for seed in range(draws))
    accuracy.check_against_truth(
        as_call(ot.spectral_attention, return_norms, backend="cpu", **options),
        as_call(ot.reference.spectral_attention, return_norms, **options),
        args,
        more_draws=more,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestExactness:
    @pytest.mark.parametrize("addend", ADDENDS)
    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    def test_every_term(self, isa_level, dtype, addend, mask):
        check(lambda seed: call_with_terms(dtype=dtype, addend=addend, mask=mask, channels=37, seed=seed))

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_with_head_gain(self, dtype, is_causal):
        for mask in ("none", "bool", "bias"):
            check(lambda seed, m=mask: call_with_terms(dtype=dtype, gain=True, mask=m, seed=seed), is_causal=is_causal)

    @pytest.mark.parametrize("addend", ["full", "token"])
    def test_more_keys_than_a_block(self, isa_level, dtype, addend):
        """There δ comes from ∂O · (O − addend)."""
        sizes = {"batch": 1, "queries": 70, "keys": 600, "width": 32}
        check(lambda seed: call_with_terms(dtype=dtype, addend=addend, seed=seed, **sizes))

    @pytest.mark.parametrize("keys", [33, 600])
    def test_a_gain_of_zero_and_of_minus_one(self, dtype, keys):
        """Attention that is switched off still says how y would change with its gain; V − A V is a Laplacian head."""

        def draw(seed):
            *rest, gain, addend, bias, sample_scale = call_with_terms(dtype=dtype, keys=keys, seed=seed)
            with torch.no_grad():
                gain.copy_(torch.tensor([0.0, -1.0]))
            return *rest, gain, addend, bias, sample_scale

        check(draw)

    def test_a_float32_residual(self, isa_level, dtype):
        """y and its norms are then float32 too, and nothing is rounded on the way."""
        wide = torch.promote_types(dtype, torch.float32)
        for tokens in (17, 197):
            args = call_with_terms(dtype=dtype, residual_dtype=wide, queries=tokens, keys=tokens, channels=70)
            assert as_call(ot.spectral_attention, backend="cpu")(*args)[0].dtype == wide
            check(lambda seed, n=tokens: call_with_terms(
                dtype=dtype, residual_dtype=wide, queries=n, keys=n, channels=70, seed=seed
            ))  # fmt: skip

    @pytest.mark.parametrize("batch", [1, 9])
    def test_norms_are_the_same_without_gradients(self, dtype, batch):
        for residual_dtype in (None, torch.promote_types(dtype, torch.float32)):
            args = call_with_terms(dtype=dtype, residual_dtype=residual_dtype, batch=batch, queries=197, keys=20)
            call = as_call(ot.spectral_attention, backend="cpu")
            with torch.no_grad():
                alone = call(*args)
            assert all(map(torch.equal, alone, call(*args)))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(0, 3), heads=st.integers(1, 3), queries=st.integers(0, 60), keys=st.integers(0, 60),
    width=st.integers(1, 70), channels=st.integers(0, 60), dtype=st.sampled_from(DTYPES),
    mask=st.sampled_from(["none", "bool", "bias"]), addend=st.sampled_from(ADDENDS), is_causal=st.booleans(),
    wide_residual=st.booleans(),
)  # fmt: skip
def test_any_shape(poisoned_empty, is_causal, wide_residual, **options):
    residual_dtype = torch.promote_types(options["dtype"], torch.float32) if wide_residual else None
    # keys = 1: softmax of one logit is 1, and the gradient of the logits rounding
    options["keys"] += options["keys"] == 1
    check(
        lambda seed: call_with_terms(residual_dtype, seed, **options), draws=9, is_causal=is_causal
    )  # fmt: skip


class TestFormulas:
    """Exactly what the terms say, in terms of the op without them."""

    def call(self, **options):
        query, key, value, eigenvalues, basis, residual, *_ = (
            x if x is None else x.detach() for x in random_call(dtype=torch.float64, **options)
        )
        return (query, key, value, eigenvalues, basis), residual

    def test_gain(self):
        args, _ = self.call()
        y = ot.spectral_attention(*args, gain=torch.tensor([2.0, -1.0]).double())
        scaled = args[3].clone().view(2, 16) * torch.tensor([[2.0], [-1.0]])
        torch.testing.assert_close(y, ot.spectral_attention(*args[:3], scaled.flatten(), args[4]))

    def test_addend(self):
        args, residual = self.call()
        addend = torch.randn(2, 2, 33, 16).double()
        y = ot.spectral_attention(*args, addend=addend)
        projected = (addend.transpose(1, 2).flatten(2) * args[3]) @ args[4]
        torch.testing.assert_close(y, ot.spectral_attention(*args) + projected)

    def test_bias_and_sample_scale(self):
        args, residual = self.call()
        bias, scale = torch.randn(24).double(), torch.tensor([0.0, 1.5]).double()
        y = ot.spectral_attention(*args, residual=residual, bias=bias, sample_scale=scale)
        torch.testing.assert_close(y, residual + scale[:, None, None] * (ot.spectral_attention(*args) + bias))
        assert torch.equal(y[0], residual[0])

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    @pytest.mark.parametrize("queries, keys", [(33, 33), (20, 33), (33, 20)])
    def test_head_gain_is_one_call(self, is_causal, mask, queries, keys, cpu_kernels):
        """The reference writes (1 + ω) A − ω Π out; the op gets 1 + ω, and −ω Π V as its addend."""
        args = [x if x is None else x.detach() for x in random_call(
            dtype=torch.float64, mask=mask, gain=True, queries=queries, keys=keys, width=8
        )]  # fmt: skip
        options = dict(zip(("residual", "attn_mask", "head_gain"), args[5:], strict=True), is_causal=is_causal)
        y = ot.spectral_attention(*args[:5], **options, backend="cpu")
        torch.testing.assert_close(y, ot.reference.spectral_attention(*args[:5], **options))

    def test_the_weight_is_not_rounded_to_the_queries_dtype(self):
        """bf16 queries, float32 λ and U: y as with λ and U in float64, to float32's rounding."""
        query, key, value, eigenvalues, basis, *_ = random_call(dtype=torch.bfloat16)
        basis, residual = torch.randn(32, 24), torch.randn(2, 33, 24)
        y = ot.spectral_attention(query, key, value, eigenvalues, basis, residual=residual, backend="cpu")
        exact = ot.spectral_attention(
            *(x.double() for x in (query, key, value, eigenvalues, basis)), residual=residual.double()
        )
        assert (y - exact).abs().max() < 1e-5 * exact.abs().max()


class TestContract:
    def arguments(self, **options):
        return call_with_terms(mask="bias", batch=2, heads=2, queries=5, keys=4, width=3, channels=4, **options)

    @pytest.mark.parametrize("addend", ["full", "token"])
    def test_gradcheck(self, addend):
        args = self.arguments(dtype=torch.float64, addend=addend)
        call = as_call(ot.spectral_attention, backend="cpu")
        assert torch.autograd.gradcheck(call, args)
        assert torch.autograd.gradgradcheck(call, args)

    def test_double_backward_without_norms(self):
        args = self.arguments(dtype=torch.float64)
        assert torch.autograd.gradgradcheck(as_call(ot.spectral_attention, False, backend="cpu"), args)

    @pytest.mark.parametrize("name", TERMS[:3])
    def test_only_the_needed_gradient(self, name):
        args = call_with_terms(mask="bias")
        index = 8 + TERMS.index(name)
        leaves = [i for i, a in enumerate(args) if a is not None and a.requires_grad]
        every = accuracy.outputs_and_gradients(as_call(ot.spectral_attention), args)[1]
        alone = tuple(a if a is None else a.detach().requires_grad_(i == index) for i, a in enumerate(args))
        (one,) = accuracy.outputs_and_gradients(as_call(ot.spectral_attention), alone)[1]
        assert torch.equal(one, every[leaves.index(index)])

    def test_packed_equals_its_views(self):
        query, key, value, eigenvalues, basis, residual, mask, _, *terms = call_with_terms()
        qkv = torch.stack([x.detach().transpose(1, 2) for x in (query, key, value)], 2).requires_grad_()
        options = dict(zip(TERMS, terms, strict=True), residual=residual)
        leaves = (qkv, eigenvalues, basis, residual, *terms[:3])
        ys = (
            attention.spectral_attention_qkvpacked(qkv, eigenvalues, basis, **options),
            ot.spectral_attention(*attention.unpack_qkv(qkv), eigenvalues, basis, **options),
        )
        results = [(y, *torch.autograd.grad(y.square().sum(), leaves)) for y in ys]
        assert all(map(torch.equal, *results))

    def test_folded_attention_takes_the_weight(self):
        query, key, value, eigenvalues, basis, *_ = random_call()
        y = attention.folded_attention(attention.QKV(query, key, value), eigenvalues[:, None] * basis)
        assert torch.equal(y, ot.spectral_attention(query, key, value, eigenvalues, basis))

    def test_compile(self):
        calls = [call_with_terms(batch=b, queries=n, keys=n, channels=24) for b, n in ((3, 17), (4, 50))]
        compiling.check_compiles(as_call(ot.spectral_attention), calls, sums=[3, 8])

    @pytest.mark.parametrize("tokens", [65, 500])
    def test_bit_equal_over_threads(self, tokens):
        args = call_with_terms(batch=3, queries=tokens, keys=tokens, width=64, channels=70)
        repeat.check_bit_equal(as_call(ot.spectral_attention), args)

    @pytest.mark.parametrize("has_residual", [False, True])
    def test_autocast_narrows_query_key_and_value_alone(self, has_residual):
        args = list(call_with_terms())
        if not has_residual:
            args[5] = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, low, _ = as_call(ot.spectral_attention, backend="cpu")(*args)
        assert y.dtype == (torch.float32 if has_residual else torch.bfloat16)
        narrow = [x.bfloat16() for x in args[:3]]
        same, same_low, _ = as_call(ot.spectral_attention, backend="cpu")(*narrow, *args[3:])
        assert torch.equal(y, same) and torch.equal(low, same_low)
        leaves = [x for x in args if x is not None and x.requires_grad]
        assert all(g.dtype == torch.float32 for g in torch.autograd.grad(y.float().sum() + low.sum(), leaves))

    @pytest.mark.parametrize(
        ("name", "value", "wanted"),
        [
            ("gain", torch.ones(3), r"torch.float32 of shape \[2\]"),
            ("gain", 2.0, r"torch.float32 of shape \[2\]"),
            ("addend", torch.ones(2, 2, 32, 16), r"torch.float32, broadcastable to \[2, 2, 33, 16\]"),
            ("addend", torch.ones(16).half(), "torch.float32, broadcastable"),
            ("bias", torch.ones(23), r"torch.float32 of shape \[24\]"),
            ("sample_scale", torch.ones(2, 1), r"torch.float32 of shape \[2\]"),
            ("residual", torch.ones(2, 33, 24).double(), r"torch.float32 of shape \[2, 33, 24\]"),
            ("sample_scale", torch.ones(2, requires_grad=True), "one that does not"),
        ],
    )
    def test_errors_name_the_argument(self, name, value, wanted):
        args = random_call()[:5]
        with pytest.raises((ValueError, TypeError), match=f"^spectral_attention: {name}: got .*, wanted {wanted}"):
            ot.spectral_attention(*args, **{name: value})
