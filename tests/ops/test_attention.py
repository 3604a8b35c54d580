"""spectral_attention on the CPU kernels: exactness, gradients, contracts, every instruction set."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import accuracy, compiling, repeat
from support.fixtures import BF16_LEVELS, ISA_LEVELS

import overtone as ot
from overtone.ops import attention

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
ARGUMENTS = ("query", "key", "value", "eigenvalues", "basis", "residual", "attn_mask", "head_gain")


def random_call(
    batch=2, heads=2, queries=33, keys=33, width=16, channels=24, dtype=torch.float32, mask="none", gain=False,
    residual=True, packed=False, seed=0,
):  # fmt: skip
    """Arguments in the order of ARGUMENTS, all floating ones needing gradients."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def random(*shape, scale=1.0, dtype=dtype):
        return (scale * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()

    if packed:  # the views that a packed qkv projection gives
        qkv = random(batch, queries, 3, heads, width).detach()
        query, key, value = (x.requires_grad_() for x in qkv.permute(2, 0, 3, 1, 4).unbind(0))
    else:
        query = random(batch, heads, queries, width)
        key, value = random(batch, heads, keys, width), random(batch, heads, keys, width)
    features = heads * width
    return (
        query,
        key,
        value,
        random(features, dtype=wide),
        random(features, channels, scale=max(features, 1) ** -0.5),
        random(batch, queries, channels) if residual else None,
        random_mask(mask, batch, heads, queries, keys, random, generator),
        random(heads, scale=0.3, dtype=wide) if gain else None,
    )


def random_mask(kind, batch, heads, queries, keys, random, generator):
    if kind == "none":
        return None
    if kind == "bias":
        return random(heads, queries, keys)
    mask = torch.rand(batch, 1, queries, keys, generator=generator) > 0.3
    if mask.numel():
        mask[0, :, 0] = False  # a row that attends to nothing
    return mask


def as_call(function, return_norms=True, **options):
    """The function of the positional ARGUMENTS, its outputs in one tuple."""

    def call(query, key, value, eigenvalues, basis, residual, attn_mask, head_gain):
        result = function(
            query, key, value, eigenvalues, basis, residual=residual, attn_mask=attn_mask, head_gain=head_gain,
            return_norms=return_norms, **options,
        )  # fmt: skip
        return (result[0], *result[1]) if return_norms else result

    return call


def check(args, return_norms=True, more_draws=(), **options):
    accuracy.check_against_truth(
        as_call(ot.spectral_attention, return_norms, backend="cpu", **options),
        as_call(ot.reference.spectral_attention, return_norms, **options),
        args,
        more_draws=more_draws,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestExactness:
    @pytest.mark.parametrize("tokens", [3, 50, 65, 113, 197, 257])
    def test_tokens(self, dtype, tokens):
        check(random_call(queries=tokens, keys=tokens, dtype=dtype))

    @pytest.mark.parametrize("width", [16, 32, 64, 72, 80, 88, 96, 128])
    def test_widths(self, dtype, width):
        check(random_call(width=width, channels=width + 3, dtype=dtype))

    @pytest.mark.parametrize("channels", [1, 7, 48, 65, 192])
    def test_channels(self, dtype, channels):
        check(random_call(channels=channels, dtype=dtype))

    @pytest.mark.parametrize("queries, keys", [(1, 40), (40, 2), (100, 17), (17, 100)])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_different_lengths(self, dtype, queries, keys, is_causal):
        check(random_call(queries=queries, keys=keys, dtype=dtype), is_causal=is_causal)

    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("gain", [False, True])
    def test_masks_and_gain(self, dtype, mask, is_causal, gain):
        # The gain's gradient has two elements: PyTorch's error in one draw says little.
        args, *more = (random_call(mask=mask, gain=gain, dtype=dtype, seed=seed) for seed in range(9 if gain else 1))
        check(args, is_causal=is_causal, more_draws=more)

    @pytest.mark.parametrize("is_causal", [False, True])
    def test_more_keys_than_a_block(self, dtype, is_causal):
        """Above 480 keys the softmax is collected over blocks."""
        check(random_call(batch=1, queries=500, keys=1000, dtype=dtype), is_causal=is_causal)

    def test_packed_views(self, dtype):
        check(random_call(packed=True, dtype=dtype))

    def test_without_residual_and_norms(self, dtype):
        check(random_call(residual=False, dtype=dtype), return_norms=False)

    def test_scale(self, dtype):
        check(random_call(dtype=dtype), scale=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [65, 197])
def test_rows_of_logits_gradient_add_up_to_zero(isa_level, dtype, tokens):
    """What is left of them goes to query's gradient times the mean key: as little as in PyTorch, and not the rounding
    error of ∂heads · heads, which is three times that."""
    args = random_call(queries=tokens, keys=tokens, width=64, dtype=dtype, mask="bias")

    def remainder(function):
        _, gradients = accuracy.outputs_and_gradients(as_call(function), tuple(map(accuracy.fresh, args)))
        return gradients[-1].double().sum(-1).square().mean().sqrt()

    assert remainder(ot.spectral_attention) <= accuracy.FORWARD_FACTOR * remainder(ot.reference.spectral_attention)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 9])
@pytest.mark.usefixtures("poisoned_empty")
def test_norms_are_the_same_without_gradients(dtype, batch):
    """Without backward a whole image's y is kept, unrounded, only until its norms are taken; with few images it is
    cut into blocks of queries, and all of y is kept."""
    args = random_call(batch=batch, queries=197, keys=20, dtype=dtype)
    call = as_call(ot.spectral_attention, backend="cpu")
    with torch.no_grad():
        alone = call(*args)
    assert all(map(torch.equal, alone, call(*args)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestEveryLevel:
    """Each instruction set gives exact results, and is the one that ran."""

    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    def test_level(self, isa_level, cpu_kernels, dtype, mask):
        for width, tokens in ((64, 50), (40, 17)):
            check(random_call(width=width, queries=tokens, keys=tokens, channels=70, mask=mask, dtype=dtype))
            assert cpu_kernels.last_kernel() == f"spectral_attention_backward/{isa_level}"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch=st.integers(0, 3), heads=st.integers(1, 3), queries=st.integers(0, 60), keys=st.integers(2, 60),
    width=st.integers(1, 70), channels=st.integers(0, 60), dtype=st.sampled_from(DTYPES),
    mask=st.sampled_from(["none", "bool", "bias"]), is_causal=st.booleans(),
)  # fmt: skip
def test_any_shape(poisoned_empty, batch, heads, queries, keys, width, channels, dtype, mask, is_causal):
    args, *more = (
        random_call(batch, heads, queries, keys, width, channels, dtype, mask, seed=seed) for seed in range(9)
    )
    check(args, is_causal=is_causal, more_draws=more)


def sdpa(query, key, value, eigenvalues, basis, *, residual, attn_mask, head_gain, return_norms):
    """Eager PyTorch around its own attention."""
    heads = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask)
    y = (heads.transpose(1, 2).flatten(2) * eigenvalues) @ basis
    return y if residual is None else residual + y


def biased_call(offset, logits, kind, seed=0, **options):
    """Logits of this size, and a bias of order one on top of one that is common to all keys, or to all of a row."""
    query, *args = random_call(mask="bias", residual=False, seed=seed, **options)
    rows = torch.rand(args[5].shape[:-1] + (1,), generator=torch.Generator().manual_seed(seed)) if kind == "rows" else 1
    bias = args[5].detach() + offset * rows
    return (query.detach() * logits).requires_grad_(), *args[:5], bias.requires_grad_(), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["common", "rows"])
def test_large_biases(isa_level, dtype, kind):
    """A bias of order one on top of a common one loses no digits that PyTorch keeps."""
    for offset in (-1e6, -1e4, 0.0, 1e4, 1e5, 1e6):
        for logits in (0.0, 0.1, 1.0):
            args, *more = (biased_call(offset, logits, kind, seed, dtype=dtype) for seed in range(3))
            accuracy.check_against_truth(
                as_call(ot.spectral_attention, False, backend="cpu"), as_call(sdpa, False), args, more_draws=more
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_larger_bias_of_keys_that_are_not_seen(isa_level, dtype):
    """Of a causal row only the keys that it sees say how large its bias is."""
    args, *more = (biased_call(0.0, 0.0, "common", seed, dtype=dtype) for seed in range(3))
    with torch.no_grad():
        for _, _, _, _, _, _, bias, _ in (args, *more):
            bias += 1e6 * torch.ones_like(bias).triu(1)
    accuracy.check_against_truth(
        as_call(ot.spectral_attention, False, backend="cpu", is_causal=True),
        as_call(ot.reference.spectral_attention, False, is_causal=True),
        args,
        more_draws=more,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_large_bias_over_several_blocks_of_keys(isa_level, dtype):
    args, *more = (biased_call(1e5, 0.0, "rows", seed, batch=1, keys=600, dtype=dtype) for seed in range(3))
    accuracy.check_against_truth(
        as_call(ot.spectral_attention, False, backend="cpu"), as_call(sdpa, False), args, more_draws=more
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tokens", [17, 65])
def test_rows_that_are_equal_but_for_rounding_have_no_high_frequency(isa_level, dtype, tokens):
    """All values equal: every row of y is the same, whatever the softmax, but rounded on its own way there."""
    query, key, value, eigenvalues, basis, *_ = random_call(queries=tokens, keys=tokens, width=32, dtype=dtype)
    equal = value.detach()[:, :, :1].expand_as(value).clone().requires_grad_()
    y, norms = ot.spectral_attention(query, key, equal, eigenvalues, basis, return_norms=True, backend="cpu")
    assert (y != y[:, :1]).any(), "bit-equal rows prove nothing"
    assert norms.high.tolist() == [0, 0]
    gradients = torch.autograd.grad(norms.high.sum(), (query, key, equal, eigenvalues, basis))
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("level", [*ISA_LEVELS, *BF16_LEVELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("poisoned_empty")
def test_nothing_of_anything_with_every_option(cpu_kernels, level, dtype):
    """Empty batches, heads, queries, keys and channels give what they give in the reference."""
    before = cpu_kernels.isa()
    if not level.endswith("emulated") and level not in cpu_kernels.available_isas():
        pytest.skip(f"this machine has no {level}")
    cpu_kernels.set_isa(level)
    try:
        for empty in ("batch", "heads", "queries", "keys", "channels"):
            for mask, gain, is_causal in itertools.product(("none", "bool", "bias"), (False, True), (False, True)):
                sizes = {"batch": 2, "heads": 2, "queries": 3, "keys": 5, "width": 4, "channels": 6, empty: 0}
                args = random_call(**sizes, mask=mask, gain=gain, residual=is_causal, dtype=dtype)
                call = {"is_causal": is_causal, "scale": 0.5}
                ours = accuracy.outputs_and_gradients(as_call(ot.spectral_attention, backend="cpu", **call), args)
                plain = accuracy.outputs_and_gradients(as_call(ot.reference.spectral_attention, **call), args)
                for a, b in zip(ours[0] + ours[1], plain[0] + plain[1], strict=True):
                    torch.testing.assert_close(a, b, msg=f"no {empty}, {mask=}, {gain=}, {is_causal=}")
    finally:
        cpu_kernels.set_isa(before)


class TestSpecialValues:
    def test_a_single_key_gives_its_value_and_no_gradient_to_the_logits(self):
        """Softmax of one logit is 1 whatever it is; what is left is rounding of values of order one."""
        args = random_call(queries=4, keys=1, width=8)
        y, _, _ = as_call(ot.spectral_attention)(*args)
        truth, _, _ = as_call(ot.reference.spectral_attention)(*map(accuracy.to_float64, args))
        torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-6)
        for gradient in torch.autograd.grad(y.sum(), args[:2]):
            assert gradient.abs().max() < 1e-6

    def test_no_keys(self):
        query, _, _, eigenvalues, basis, residual, _, _ = random_call(keys=0)
        empty = torch.zeros(2, 2, 0, 16, requires_grad=True)
        y = ot.spectral_attention(query, empty, empty, eigenvalues, basis, residual=residual, backend="cpu")
        assert torch.equal(y, residual)
        (gradient,) = torch.autograd.grad(y.sum(), query)
        assert torch.equal(gradient, torch.zeros_like(gradient))

    def test_fully_masked_rows_are_zero_and_send_nothing_back(self):
        query, key, value, eigenvalues, basis, _, _, _ = random_call()
        mask = torch.ones(33, 33, dtype=torch.bool)
        mask[5] = False
        y = ot.spectral_attention(query, key, value, eigenvalues, basis, attn_mask=mask, backend="cpu")
        assert torch.equal(y[:, 5], torch.zeros_like(y[:, 5]))
        gradients = torch.autograd.grad(y[:, 5].sum(), (query, key, value), retain_graph=True)
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (query, key, value)))

    def test_minus_infinity_in_the_bias_is_a_mask(self):
        query, key, value, eigenvalues, basis, _, _, _ = random_call()
        mask = torch.rand(33, 33) > 0.4
        mask[3] = False
        bias = torch.zeros(33, 33).masked_fill(~mask, -torch.inf)
        masked = [
            ot.spectral_attention(query, key, value, eigenvalues, basis, attn_mask=m, backend="cpu")
            for m in (mask, bias)
        ]
        assert torch.equal(*masked)

    def test_a_nan_query_stays_in_its_row(self):
        args = list(random_call())
        clean, _, _ = as_call(ot.spectral_attention)(*args)
        with torch.no_grad():
            args[0] = args[0].clone()
            args[0][0, 1, 7, 3] = torch.nan
        y, _, _ = as_call(ot.spectral_attention)(*args)
        assert y[0, 7].isnan().all()
        rows = [i for i in range(33) if i != 7]
        assert torch.equal(y[0, rows], clean[0, rows]) and torch.equal(y[1], clean[1])

    @pytest.mark.parametrize("offset", [0.0, 50.0, -3000.0])
    def test_a_constant_added_to_the_logits_changes_nothing(self, offset):
        query, key, value, eigenvalues, basis, _, _, _ = random_call(dtype=torch.float64)
        results = [
            ot.spectral_attention(query, key, value, eigenvalues, basis, attn_mask=torch.full((1,), c).double())
            for c in (0.0, offset)
        ]
        torch.testing.assert_close(*results, rtol=1e-10, atol=1e-10)

    def test_large_logits(self):
        """One key far ahead: softmax is one-hot, nothing overflows."""
        args = list(random_call())
        with torch.no_grad():
            args[0] = args[0] * 1e3
        check(tuple(args))

    def test_memory_grows_as_n(self):
        """16k tokens: a matrix of logits would take 1 GiB a head."""
        query, key, value = (torch.randn(1, 1, 16384, 16) for _ in range(3))
        y = ot.spectral_attention(query, key, value, torch.ones(16), torch.eye(16), backend="cpu")
        rows = torch.tensor([0, 1, 777, 16383])
        truth = torch.softmax(query[0, 0, rows].double() @ key[0, 0].double().T / 4, -1) @ value[0, 0].double()
        torch.testing.assert_close(y[0, rows].double(), truth, rtol=1e-4, atol=1e-6)


class TestContract:
    def test_opcheck(self):
        for mask, is_causal, dtype in itertools.product(
            ("none", "bool", "bias"), (False, True), (torch.float32, torch.bfloat16)
        ):
            args = random_call(queries=5, keys=7, dtype=dtype, mask=mask)
            attn_mask = args[6] if args[6] is None else args[6].expand(2, 2, 5, 7)
            if mask == "bias":
                attn_mask = attn_mask.float().detach()
            bias, gain = torch.randn(24).requires_grad_(), torch.randn(2).requires_grad_()
            addend = torch.randn(2, 2, 1, 16).to(dtype).requires_grad_().expand(2, 2, 5, 16)
            weight, residual, sample_scale = args[4], args[5], torch.rand(2)
            call = (*args[:3], weight, bias, residual, sample_scale, attn_mask, gain, addend, is_causal, 0.25)
            detached = [a.detach() if isinstance(a, torch.Tensor) else a for a in call]
            op = torch.ops.overtone.spectral_attention
            torch.library.opcheck(op.default, (*call, True, True, True))
            torch.library.opcheck(op.default, (*call[:4], *(None,) * 6, *call[10:], False, False, True))
            torch.library.opcheck(op.default, (*detached, False, False, False))
            y, *_, attn_out, softmax_stats = op(*detached, True, True, True)
            backward = (y, *detached[:4], *detached[7:], attn_out, softmax_stats)
            for output_mask in (127, 8, 3, 32, 64, 16):
                torch.library.opcheck(torch.ops.overtone.spectral_attention_backward.default, (*backward, output_mask))

    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_gradcheck(self, mask, is_causal):
        args = random_call(1, 2, 4, 5, 3, 4, torch.float64, mask)
        call = as_call(ot.spectral_attention, is_causal=is_causal, backend="cpu")
        assert torch.autograd.gradcheck(call, args)
        assert torch.autograd.gradgradcheck(call, args)

    def test_gradcheck_with_gain(self):
        args = random_call(1, 2, 4, 5, 3, 4, torch.float64, "bool", gain=True)
        assert torch.autograd.gradcheck(as_call(ot.spectral_attention, backend="cpu"), args)

    @pytest.mark.parametrize("loss", ["y", "low", "high"])
    def test_a_loss_on_one_output(self, loss):
        args = random_call()
        index = ("y", "low", "high").index(loss)
        accuracy.check_against_truth(
            lambda *a: as_call(ot.spectral_attention, backend="cpu")(*a)[index],
            lambda *a: as_call(ot.reference.spectral_attention)(*a)[index],
            args,
        )

    @pytest.mark.parametrize("name", ARGUMENTS)
    def test_only_the_needed_gradient(self, name):
        args = random_call(mask="bias", gain=True)
        index = ARGUMENTS.index(name)
        every = accuracy.outputs_and_gradients(as_call(ot.spectral_attention), args)[1]
        alone = [a.detach().requires_grad_(i == index) for i, a in enumerate(args)]
        (one,) = accuracy.outputs_and_gradients(as_call(ot.spectral_attention), tuple(alone))[1]
        assert torch.equal(one, every[index])

    @pytest.mark.parametrize("mask", ["none", "bool"])
    def test_compile(self, mask):
        calls = [random_call(b, 5, n, n, 16, 24, mask=mask) for b, n in ((2, 17), (3, 50), (4, 65))]
        compiling.check_compiles(as_call(ot.spectral_attention), calls, sums=[ARGUMENTS.index("eigenvalues")])

    def test_bit_equal_over_threads(self):
        for tokens in (65, 500):
            args = random_call(3, 3, tokens, tokens, 64, 70)
            repeat.check_bit_equal(as_call(ot.spectral_attention, is_causal=True), args)

    def test_backward_twice(self):
        repeat.check_backward_twice(as_call(ot.spectral_attention), random_call())

    def test_checkpointing(self):
        from torch.utils.checkpoint import checkpoint

        args = random_call()
        call = as_call(ot.spectral_attention)
        plain = accuracy.outputs_and_gradients(call, args)
        saved = accuracy.outputs_and_gradients(lambda *a: checkpoint(call, *a, use_reentrant=False), args)
        for a, b in zip(plain[0] + plain[1], saved[0] + saved[1], strict=True):
            assert torch.equal(a, b)

    def test_autocast(self):
        args = random_call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, low, _ = as_call(ot.spectral_attention, backend="cpu")(*args)
        assert y.dtype == torch.float32 and low.dtype == torch.float32  # as the residual
        gradients = torch.autograd.grad(y.float().sum() + low.sum(), args[:6])
        assert all(g.dtype == torch.float32 for g in gradients)

    def test_no_matrix_of_logits_is_saved(self):
        args = random_call(queries=300, keys=300)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            as_call(ot.spectral_attention)(*args)
        assert max(t.numel() for t in saved) < 300 * 300

    def test_direct_op_calls_are_checked_before_memory_is_touched(self):
        query, key, value, eigenvalues, basis, residual, _, _ = (
            a.detach() if a is not None else None for a in random_call()
        )
        op = torch.ops.overtone.spectral_attention
        bias, sample_scale, gain, addend = torch.ones(24), torch.ones(2), torch.ones(2), torch.ones(2, 2, 33, 16)
        call = {
            "query": query, "key": key, "value": value, "weight": basis, "bias": bias, "residual": residual,
            "sample_scale": sample_scale, "attn_mask": None, "gain": gain, "addend": addend, "is_causal": False,
            "scale": 1.0, "return_norms": True, "return_unrounded": False, "save_for_backward": True,
        }  # fmt: skip
        op(**call)
        for name, changed in (
            ("query", query[0]),
            ("key", key[:, :1]),
            ("value", value[..., :3]),
            ("weight", basis[:5]),
            ("weight", basis.double()),
            ("bias", bias[:5]),
            ("bias", bias.half()),
            ("bias", torch.ones(48)[::2]),
            ("residual", residual[:, :5]),
            ("residual", residual.half()),
            ("sample_scale", torch.ones(3)),
            ("sample_scale", torch.ones(2, 1)),
            ("attn_mask", torch.ones(3, 3, dtype=torch.bool)),
            ("gain", torch.ones(3)),
            ("gain", torch.ones(2).double()),
            ("addend", addend[:, :, :1]),
            ("addend", addend.half()),
        ):
            with pytest.raises(RuntimeError, match=f"spectral_attention: ({name}|key|value)"):
                op(**{**call, name: changed})

    def test_direct_backward_calls_are_checked_before_memory_is_touched(self):
        query, key, value, _, basis, *_ = (a.detach() if a is not None else None for a in random_call())
        forward, backward = torch.ops.overtone.spectral_attention, torch.ops.overtone.spectral_attention_backward
        addend = torch.ones(2, 2, 33, 16)
        y, _, _, attn_out, softmax_stats = forward(
            query, key, value, basis, *(None,) * 5, addend, False, 1.0, False, False, True
        )
        call = {
            "grad_y": y, "query": query, "key": key, "value": value, "weight": basis, "attn_mask": None,
            "gain": torch.ones(2), "addend": addend, "is_causal": False, "scale": 1.0, "attn_out": attn_out,
            "softmax_stats": softmax_stats, "output_mask": 127,
        }  # fmt: skip
        backward(**call)
        for name, changed in (
            ("grad_y", y[:1]),
            ("grad_y", y.double()),
            ("grad_y", y.mT.contiguous().mT),
            ("attn_out", attn_out[:, :5]),
            ("attn_out", torch.empty(0)),
            ("softmax_stats", softmax_stats[..., :1]),
            ("gain", torch.ones(1)),
            ("addend", torch.ones(1, 2, 33, 16)),
        ):
            with pytest.raises(RuntimeError, match=f"spectral_attention_backward: {name}"):
                backward(**{**call, name: changed})


class TestPacked:
    """A packed qkv gives what its three views give, and its gradient in one piece."""

    def arguments(self, dtype=torch.float32, mask="none", gain=False, sizes=(2, 2, 33, 33, 16, 24)):
        query, key, value, *rest = random_call(*sizes, dtype, mask, gain)
        qkv = torch.stack([x.detach().transpose(1, 2) for x in (query, key, value)], 2).requires_grad_()
        return qkv, *rest

    @staticmethod
    def packed(qkv, eigenvalues, basis, residual, attn_mask, head_gain, **options):
        y, norms = attention.spectral_attention_qkvpacked(
            qkv, eigenvalues, basis, residual=residual, attn_mask=attn_mask, head_gain=head_gain, return_norms=True,
            **options,
        )  # fmt: skip
        return y, *norms

    @staticmethod
    def by_views(qkv, *rest):
        return as_call(ot.spectral_attention)(*qkv.permute(2, 0, 3, 1, 4).unbind(0), *rest)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    @pytest.mark.parametrize("gain", [False, True])
    @pytest.mark.usefixtures("poisoned_empty")
    def test_equals_its_views(self, cpu_kernels, dtype, mask, gain):
        args = self.arguments(dtype, mask, gain)
        theirs, ours = (accuracy.outputs_and_gradients(f, args) for f in (self.by_views, self.packed))
        for a, b in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
            assert torch.equal(a, b)
        assert ours[1][0].is_contiguous()
        assert cpu_kernels.last_kernel().startswith("spectral_attention_qkvpacked_backward/")

    @pytest.mark.parametrize("index", range(5))
    def test_only_the_needed_gradient(self, index):
        args = self.arguments(mask="bias")[:5]
        every = accuracy.outputs_and_gradients(lambda *a: self.packed(*a, None), args)[1]
        alone = tuple(a.detach().requires_grad_(i == index) for i, a in enumerate(args))
        (one,) = accuracy.outputs_and_gradients(lambda *a: self.packed(*a, None), alone)[1]
        assert torch.equal(one, every[index])

    def test_gradcheck(self):
        args = self.arguments(torch.float64, "bias", sizes=(1, 2, 4, 4, 3, 4))
        assert torch.autograd.gradcheck(self.packed, args)
        assert torch.autograd.gradgradcheck(self.packed, args)

    def test_opcheck(self):
        args = self.arguments()
        op = torch.ops.overtone.spectral_attention_qkvpacked
        qkv, _, weight, residual, *_ = args
        rest = (None, torch.ones(2), torch.zeros(2, 2, 33, 16), False, 0.25)
        torch.library.opcheck(op.default, (qkv, weight, None, residual, None, *rest, True, True, True))
        qkv, weight = qkv.detach(), weight.detach()
        y, *_, attn_out, softmax_stats = op(qkv, weight, None, None, None, *rest, True, True, True)
        for output_mask in (127 - 16, 7, 8):
            torch.library.opcheck(
                torch.ops.overtone.spectral_attention_qkvpacked_backward.default,
                (y, qkv, weight, *rest, attn_out, softmax_stats, output_mask),
            )

    def test_compile(self):
        compiling.check_compiles(
            self.packed, [self.arguments(sizes=(b, 5, n, n, 16, 24)) for b, n in ((2, 17), (3, 50))], sums=[1]
        )

    def test_reference(self):
        args = self.arguments()
        for a, b in zip(self.packed(*args, backend="reference"), self.packed(*args, backend="cpu"), strict=True):
            torch.testing.assert_close(a, b)

    def test_bad_shape(self):
        with pytest.raises(ValueError, match=r"qkv must be \[B, N, 3, H, D\], got \[2, 5, 4, 2, 8\]"):
            attention.spectral_attention_qkvpacked(torch.ones(2, 5, 4, 2, 8), torch.ones(16), torch.ones(16, 16))
