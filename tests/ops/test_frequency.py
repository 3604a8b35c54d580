"""The frequency ops on the CPU kernels: exactness, gradients, contracts, every instruction set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import accuracy, compiling, repeat, shapes

import overtone as ot

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def norms_call(function, mask=None, **options):
    return lambda x: tuple(function(x, mask=mask, **options))


def filter_call(function, **options):
    return lambda x, low, high: function(x, low, high, **options)


def random_call(shape, dtype=torch.float32, layout="contiguous", seed=0):
    """x with the layout, and per-channel gains, all of them needing gradients."""
    generator = torch.Generator().manual_seed(seed)
    x = shapes.with_layout(torch.randn(shape, generator=generator).to(dtype), layout).detach().requires_grad_()
    gain_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    gains = [torch.randn(shape[-1], generator=generator).to(gain_dtype).requires_grad_() for _ in range(2)]
    return x, *gains


def mask_for(shape, kind, seed=1):
    return None if kind == "none" else shapes.random_mask(shape[:-1], torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", shapes.TOKENS)
@pytest.mark.parametrize("mask", ["none", "random"])
@pytest.mark.usefixtures("poisoned_empty")
class TestExactness:
    @pytest.mark.parametrize("channels", [7, 65, 192])
    def test_norms(self, dtype, tokens, channels, mask):
        x, _, _ = random_call((3, tokens, channels), dtype)
        given_mask = mask_for(x.shape, mask)
        accuracy.check_against_truth(
            norms_call(ot.frequency_norms, given_mask, backend="cpu"),
            norms_call(ot.reference.frequency_norms, given_mask),
            (x,),
        )

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("channels", [7, 65, 192])
    def test_filter(self, dtype, tokens, channels, mask, is_causal):
        args = random_call((3, tokens, channels), dtype)
        options = {"mask": mask_for(args[0].shape, mask), "is_causal": is_causal}
        accuracy.check_against_truth(
            filter_call(ot.frequency_filter, backend="cpu", **options),
            filter_call(ot.reference.frequency_filter, **options),
            args,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestEveryLevel:
    """Each instruction set gives exact results, and is the one that ran."""

    @pytest.mark.parametrize("channels", [64, 80])
    def test_norms(self, isa_level, cpu_kernels, dtype, channels):
        x, _, _ = random_call((2, 50, channels), dtype)
        accuracy.check_against_truth(
            norms_call(ot.frequency_norms, backend="cpu"), norms_call(ot.reference.frequency_norms), (x,)
        )
        assert cpu_kernels.last_kernel() == f"frequency_norms_backward/{isa_level}"

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("channels", [64, 80])
    def test_filter(self, isa_level, cpu_kernels, dtype, channels, is_causal):
        args = random_call((2, 50, channels), dtype)
        accuracy.check_against_truth(
            filter_call(ot.frequency_filter, is_causal=is_causal, backend="cpu"),
            filter_call(ot.reference.frequency_filter, is_causal=is_causal),
            args,
        )
        assert cpu_kernels.last_kernel() == f"frequency_filter_backward/{isa_level}"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=shapes.token_tensors(), dtype=st.sampled_from(DTYPES), masked=st.booleans(), is_causal=st.booleans())
def test_any_shape_and_layout(poisoned_empty, call, dtype, masked, is_causal):
    shape, layout = call
    args = random_call(shape, dtype, layout)
    mask = mask_for(shape, "random" if masked else "none")
    accuracy.check_against_truth(
        filter_call(ot.frequency_filter, mask=mask, is_causal=is_causal, backend="cpu"),
        filter_call(ot.reference.frequency_filter, mask=mask, is_causal=is_causal),
        args,
    )
    accuracy.check_against_truth(
        norms_call(ot.frequency_norms, mask, backend="cpu"), norms_call(ot.reference.frequency_norms, mask), args[:1]
    )


class TestAlmostEqualTokens:
    """Where the number is interesting: HFC/LFC = 1e-6, float32 tokens far from zero."""

    @pytest.mark.parametrize("offset", [1.0, 1000.0, -3.0e7])
    @pytest.mark.parametrize("tokens", [2, 197, 5000])
    def test_norms(self, isa_level, offset, tokens):
        x = (offset * (1 + 1e-6 * torch.randn(4, tokens, 96, dtype=torch.float64))).float()
        truth = ot.reference.frequency_norms(x.double())
        norms = ot.frequency_norms(x, backend="cpu")
        torch.testing.assert_close(norms.high.double(), truth.high, rtol=1e-4, atol=0)
        torch.testing.assert_close(norms.low.double(), truth.low, rtol=1e-6, atol=0)

    def test_the_naive_formula_would_fail(self):
        x = (1000 * (1 + 1e-6 * torch.randn(4, 197, 96, dtype=torch.float64))).float()
        truth = ot.reference.frequency_norms(x.double()).high
        low = ot.reference.frequency_norms(x).low
        naive = (x.square().sum((-2, -1)) - low.square()).clamp(min=0).sqrt()
        assert ((naive - truth).abs() / truth).max() > 0.1

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_de_escalation_keeps_the_digits_of_the_difference(self, is_causal):
        x = (1000 * (1 + 1e-6 * torch.randn(2, 197, 64, dtype=torch.float64))).float()
        truth = ot.reference.de_escalate(x.double(), is_causal=is_causal)
        torch.testing.assert_close(
            ot.de_escalate(x, is_causal=is_causal, backend="cpu").double(), truth, rtol=0, atol=1e-8
        )

    def test_an_outlying_first_token(self):
        """The sums are shifted by the first token; a class token far from the others must not cost digits."""
        x = torch.ones(2, 197, 64, dtype=torch.float64) + 1e-3 * torch.randn(2, 197, 64, dtype=torch.float64)
        x[:, 0] = 1e4
        truth = ot.reference.frequency_norms(x.float().double())
        norms = ot.frequency_norms(x.float(), backend="cpu")
        torch.testing.assert_close(norms.high.double(), truth.high, rtol=1e-6, atol=0)


def equal_tokens(dtype, count, channels=70, seed=0):
    """Every token the same, of a random mantissa."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 1, channels, generator=generator, dtype=torch.float64).to(dtype)
    return x.expand(2, count, channels).clone().requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
class TestCollapsedTokens:
    """Tokens that are equal, exactly or up to rounding: ‖HFC‖ and its gradient are zero, not noise of length one."""

    @pytest.mark.parametrize("mask", ["none", "random"])
    def test_equal_tokens(self, isa_level, dtype, mask):
        for tokens in (*range(1, 8), *range(44, 52), 65, 103, 197, 577):
            x = equal_tokens(dtype, tokens)
            given_mask = mask_for(x.shape, mask)
            norms = ot.frequency_norms(x, mask=given_mask, backend="cpu")
            assert norms.high.tolist() == [0, 0], tokens
            gradients = torch.autograd.grad(norms.high.sum() + ot.token_diversity(x, mask=given_mask).sum(), x)
            assert not gradients[0].any(), tokens
            assert not ot.de_escalate(x, mask=given_mask, backend="cpu").any(), tokens

    @pytest.mark.parametrize("share, is_zero", [(2.0, True), (3.0, False)])
    @pytest.mark.parametrize("scale", [1.0, 1024.0])
    def test_the_limit(self, isa_level, dtype, share, is_zero, scale):
        """2.5 ε of the statistics' precision times ‖LFC‖: LFC and HFC are in a channel each, which rounds nothing."""
        eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(512)
        x = scale * torch.stack([torch.ones_like(signs), share * eps * signs], -1)[None]
        x = x.to(dtype).requires_grad_()
        norms = ot.frequency_norms(x, backend="cpu")
        (gradient,) = torch.autograd.grad(norms.high.sum(), x)
        plain = ot.reference.frequency_norms(x)
        assert (norms.high.item() == 0) == (plain.high.item() == 0) == is_zero
        assert gradient.double().norm().item() == pytest.approx(0 if is_zero else 1, abs=1e-2)


@pytest.mark.parametrize(
    "dtype, exponents",
    [
        (torch.float32, (-100, -64, -33, -31, 31, 33, 64, 118)),
        (torch.bfloat16, (-100, -64, 64, 118)),
        (torch.float64, (-1000, -540, -258, -255, 255, 258, 540, 1000)),
    ],
)
class TestScales:
    """Norms are multiplied by what tokens are multiplied by, and their gradient does not change, over all exponents."""

    @pytest.mark.parametrize("layout", ["contiguous", "transposed"])
    def test_norms(self, isa_level, dtype, exponents, layout):
        x, _, _ = random_call((3, 9, 80), dtype, layout)
        mask = mask_for(x.shape, "random")
        call = norms_call(ot.frequency_norms, mask, backend="cpu")
        norms, gradients = accuracy.outputs_and_gradients(call, (x,))
        eps = torch.finfo(norms[0].dtype).eps
        for exponent in exponents:
            scaled = (x.detach() * 2.0**exponent).requires_grad_()
            assert torch.equal(scaled.detach() * 2.0**-exponent, x.detach())
            results, scaled_gradients = accuracy.outputs_and_gradients(call, (scaled,))
            for norm, result in zip(norms, results, strict=True):
                torch.testing.assert_close(result.double() * 2.0**-exponent, norm.double(), rtol=2 * eps, atol=0)
            eps_of_gradient = torch.finfo(dtype).eps
            torch.testing.assert_close(scaled_gradients[0], gradients[0], rtol=0, atol=2 * eps_of_gradient)

    def test_a_gradient_far_from_one(self, isa_level, dtype, exponents):
        """grad / norm alone would overflow or vanish; the gradient itself does not."""
        x, _, _ = random_call((2, 9, 80), dtype)
        unit = torch.autograd.grad(sum(map(torch.sum, ot.frequency_norms(x, backend="cpu"))), x)[0]
        for exponent in exponents:
            scaled = (x.detach() * 2.0**exponent).requires_grad_()
            total = sum(map(torch.sum, ot.frequency_norms(scaled, backend="cpu")))
            (gradient,) = torch.autograd.grad(total, scaled, total.new_tensor(2.0**-exponent))
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(gradient.double() * 2.0**exponent, unit.double(), rtol=0, atol=2 * eps)

    def test_blocks_of_different_scale(self, isa_level, dtype, exponents):
        """Sums of blocks are added in one unit, whatever each was taken in."""
        x, _, _ = random_call((2, 9, 200), dtype)
        for exponent in exponents:
            mixed = x.detach().clone()
            mixed[..., 64:128] *= 2.0**exponent
            truth = ot.reference.frequency_norms(
                mixed[..., 64:128] if exponent > 0 else mixed[..., [*range(64), *range(128, 200)]]
            )
            norms = ot.frequency_norms(mixed, backend="cpu")
            torch.testing.assert_close(tuple(norms), tuple(truth), rtol=1e-6, atol=0)


def test_a_norm_that_is_not_representable_is_infinite():
    x = torch.full((1, 50, 80), 1e38).requires_grad_()
    with torch.no_grad():
        x[:, ::2] *= -1
    norms = ot.frequency_norms(x, backend="cpu")
    assert norms.high.item() == torch.inf and norms.low.item() == 0
    assert ot.reference.frequency_norms(x).high.item() == torch.inf
    assert ot.token_diversity(x).isnan().all(), "unknown, not 0 or 1"


class TestSpecialValues:
    def test_equal_tokens_have_no_high_frequency_and_no_gradient_from_it(self):
        x = torch.full((2, 9, 33), 3.7).requires_grad_()
        norms = ot.frequency_norms(x, backend="cpu")
        assert norms.high.tolist() == [0, 0]
        assert torch.equal(torch.autograd.grad(norms.high.sum(), x)[0], torch.zeros_like(x))

    def test_zero_tokens(self):
        x = torch.zeros(2, 9, 33, requires_grad=True)
        norms = ot.frequency_norms(x, backend="cpu")
        assert norms.low.tolist() == norms.high.tolist() == [0, 0]
        assert torch.equal(torch.autograd.grad((norms.low + norms.high).sum(), x)[0], torch.zeros_like(x))

    def test_padding_is_never_read(self):
        x = torch.randn(2, 9, 33)
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[:, 4:] = False
        poisoned = x.clone()
        poisoned[:, 4:] = float("nan")
        poisoned.requires_grad_()
        norms = ot.frequency_norms(poisoned, mask=mask, backend="cpu")
        y = ot.frequency_filter(poisoned, 0.3, 2.0, mask=mask, backend="cpu")
        assert torch.equal(norms.high, ot.frequency_norms(x[:, :4], backend="cpu").high)
        assert torch.equal(y[:, 4:], torch.zeros(2, 5, 33))
        (gradient,) = torch.autograd.grad(y.sum() + norms.high.sum() + norms.low.sum(), poisoned)
        assert gradient[:, :4].isfinite().all() and torch.equal(gradient[:, 4:], torch.zeros(2, 5, 33))

    def test_a_nan_stays_in_its_sample(self):
        x = torch.randn(3, 9, 33)
        clean = ot.frequency_norms(x, backend="cpu")
        x[1, 2, 3] = float("nan")
        norms = ot.frequency_norms(x, backend="cpu")
        assert norms.high[1].isnan() and norms.low[1].isnan()
        assert torch.equal(norms.high[[0, 2]], clean.high[[0, 2]])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_results_are_rounded_to_nearest(self, isa_level, dtype):
        values = torch.tensor([1.0, -2.5, 3.14159, 65504.0, 1e-7, -0.0, 0.1, float("nan")] * 12)
        x = values.to(dtype).expand(1, 1, 96)
        y = ot.frequency_filter(x, 1.0, 0.0, backend="cpu")
        assert torch.equal(y.nan_to_num(7.0), x.nan_to_num(7.0))
        gain = torch.linspace(0.9, 1.1, 96)
        y = ot.frequency_filter(x, gain, 0.0, backend="cpu")
        assert torch.equal(y.nan_to_num(7.0), (x.float() * gain).to(dtype).nan_to_num(7.0))


class TestContract:
    def samples(self):
        x, low, high = random_call((2, 3, 17, 70))
        return x, low, high, mask_for(x.shape, "random")

    def test_opcheck(self):
        x, low, high, mask = self.samples()
        ops = torch.ops.overtone
        for m in (None, mask):
            torch.library.opcheck(ops.frequency_norms.default, (x, m))
            for is_causal in (False, True):
                torch.library.opcheck(ops.frequency_filter.default, (x, low, high, m, is_causal))
        norms = [n.detach() for n in ops.frequency_norms(x, mask)]
        values = [t.detach() for t in (x, low, high)]
        for addend in (None, torch.randn(x.shape, dtype=x.dtype)):
            torch.library.opcheck(ops.frequency_norms_backward.default, (*norms, values[0], *norms, mask, addend))
        for need_x in (False, True):
            for given_x in (None, values[0]):
                torch.library.opcheck(
                    ops.frequency_filter_backward.default, (values[0], given_x, *values[1:], mask, False, need_x)
                )

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_gradcheck(self, is_causal):
        args = random_call((2, 5, 7), torch.float64)
        mask = mask_for((2, 5, 7), "random")
        function = filter_call(ot.frequency_filter, mask=mask, is_causal=is_causal, backend="cpu")
        assert torch.autograd.gradcheck(function, args)
        assert torch.autograd.gradgradcheck(function, args)

    def test_gradcheck_norms(self):
        (x, _, _) = random_call((2, 5, 7), torch.float64)
        function = norms_call(ot.frequency_norms, backend="cpu")
        assert torch.autograd.gradcheck(function, (x,))
        assert torch.autograd.gradgradcheck(function, (x,))

    def test_gradgrad_without_gain_gradients(self):
        x = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradgradcheck(lambda x: ot.de_escalate(x, 0.4, backend="cpu").square(), (x,))

    def test_compile_norms(self):
        calls = [(random_call((b, n, c))[0],) for b, n, c in ((2, 17, 70), (3, 50, 64), (5, 65, 192))]
        compiling.check_compiles(norms_call(ot.frequency_norms), calls)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_compile_filter(self, is_causal):
        calls = [random_call((b, n, c)) for b, n, c in ((2, 17, 70), (3, 50, 64), (5, 65, 192))]
        compiling.check_compiles(filter_call(ot.frequency_filter, is_causal=is_causal), calls)

    def test_compile_inside_a_model(self):
        """Traced code around the op: the op's numbers are exact, the code's are the compiler's."""

        def block(x, low, high):
            y = ot.frequency_filter(torch.tanh(x), low, high)
            return y * 2, ot.frequency_norms(y).ratio, ot.de_escalate(y, 0.5)

        compiling.check_compiles(block, [random_call((2, 17, 70)), random_call((3, 20, 64))], exact=False)

    def test_compiled_code_follows_use_backend(self, cpu_kernels):
        x = torch.randn(2, 5, 7)
        compiled = torch.compile(lambda x: ot.frequency_norms(x).high, fullgraph=True)
        compiled(x)
        ot.frequency_filter(x, 1.0, 1.0)  # so that the last kernel is not the one looked for
        compiled(x)
        assert cpu_kernels.last_kernel().startswith("frequency_norms/")
        ot.frequency_filter(x, 1.0, 1.0)
        with ot.use_backend("reference"):
            compiled(x)
        assert cpu_kernels.last_kernel().startswith("frequency_filter/")

    @pytest.mark.parametrize("shape", [(5, 65, 192), (1, 4096, 65)])
    def test_bit_equal_over_threads(self, shape):
        args = random_call(shape)
        repeat.check_bit_equal(norms_call(ot.frequency_norms), args[:1])
        repeat.check_bit_equal(filter_call(ot.frequency_filter), args)
        repeat.check_bit_equal(filter_call(ot.frequency_filter, is_causal=True), args)

    def test_backward_twice(self):
        args = random_call((2, 17, 70))
        repeat.check_backward_twice(norms_call(ot.frequency_norms), args[:1])
        repeat.check_backward_twice(filter_call(ot.frequency_filter), args)

    def test_saves_nothing_but_what_backward_needs(self):
        x, low, high = random_call((2, 17, 70))
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            ot.de_escalate(x, 0.5)
        assert all(t.numel() <= 70 for t in saved), "a filter without gain gradients must not keep its tokens"

    def test_only_the_needed_gradients(self):
        x, low, high = random_call((2, 17, 70))
        y = ot.frequency_filter(x.detach(), low, high.detach())
        (grad_low,) = torch.autograd.grad(y.sum(), low)
        full = torch.autograd.grad(ot.frequency_filter(x, low, high).sum(), low)[0]
        assert torch.equal(grad_low, full)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_autocast_leaves_tokens_and_statistics_alone(self, dtype):
        x = torch.randn(2, 9, 33).to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            norms = ot.frequency_norms(x)
            y = ot.frequency_filter(x, 0.5, 1.0)
        assert norms.high.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert y.dtype == dtype
        assert torch.equal(norms.high, ot.frequency_norms(x).high)

    def test_results_are_contiguous(self):
        x = shapes.with_layout(torch.randn(2, 9, 33), "transposed")
        assert ot.frequency_filter(x, 1.0, 0.5).is_contiguous()

    def test_direct_op_calls_are_checked_before_memory_is_touched(self):
        x, gain, norms = torch.randn(2, 5, 8), torch.ones(8), (torch.ones(2), torch.ones(2))
        ops = torch.ops.overtone
        for call in (
            lambda: ops.frequency_norms(torch.randn(5), None),
            lambda: ops.frequency_norms(x.to(torch.int32), None),
            lambda: ops.frequency_norms(x, torch.ones(2, 4, dtype=torch.bool)),
            lambda: ops.frequency_norms(x, torch.ones(2, 5)),
            lambda: ops.frequency_filter(x, gain[:7], gain, None, False),
            lambda: ops.frequency_filter(x, gain.double(), gain, None, False),
            lambda: ops.frequency_filter_backward(x, x[:1], gain, gain, None, False, True),
            lambda: ops.frequency_norms_backward(torch.ones(1), norms[1], x, *norms, None, None),
            lambda: ops.frequency_norms_backward(*norms, x, *norms, None, x[:1]),
            lambda: ops.frequency_norms_backward(*norms, x, *norms, None, x.double()),
            lambda: ops.frequency_norms_backward(*norms, x, *norms, None, x.mT.contiguous().mT),
        ):
            with pytest.raises(RuntimeError):
                call()


class TestErrors:
    """Every error names the argument, what it got and what it wanted."""

    @pytest.mark.parametrize(
        ("call", "error", "words"),
        [
            (lambda: ot.frequency_norms([1.0]), TypeError, ["frequency_norms", "x", "list", r"\[\.\.\., N, C\]"]),
            (lambda: ot.frequency_norms(torch.ones(3)), ValueError, ["x", r"shape \[3\]", r"\[\.\.\., N, C\]"]),
            (lambda: ot.frequency_norms(torch.ones(3, 4, dtype=torch.int64)), ValueError, ["int64", "floating"]),
            (lambda: ot.frequency_norms(torch.ones(3, 4).to_sparse()), ValueError, ["sparse", "dense"]),
            (lambda: ot.frequency_norms(torch.ones(2, 3, 4), mask=torch.ones(3)), ValueError, ["mask", "bool"]),
            (
                lambda: ot.frequency_norms(torch.ones(2, 3, 4), mask=torch.ones(4, dtype=torch.bool)),
                ValueError,
                ["mask", r"shape \[4\]", r"\[2, 3\]"],
            ),
            (lambda: ot.frequency_filter(torch.ones(3, 4), "1", 1.0), TypeError, ["low", "str", r"\[4\]"]),
            (lambda: ot.frequency_filter(torch.ones(3, 4), 1.0, 1.0, is_causal="no"), TypeError, ["is_causal", "'no'"]),
            (
                lambda: ot.frequency_filter(torch.ones(3, 4), 1.0, torch.ones(3)),
                ValueError,
                ["high", r"\[3\]", r"\[4\]"],
            ),
            (lambda: ot.de_escalate(torch.ones(3, 4), torch.ones(2, 4)), ValueError, ["de_escalate", "tau"]),
            (
                lambda: ot.de_escalate(torch.ones(3, 4), torch.ones(4, device="meta")),
                ValueError,
                ["tau", "meta", "cpu"],
            ),
        ],
    )
    def test_wrong_arguments(self, call, error, words):
        with pytest.raises(error) as raised:
            call()
        for word in words:
            assert raised.match(word)
