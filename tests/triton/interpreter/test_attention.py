"""spectral_attention on the Triton kernels, in Triton's interpreter: it needs no GPU and is slow, so calls are small.

The interpreter multiplies bfloat16 wrongly and runs one program after the other: bfloat16 and races are not seen here.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from ops.test_attention import ARGUMENTS, as_call, biased_call, random_call
from support import accuracy, compiling, repeat
from support.attention_calls import plain_attention, step_by_step
from support.interpreter import needs_triton, note_launches, run_cases

import overtone as ot
from overtone.ops.attention import spectral_attention_qkvpacked

DTYPES = (torch.float32, torch.float16)
pytestmark = pytest.mark.usefixtures("poisoned_empty")


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_cases(__file__)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of attention's kernels that run, in order."""
    from overtone.triton_kernels.attention import launch as attention

    return note_launches(monkeypatch, attention)


@pytest.fixture(params=["one launch", "two launches"])
def form(request, monkeypatch, launched) -> str:
    """Forces the form of forward, and proves afterwards that it ran."""
    from overtone.triton_kernels.attention.config import ConfigTable
    from overtone.triton_kernels.runtime import LaunchConfig

    shipped = ConfigTable.fused

    def one_launch(table, channels, keys):
        """As shipped, or where none is (float32) with this tile."""
        tile = {"BM": 32, "BN": 64, "SINGLE_PASS": keys <= 64, "E_TILE": 64, "NUM_E_TILES": max(1, -(-channels // 64))}
        return shipped(table, channels, keys) or LaunchConfig(tile, 4)

    forms = {"one launch": one_launch, "two launches": lambda table, channels, keys: None}
    monkeypatch.setattr(ConfigTable, "fused", forms[request.param])
    yield request.param
    assert ("fused" in launched) == (request.param == "one launch")
    assert ("projection" in launched) == (request.param == "two launches")


def check(*draws, return_norms=True, **options):
    """The first of the draws against truth; PyTorch's error is taken over all of them."""
    plain = ot.reference.spectral_attention if draws[0][0].dtype == torch.float32 else step_by_step
    accuracy.check_against_truth(
        as_call(ot.spectral_attention, return_norms, backend="triton", **options),
        as_call(plain, return_norms, **options),
        draws[0],
        more_draws=draws[1:],
    )


def random_calls(**sizes):
    """Several draws: norms and gains are few numbers, in which PyTorch's error of one draw says little."""
    return [random_call(seed=seed, **sizes) for seed in range(4)]


@pytest.mark.parametrize("dtype, tokens", [*((d, n) for d in DTYPES for n in (3, 65)), (torch.float16, 197)])
def case_tokens(form, dtype, tokens):
    check(*random_calls(batch=1, queries=tokens, keys=tokens, dtype=dtype))


@pytest.mark.parametrize(
    "dtype, width", [*((d, w) for d in DTYPES for w in (8, 72, 128)), (DTYPES[0], 80), (DTYPES[1], 88), (DTYPES[1], 20)]
)
def case_widths(dtype, width):
    check(*random_calls(batch=1, queries=19, width=width, channels=width + 3, dtype=dtype))


@pytest.mark.parametrize("channels", [1, 65, 192])
def case_channels(form, channels):
    check(*random_calls(batch=1, queries=19, channels=channels, dtype=torch.float16))


@pytest.mark.parametrize(
    "dtype, queries, keys, is_causal",
    [
        *((DTYPES[1], *call) for call in ((1, 40, False), (40, 2, False), (40, 17, True), (70, 300, True))),
        *((DTYPES[0], *call) for call in ((1, 40, False), (40, 17, True), (17, 300, False))),
    ],
)
def case_different_lengths(form, dtype, queries, keys, is_causal):
    check(*random_calls(batch=1, queries=queries, keys=keys, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("mask", ["none", "bool", "bias"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def case_masks(dtype, mask, is_causal):
    check(*random_calls(batch=1, queries=20, keys=37, mask=mask, dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize(
    "dtype, mask, is_causal", [(DTYPES[0], "none", False), (DTYPES[0], "bias", True), (DTYPES[1], "bool", False)]
)
def case_head_gain(dtype, mask, is_causal):
    """AttnScale's: the kernels' gain and addend."""
    check(*random_calls(batch=1, queries=20, keys=37, mask=mask, gain=True, dtype=dtype), is_causal=is_causal)


def case_packed_views():
    check(random_call(packed=True))


def case_a_packed_qkv_equals_its_views():
    query, key, value, eigenvalues, basis, *_ = random_call(1, 2, 9, 9)
    qkv = torch.stack([x.detach().transpose(1, 2) for x in (query, key, value)], 2).requires_grad_()
    packed = partial(spectral_attention_qkvpacked, backend="triton")
    views = as_call(ot.spectral_attention, return_norms=False, backend="triton")
    results = (
        accuracy.outputs_and_gradients(packed, (qkv, eigenvalues, basis)),
        accuracy.outputs_and_gradients(
            lambda qkv, *rest: views(*qkv.permute(2, 0, 3, 1, 4).unbind(0), *rest, None, None, None),
            (qkv, eigenvalues, basis),
        ),
    )
    for ours, theirs in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def case_any_strides():
    """Every floating argument transposed in memory, and a mask that is broadcast by strides of zero."""
    args = list(random_call(queries=20, keys=30))
    for index in (0, 1, 2, 4, 5):
        transposed = args[index].detach().transpose(-2, -1).contiguous().transpose(-2, -1)
        args[index] = transposed.requires_grad_()
    args[3] = torch.stack([args[3].detach()] * 2, 1)[:, 0].requires_grad_()
    args[6] = torch.rand(2, 1, 1, 30) > 0.3
    check(tuple(args))


@pytest.mark.parametrize("dtype", DTYPES)
def case_dweight_over_splits(monkeypatch, launched, dtype):
    """150 tokens in splits of 64, the last one shorter."""
    from overtone.triton_kernels.attention import config as attention_configs

    monkeypatch.setattr(attention_configs, "SPLIT_TOKENS", 50)
    args = random_call(2, 1, 75, 9, 16, 24, dtype)
    weight = args[3:5]
    check(tuple(a if a is None or any(a is w for w in weight) else a.detach() for a in args), return_norms=False)
    assert launched[-2:] == ["dweight", "reduce_rows"]


def case_without_residual_and_norms():
    check(random_call(batch=1, residual=False), return_norms=False, scale=0.3)


@pytest.mark.parametrize("tokens, stride", [(2, 2**31), (600, 2**22 - 8)])  # a copy; no copy
def case_offsets_beyond_32_bits(monkeypatch, tokens, stride):
    """Tokens so far apart that a head spans more than 2³¹ elements: memory that nobody touches costs nothing."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    storage = torch.empty((tokens - 1) * stride + 64, dtype=torch.float16)
    assert storage.numel() > 2**31
    far = [storage[16 * i :].as_strided((1, 1, tokens, 16), (1, 1, stride, 1)) for i in range(3)]
    near = [torch.randn(1, 1, tokens, 16).half() for _ in range(3)]
    for there, here in zip(far, near, strict=True):
        there.copy_(here)
    basis = torch.randn(16, 16).half()

    def results(qkv):
        qkv = [x.detach().requires_grad_() for x in qkv]
        y = ot.spectral_attention(*qkv, torch.ones(16), basis, backend="triton")
        return y, *torch.autograd.grad(y, qkv, torch.ones_like(y))

    assert all(torch.equal(a, b) for a, b in zip(results(far), results(near), strict=True))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0}, {"queries": 0}, {"channels": 0}, {"keys": 0},
    ],
)  # fmt: skip
def case_empty(sizes):
    args = random_call(**({"queries": 5, "keys": 7} | sizes))
    y, *gradients = sum(
        accuracy.outputs_and_gradients(as_call(ot.spectral_attention, False, backend="triton"), args), []
    )
    plain = sum(accuracy.outputs_and_gradients(as_call(ot.reference.spectral_attention, False), args), [])
    for ours, theirs in zip((y, *gradients), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def case_fully_masked_rows_are_zero_and_send_nothing_back():
    query, key, value, eigenvalues, basis, _, _, _ = random_call(batch=1, queries=9, keys=33)
    mask = torch.ones(9, 33, dtype=torch.bool)
    mask[5] = False
    for attn_mask in (mask, torch.zeros(9, 33).masked_fill(~mask, -torch.inf)):
        y = ot.spectral_attention(query, key, value, eigenvalues, basis, attn_mask=attn_mask, backend="triton")
        assert torch.equal(y[:, 5], torch.zeros_like(y[:, 5]))
        gradients = torch.autograd.grad(y[:, 5].sum(), (query, key, value), retain_graph=True)
        assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients)
        assert all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (query, key, value)))


@pytest.mark.parametrize("tokens", [9, 100])
def case_a_nan_query_stays_in_its_row(tokens):
    args = list(random_call(queries=tokens, keys=tokens, batch=1))
    clean = as_call(ot.spectral_attention, False, backend="triton")(*args)
    with torch.no_grad():
        args[0] = args[0].clone()
        args[0][0, 1, 7, 3] = torch.nan
    y = as_call(ot.spectral_attention, False, backend="triton")(*args)
    assert y[0, 7].isnan().all()
    rows = [i for i in range(tokens) if i != 7]
    assert torch.equal(y[0, rows], clean[0, rows])


@pytest.mark.parametrize("factor", [2.0**10, 2.0**-10])
def case_large_and_small_logits(factor):
    """Queries and keys are multiples of 1/8, so that any order of summation gives the same products.

    Backward computes them again, and numpy's order, the interpreter's, depends on the tile's shape and the machine. The
    scale is no power of two, so that PyTorch rounds the logits as well.
    """

    def draw(query, key, *rest):
        query, key = ((8 * x.detach()).round() / 8 for x in (query, key))
        return (factor * query).requires_grad_(), key.requires_grad_(), *rest

    check(*(draw(*call) for call in random_calls(batch=1)), scale=0.3)


@pytest.mark.parametrize(
    "offset, logits, keys, is_causal", [(-1e6, 0.0, 37, False), (1e4, 1.0, 300, False), (1e6, 0.0, 20, True)]
)
def case_large_biases(form, offset, logits, keys, is_causal):
    """A bias of order one on top of a common one loses no digits that PyTorch keeps; nor do keys that a row sees
    for those that it does not."""
    draws = [biased_call(offset, logits, "rows", seed, batch=1, queries=20, keys=keys) for seed in range(4)]
    with torch.no_grad():
        for _, _, _, _, _, _, bias, _ in draws if is_causal else ():
            bias += 1e6 * torch.ones_like(bias).triu(1)
    check(*draws, return_norms=False, is_causal=is_causal)


@pytest.mark.parametrize("shape", [(), (1,), (20,), (9, 1), (1, 2, 1, 20)])
@pytest.mark.parametrize("is_causal", [False, True])
def case_biases_of_any_shape(shape, is_causal):
    *args, _, _ = random_call(batch=1, queries=9, keys=20)
    bias = torch.randn(shape)
    check((*args, bias, None), return_norms=False, is_causal=is_causal)


@pytest.mark.parametrize("mask", ["none", "bool", "bias"])
def case_a_gain_without_keys(mask):
    args = random_call(queries=5, keys=0, mask=mask, gain=True)
    ours, plain = (
        accuracy.outputs_and_gradients(as_call(function, False, **options), args)
        for function, options in ((ot.spectral_attention, {"backend": "triton"}), (ot.reference.spectral_attention, {}))
    )
    for a, b in zip(ours[0] + ours[1], plain[0] + plain[1], strict=True):
        torch.testing.assert_close(a, b)


def case_rows_that_are_equal_but_for_rounding_have_no_high_frequency(form):
    query, key, value, eigenvalues, basis, *_ = random_call(batch=1, queries=40, keys=65)
    equal = value.detach()[:, :, :1].expand_as(value).clone().requires_grad_()
    y, norms = ot.spectral_attention(query, key, equal, eigenvalues, basis, return_norms=True, backend="triton")
    assert (y != y[:, :1]).any(), "bit-equal rows prove nothing"
    assert norms.high.tolist() == [0]
    assert not torch.autograd.grad(norms.high.sum(), equal)[0].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [5, 70])
def case_norms_in_the_epilogue(form, launched, dtype, tokens):
    """They are those of y before rounding; without backward nothing is kept for it."""
    query, key, value, eigenvalues, basis, residual, *_ = (
        a if a is None else a.detach() for a in random_call(queries=tokens, keys=tokens, channels=70, dtype=dtype)
    )
    weight = eigenvalues[:, None] * basis.float()
    call = query, key, value, weight, None, residual, None, None, None, None, False, 0.25, True
    unrounded, low, high, attn_out, stats = torch.ops.overtone.spectral_attention(*call, True, False)
    assert attn_out.numel() == stats.numel() == 0 and unrounded.dtype == torch.float32
    y, *norms, _, _ = torch.ops.overtone.spectral_attention(*call, False, False)
    assert torch.equal(unrounded.to(dtype), y) and torch.equal(norms[0], low) and torch.equal(norms[1], high)
    truth = ot.reference.frequency_norms(unrounded.double())
    torch.testing.assert_close(low.double(), truth.low, rtol=1e-6, atol=0)
    torch.testing.assert_close(high.double(), truth.high, rtol=1e-6, atol=0)


def case_norms_of_almost_equal_tokens(form):
    """HFC/LFC = 1e-6 in y, float32: right to 1e-4 relative, as λ = 0 leaves y = residual."""
    query, key, value, eigenvalues, basis, *_ = random_call(batch=1, queries=150, keys=9)
    residual = (1000 * (1 + 1e-6 * torch.randn(1, 150, 24, dtype=torch.float64))).float()
    _, norms = ot.spectral_attention(
        query, key, value, 0 * eigenvalues, basis, residual=residual, return_norms=True, backend="triton"
    )
    truth = ot.reference.frequency_norms(residual.double())
    torch.testing.assert_close(norms.high.double(), truth.high, rtol=1e-4, atol=0)
    torch.testing.assert_close(norms.low.double(), truth.low, rtol=1e-6, atol=0)


KERNELS_FOR = {
    "query": ["dout", "dq"],
    "key": ["dout", "dkv"],
    "value": ["dout", "dkv"],
    "eigenvalues": ["dweight"],
    "basis": ["dweight"],
    "residual": [],
    "attn_mask": ["dout", "dq"],
}


@pytest.mark.parametrize("name", KERNELS_FOR)
def case_only_the_needed_gradient(launched, name):
    args = random_call(1, 2, 9, 11, mask="bias")
    index = ARGUMENTS.index(name)
    call = as_call(ot.spectral_attention, False, backend="triton")
    every = accuracy.outputs_and_gradients(call, args)[1]
    alone = [None if a is None else a.detach().requires_grad_(i == index) for i, a in enumerate(args)]
    launched.clear()
    (one,) = accuracy.outputs_and_gradients(call, tuple(alone))[1]
    assert torch.equal(one, every[index])
    forward = 1 if launched[0] == "fused" else 2
    assert launched[forward:] == KERNELS_FOR[name]


@pytest.mark.parametrize("dtype, mask, is_causal", [(torch.float32, "none", False), (torch.float16, "bias", True)])
def case_contract(dtype, mask, is_causal):
    """The launchers return what the fakes promise: shapes, dtypes, strides."""
    query, key, value, _, basis, residual, bias, _ = (
        a if a is None else a.detach() for a in random_call(1, 2, 5, 7, 8, 9, dtype=dtype, mask=mask)
    )
    attn_mask = None if bias is None else bias.float().expand(1, 2, 5, 7)
    heads, weight, gain = (query, key, value), basis.float(), torch.randn(2)
    addend = torch.randn(1, 2, 1, 8).expand(1, 2, 5, 8)
    rest = attn_mask, gain, addend, is_causal, 0.25
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    op, packed_op = torch.ops.overtone.spectral_attention, torch.ops.overtone.spectral_attention_qkvpacked
    for flags in ((False, False, False), (True, True, False), (False, True, True)):
        torch.library.opcheck(
            op.default, (*heads, weight, torch.randn(9), residual, torch.rand(1), *rest, *flags), **checks
        )
    y, _, _, *saved = op(*heads, weight, None, residual, None, *rest, True, True, True)
    for output_mask in (0b1111111 if bias is not None else 0b1101111, 0b1000, 0b1000000, 0b100000):
        backward = torch.ops.overtone.spectral_attention_backward.default
        torch.library.opcheck(backward, (y, *heads, weight, *rest, *saved, output_mask), **checks)
    qkv = torch.randn(1, 5, 3, 2, 8).to(dtype)
    rest = None, gain, addend, is_causal, 0.25
    y, _, _, *saved = packed_op(qkv, weight, None, None, None, *rest, False, False, True)
    for output_mask in (0b1101111, 0b1000):
        backward = torch.ops.overtone.spectral_attention_qkvpacked_backward.default
        torch.library.opcheck(backward, (y, qkv, weight, *rest, *saved, output_mask), **checks)


# Of the public function, beside ARGUMENTS: bias, sample_scale, gain, addend, and residual in float32.
EXTRAS = [
    (torch.float16, {"bias", "sample_scale", "wide residual"}, "none", False),
    (torch.float16, {"gain", "addend"}, "bool", False),
    (torch.float16, {"gain", "wide addend"}, "bias", True),
    (torch.float16, {"addend"}, "none", False),
    (torch.float32, {"gain"}, "none", True),
    (torch.float32, {"bias", "sample_scale", "gain", "addend"}, "bias", False),
]


@pytest.mark.parametrize("dtype, extras, mask, is_causal", EXTRAS)
def case_the_rest_of_the_formula(form, dtype, extras, mask, is_causal):
    """residual + sample_scale · (concat(gain · A V + addend) · weight + bias), and its gradients."""

    def draw(seed):
        generator = torch.Generator().manual_seed(seed)
        args = list(random_call(2, 3, 20, 37, 16, 24, dtype, mask, seed=seed))[:-1]
        random = {
            "bias": lambda: torch.randn(24, generator=generator).requires_grad_(),
            "gain": lambda: torch.randn(3, generator=generator).requires_grad_(),
            "addend": lambda: torch.randn(2, 3, 20, 16, generator=generator).to(dtype).requires_grad_(),
        }
        args += [random[name]() if name in extras else None for name in random]
        if "wide addend" in extras:
            args[-1] = torch.randn(2, 1, 1, 16, generator=generator).requires_grad_()
        if "wide residual" in extras:
            args[5] = args[5].detach().float().requires_grad_()
        return tuple(args)

    names = ("residual", "attn_mask", "bias", "gain", "addend")

    def call(function, **options):
        def run(query, key, value, eigenvalues, basis, *rest):
            options_ = options | dict(zip(names, rest, strict=True))
            if "sample_scale" in extras:
                options_["sample_scale"] = torch.tensor([0.0, 1.25])
            y, norms = function(
                query, key, value, eigenvalues, basis, is_causal=is_causal, return_norms=True, **options_
            )
            return y, *norms

        return run

    draws = [draw(seed) for seed in range(6)]
    accuracy.check_against_truth(
        call(ot.spectral_attention, backend="triton"), call(plain_attention), draws[0], more_draws=draws[1:]
    )


def case_compile():
    calls = [random_call(b, 3, n, n, 16, 24, mask="bias") for b, n in ((2, 17), (3, 33))]
    compiling.check_compiles(as_call(ot.spectral_attention, backend="triton"), calls, sums=[3])


def case_backward_twice_and_repeats():
    call = as_call(ot.spectral_attention, backend="triton")
    repeat.check_backward_twice(call, random_call(batch=1))
    repeat.check_bit_equal(call, random_call(batch=1), thread_counts=(1, 2))


def case_gradient_of_a_gradient():
    """Through the reference, as on the CPU."""
    args = random_call(1, 1, 4, 5, 4, 3)
    (ours, plain) = (
        torch.autograd.grad(
            torch.autograd.grad(as_call(f, False)(*args).square().sum(), args[0], create_graph=True)[0].square().sum(),
            args[:5],
        )
        for f in (ot.spectral_attention, ot.reference.spectral_attention)
    )
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def case_checkpointing(launched):
    """The same bits, from a forward pass that runs again in backward."""
    from torch.utils.checkpoint import checkpoint

    args = random_call(batch=1)
    call = as_call(ot.spectral_attention, backend="triton")
    plain = accuracy.outputs_and_gradients(call, args)
    once = list(launched)
    launched.clear()
    saved = accuracy.outputs_and_gradients(lambda *a: checkpoint(call, *a, use_reentrant=False), args)
    assert launched == once[:2] + once  # attention and projection, then both again before backward's kernels
    for a, b in zip(plain[0] + plain[1], saved[0] + saved[1], strict=True):
        assert torch.equal(a, b)


def case_autocast(launched):
    """Query, key and value are cast as if by hand; y is as wide as the residual, and all gradients are float32."""
    args = random_call(batch=1)
    call = as_call(ot.spectral_attention, backend="triton")
    with torch.autocast("cpu", dtype=torch.float16):
        results = call(*args)
    half = (a.half() if i < 3 else a for i, a in enumerate(args))
    assert all(torch.equal(a, b) for a, b in zip(results, call(*half), strict=True))
    y, low, _ = results
    assert y.dtype == low.dtype == torch.float32
    launched.clear()
    gradients = torch.autograd.grad(y.sum() + low.sum(), args[:6])
    assert all(g.dtype == torch.float32 for g in gradients)
    assert launched.count("dout") == launched.count("dq") == launched.count("dkv") == 1


def case_what_triton_does_not_take():
    args = random_call(1, 1, 4, 4, 129, 8)
    with pytest.raises(ot.BackendError, match="supports head_dim ≤ 128, got 129"):
        as_call(ot.spectral_attention, backend="triton")(*args)
    with pytest.raises(ot.BackendError, match="torch.float16, got torch.float64"):
        as_call(ot.spectral_attention, backend="triton")(*random_call(dtype=torch.float64))
    with pytest.warns(UserWarning, match="supports head_dim ≤ 128"):
        as_call(ot.spectral_attention)(*args)


def tune(monkeypatch, choose) -> None:
    """Autotuning whose choice is choose(candidates, run)."""
    from overtone.triton_kernels import autotune

    monkeypatch.setenv("OVERTONE_AUTOTUNE", "1")
    monkeypatch.setattr(
        autotune,
        "choose",
        lambda kernel, shipped, case, device, run: choose(autotune.candidates(kernel, shipped), run),
    )


CANDIDATES = [
    (form, number, *call)
    for form in ("one launch", "two launches")
    for number in (1, 2, 3, 4)
    for call in ((70, False), (300, True))  # a single pass; not
] + [("two launches", number, 70, False) for number in (5, 6)]  # of tiles with three sides


@pytest.mark.parametrize("form, number, keys, is_causal", CANDIDATES, indirect=["form"])
def case_every_candidate_of_autotuning(form, monkeypatch, number, keys, is_causal):
    """Those after the shipped one that differ in their tile; warps and stages mean nothing here."""
    tune(monkeypatch, lambda candidates, run: candidates[min(number, len(candidates) - 1)])
    check(*random_calls(batch=1, queries=70, keys=keys, dtype=torch.float16), is_causal=is_causal)


def case_timing_leaves_no_trace(form, monkeypatch):
    """Launches with all candidates before the one that counts change no bit of its result."""
    args = random_call(batch=1, queries=33, keys=33, dtype=torch.float16, mask="bias")

    def results():
        y, low, high = as_call(ot.spectral_attention, backend="triton")(*args)
        given = [a for a in args if a is not None]
        return y, low, high, *torch.autograd.grad(y.float().sum() + low.sum() + high.sum(), given)

    def time_all(candidates, run):
        for blocks in candidates:
            run(blocks)
        return candidates[0]

    untouched = [a if a is None else a.detach().clone() for a in args]
    plain = results()
    tune(monkeypatch, time_all)
    assert all(torch.equal(a, b) for a, b in zip(results(), plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(args, untouched, strict=True) if a is not None)


class Counter:
    """Counts what the interpreter loads, stores and multiplies, launch by launch."""

    def __init__(self, monkeypatch) -> None:
        from triton.runtime import interpreter

        from overtone.triton_kernels.attention import launch as attention
        from overtone.triton_kernels.frequency import launch as frequency

        self.counts, self.launches = [], []
        self.builder = interpreter.InterpreterBuilder
        for name in ("create_masked_load", "create_masked_store", "create_dot"):
            monkeypatch.setattr(self.builder, name, self._counting(name))
        for module in (attention, frequency):
            monkeypatch.setattr(module, "launch", partial(self._launch, module.launch))

    def _launch(self, launch, kernel, grid, *args, **meta) -> None:
        from overtone.triton_kernels.runtime import Launch

        self.read, self.written, self.flops = [], [], 0
        launch(kernel, grid, *args, **meta)
        unique = [len(np.unique(np.concatenate(addresses))) for addresses in (self.read, self.written)]
        self.launches.append(Launch(kernel, grid, args, meta))
        self.counts.append((*unique, self.flops, sum(map(len, self.read))))

    def _counting(self, name):
        original = getattr(self.builder, name)

        def load(builder, pointers, mask, *rest):
            self.read.append(_bytes(pointers, mask))
            return original(builder, pointers, mask, *rest)

        def store(builder, pointers, value, mask, *rest):
            self.written.append(_bytes(pointers, mask))
            return original(builder, pointers, value, mask, *rest)

        def dot(builder, a, b, *rest):
            self.flops += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
            return original(builder, a, b, *rest)

        return {"create_masked_load": load, "create_masked_store": store, "create_dot": dot}[name]


def _bytes(pointers, mask):
    """The address of every byte behind the pointers that are not masked."""
    first = pointers.data[mask.data].astype(np.int64)
    return (first[:, None] + np.arange(pointers.get_element_ty().primitive_bitwidth // 8)).ravel()


@pytest.mark.parametrize(
    "tokens, width, channels, dtype",
    [(70, 24, 200, torch.float16), (300, 16, 40, torch.float16), (33, 16, 40, torch.float32)],
)
@pytest.mark.parametrize("mask", ["none", "bias"])
def case_the_cost_model_is_what_the_kernels_do(monkeypatch, tokens, width, channels, dtype, mask):
    """Bytes of every launch, each counted once, and FLOPs equal the formula; so do all loads of attention's kernels."""
    from overtone.tools import attention_cost
    from overtone.triton_kernels.attention import config as attention_configs
    from overtone.triton_kernels.attention import launch as attention

    query, key, value, _, basis, residual, bias, _ = (
        a if a is None else a.detach()
        for a in random_call(1, 2, tokens, tokens + 3, width, channels, dtype=dtype, mask=mask)
    )
    bias = bias if bias is None else bias.float().expand(1, 2, tokens, tokens + 3)
    heads, weight = (query, key, value), basis.float()
    counter = Counter(monkeypatch)
    rest = bias, None, None, False, 1.0
    y, _, _, attn_out, stats = attention.forward(*heads, weight, None, residual, None, *rest, True, True, True)
    attention.backward(y, *heads, weight, *rest, attn_out, stats, 0b1111 if bias is None else 0b11111)
    assert len(counter.launches) >= 6
    for launch, counted in zip(counter.launches, counter.counts, strict=True):
        cost = attention_cost.cost(launch)
        assert (cost.read, cost.written, cost.flops) == counted[:3], cost.name
        if cost.name in attention_configs.TILES:
            assert cost.loaded == counted[3], cost.name
