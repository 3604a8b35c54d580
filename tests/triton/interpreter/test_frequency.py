"""The frequency ops on the Triton kernels, in Triton's interpreter: it needs no GPU and is slow, so calls are small."""

from __future__ import annotations

import pytest
import torch
from support import shapes
from support.frequency_calls import DTYPES, check_filter, check_norms, random_call, random_mask
from support.interpreter import needs_triton, note_launches, run_cases

import overtone as ot

pytestmark = pytest.mark.usefixtures("poisoned_empty")


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_cases(__file__)


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that run, in order."""
    from overtone.triton_kernels.frequency import launch as frequency

    return note_launches(monkeypatch, frequency)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, 65, 197])
@pytest.mark.parametrize("dtype", DTYPES)
def case_norms(dtype, tokens, masked):
    x, _, _ = random_call((2, tokens, 37), dtype)
    check_norms(x, random_mask(x.shape) if masked else None)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize("dtype", DTYPES)
def case_filter(dtype, tokens, masked, is_causal):
    args = random_call((2, tokens, 19), dtype)
    check_filter(args, mask=random_mask(args[0].shape) if masked else None, is_causal=is_causal)


@pytest.mark.parametrize("layout", shapes.LAYOUTS)
def case_layouts(layout):
    args = random_call((2, 2, 5, 7), layout=layout)
    check_norms(args[0])
    for is_causal in (False, True):
        check_filter(args, is_causal=is_causal)


def case_leading_strides():
    """One stride, two strides, and a table of offsets walk the samples; the mask's differ from x's."""
    from overtone.triton_kernels.runtime import strided

    x = torch.randn(2, 3, 2, 5, 4)
    views = {"one": x, "two": x.transpose(1, 2)[:, :, :1], "table": x.permute(2, 1, 0, 3, 4)}
    for walk, view in views.items():
        _, offsets, inner, *_ = strided(view, 2)
        assert walk == ("table" if offsets is not None else "two" if inner > 1 else "one")
        mask = torch.rand(view.shape[1:-1]) > 0.3
        mask = mask.expand(view.shape[:-1])
        check_norms(view.detach().requires_grad_(), mask)
        check_filter((view.detach().requires_grad_(), 0.5, 2.0), mask=mask, is_causal=True)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0), (5, 3), (2, 0, 1, 4, 3)])
def case_empty_and_unbatched(shape):
    args = random_call(shape)
    mask = torch.ones(shape[:-1], dtype=torch.bool)
    check_norms(args[0], mask)
    for is_causal in (False, True):
        check_filter(args, mask=mask, is_causal=is_causal)


@pytest.mark.parametrize("is_causal, part", [(False, 1024), (True, 64)])
@pytest.mark.parametrize("masked", ["none", "first part", "last parts"])
def case_many_tokens(masked, is_causal, part):
    """Three splits, or three tiles of the running mean; with the masks, some of them without a valid token."""
    args = random_call((1, 2 * part + 7, 3))
    mask = torch.ones(1, 2 * part + 7, dtype=torch.bool)
    mask[:, ::5] = masked == "none"
    if masked != "none":
        mask[:, slice(0, part) if masked == "first part" else slice(part, None)] = False
    if not is_causal:
        check_norms(args[0], mask)
    check_filter(args, mask=mask, is_causal=is_causal)


@pytest.mark.parametrize("offset", [1.0, 1000.0, -3.0e7])
@pytest.mark.parametrize("tokens", [2, 197, 1100])
def case_almost_equal_tokens(tokens, offset):
    """HFC/LFC = 1e-6, float32 tokens far from zero: right to 1e-4 relative."""
    generator = torch.Generator().manual_seed(2)
    x = (offset * (1 + 1e-6 * torch.randn(1, tokens, 6, dtype=torch.float64, generator=generator))).float()
    truth = ot.reference.frequency_norms(x.double())
    norms = ot.frequency_norms(x, backend="triton")
    torch.testing.assert_close(norms.high.double(), truth.high, rtol=1e-4, atol=0)
    torch.testing.assert_close(norms.low.double(), truth.low, rtol=1e-6, atol=0)
    for is_causal in (False, True):
        high = ot.de_escalate(x, is_causal=is_causal, backend="triton").double()
        true_high = ot.reference.de_escalate(x.double(), is_causal=is_causal)
        assert (high - true_high).norm() <= 1e-4 * true_high.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("tokens", [3, 49, 103, 197, 1100])
def case_equal_tokens_have_no_high_frequency(dtype, masked, tokens):
    x = random_call((2, 1, 6), dtype)[0].detach().expand(2, tokens, 6).clone().requires_grad_()
    high = ot.frequency_norms(x, mask=random_mask(x.shape) if masked else None, backend="triton").high
    assert high.tolist() == [0, 0]
    assert not torch.autograd.grad(high.sum(), x)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("share, is_zero", [(2.0, True), (3.0, False)])
def case_the_limit_of_equal_tokens(dtype, share, is_zero):
    """2.5 ε times ‖LFC‖, as on the CPU and in the reference."""
    x = torch.tensor([[[1.0, share], [1.0, -share]]], dtype=dtype)
    x[..., 1] *= torch.finfo(dtype).eps
    for norms in (ot.frequency_norms(x, backend="triton"), ot.reference.frequency_norms(x)):
        assert (norms.high.item() == 0) == is_zero


@pytest.mark.parametrize("tokens, is_causal", [(9, False), (9, True), (1030, False)])
def case_masked_tokens_are_not_read(tokens, is_causal):
    """NaN in masked tokens of x and of the gradient goes nowhere; their own gradient is zero."""
    x, low, high = random_call((2, tokens, 3))
    mask = random_mask(x.shape)
    x = x.detach().masked_fill(~mask[..., None], float("nan")).requires_grad_()
    for norm in ot.frequency_norms(x, mask=mask, backend="triton"):
        assert norm.isfinite().all()
    y = ot.frequency_filter(x, low, high, mask=mask, is_causal=is_causal, backend="triton")
    grad_y = torch.ones_like(y).masked_fill(~mask[..., None], float("nan"))
    gradients = torch.autograd.grad(y, (x, low, high), grad_y)
    for result in (y, *gradients):
        assert result.isfinite().all()
    assert (y[~mask] == 0).all() and (gradients[0][~mask] == 0).all()


def case_gains_with_any_stride():
    x, low, high = random_call((2, 5, 7))
    strided = torch.stack([low, high], 1).detach().requires_grad_()
    check_filter((x, strided[:, 0].detach().requires_grad_(), high.detach()[0].expand(7)))
    check_filter((x, 0.25, strided[:, 1].detach().requires_grad_()), is_causal=True)


@pytest.mark.parametrize(
    "tokens, is_causal, wanted",
    [
        (5, False, ["filter", "filter_backward", "reduce_gains"]),
        (5, True, ["causal_filter", "causal_adjoint", "causal_gains", "reduce_gains"]),
        (1025, False, ["moments", "filter", "moments", "moments", "filter_backward", "reduce_gains"]),
    ],
)
def case_filter_launches(launched, tokens, is_causal, wanted):
    x, low, high = random_call((1, tokens, 2))
    ot.frequency_filter(x, low, high, is_causal=is_causal, backend="triton").sum().backward()
    assert launched == wanted


@pytest.mark.parametrize(
    "tokens, wanted",
    [
        (5, ["norms", "finish_norms", "norms_backward"]),
        (1025, ["moments", "norms", "finish_norms", "moments", "norms_backward"]),
    ],
)
def case_norms_launches(launched, tokens, wanted):
    x, _, _ = random_call((1, tokens, 2))
    ot.frequency_norms(x, backend="triton").ratio.sum().backward()
    assert launched == wanted


@pytest.mark.parametrize("is_causal", [False, True])
def case_gradients_not_asked_for_are_not_computed(launched, is_causal):
    x, low, high = (argument.detach() for argument in random_call((2, 5, 3)))
    backward = torch.ops.overtone.frequency_filter_backward
    grad_x, grad_low, grad_high = backward(x, None, low, high, None, is_causal, True)
    assert launched == ["causal_adjoint" if is_causal else "filter"]
    assert grad_x.shape == x.shape and grad_low.shape == grad_high.shape == (0,)
    launched.clear()
    grad_x, grad_low, grad_high = backward(x, x, low, high, None, is_causal, False)
    assert launched == ["causal_gains" if is_causal else "filter_backward", "reduce_gains"]
    assert grad_x.shape == (0,) and grad_low.shape == grad_high.shape == low.shape


@pytest.mark.parametrize("dtype", DTYPES)
def case_contract(dtype):
    """The launchers return what the fakes promise: shapes, dtypes, strides."""
    x, low, high = (argument.detach() for argument in random_call((2, 5, 3), dtype, layout="transposed"))
    mask = random_mask(x.shape)
    norms = torch.ops.overtone.frequency_norms(x, mask)
    calls = [
        ("frequency_norms", (x, mask)),
        ("frequency_norms_backward", (*norms, x, *norms, mask, None)),
        ("frequency_filter", (x, low, high, mask, True)),
        ("frequency_filter_backward", (x, x, low, high, mask, False, True)),
        ("frequency_filter_backward", (x, None, low, high, mask, True, False)),
    ]
    for name, args in calls:
        op = getattr(torch.ops.overtone, name).default
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
