"""What whole training steps launch is what is compiled ahead of time (and stands in budget.csv).

Steps run on CPU tensors in a process in which those go to the Triton launchers (TRITON_INTERPRET=1); launches are
recorded instead of made, so a step computes nothing of value but asks for every kernel that it would.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.interpreter import needs_triton, run_cases

import overtone as ot


@needs_triton
@pytest.mark.slow
def test_in_the_interpreter():
    run_cases(__file__)


@pytest.fixture(scope="module")
def compiled() -> set[tuple]:
    """The variants that are compiled ahead of time for sm_80."""
    from overtone.tools import triton_aot as aot

    return {aot.variant(kernel.launch) for dtype in aot.DTYPES for kernel in aot.kernels(dtype, "sm_80")}


@pytest.fixture
def recorded(monkeypatch):
    """The launches from now on, which write nothing: results are zero instead of uninitialized."""
    from overtone.triton_kernels.runtime import assume_architecture, record_launches

    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    with assume_architecture("sm_80"), record_launches() as launches:
        yield launches


REGIMES = [("free", "symmetric"), ("sharpen", "symmetric"), ("smooth", "symmetric"), ("sharpen", "general")]


def step(regime="sharpen", kind="symmetric", dtype=None, return_norms=False, dim=192, **config) -> None:
    """Forward and backward of a ViT of one head per 64 channels on 196 patches."""
    torch.manual_seed(0)
    make = {192: ot.models.vit_tiny, 768: ot.models.vit_base}[dim]
    model = make(depth=2, num_classes=10, regime=regime, kind=kind, **config)
    context = nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)
    with context:
        result = model(torch.randn(2, 3, 224, 224), return_norms=return_norms)
        logits, norms = result if return_norms else (result, None)
    loss = logits.float().sum()
    if norms is not None:
        loss = loss + norms.low.sum() + norms.high.sum()
    loss.backward()


def check(recorded, compiled, wanted=("dout", "dweight", "dq", "dkv")) -> None:
    from overtone.tools import triton_aot as aot

    names = {launch.kernel.fn.__name__.removesuffix("_kernel") for launch in recorded}
    assert set(wanted) <= names and names & {"fused", "attention"}
    for launch in recorded:
        if launch.kernel.fn.__name__ != "norms_backward_kernel":  # of the frequency ops, which are compiled with masks
            assert aot.variant(launch) in compiled, aot.variant(launch)


@pytest.mark.parametrize("return_norms", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("regime, kind", REGIMES)
def case_regimes(recorded, compiled, regime, kind, dtype, return_norms):
    step(regime, kind, dtype, return_norms)
    check(recorded, compiled)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    "config",
    [
        {"drop_path": 0.5}, {"grad_checkpointing": True}, {"dim": 768}, {"method": "attn_scale"},
        {"method": "centered"}, {"method": "neutreno"}, {"drop_path": 0.5, "grad_checkpointing": True, "dim": 768},
    ],
    ids=str,
)  # fmt: skip
def case_what_a_model_adds(recorded, compiled, config, dtype):
    step(dtype=dtype, **config)
    check(recorded, compiled)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def case_inference(recorded, compiled, dtype):
    model = ot.models.vit_tiny(depth=1, num_classes=10, regime="smooth").eval()
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype):
        model(torch.randn(2, 3, 224, 224), return_norms=True)
        model(torch.randn(2, 3, 224, 224))
    check(recorded, compiled, wanted=())


def case_a_launch_that_is_not_compiled_is_found(recorded, compiled):
    """Heads of 40 channels: no list has them."""
    query = torch.randn(2, 3, 33, 40, dtype=torch.float16)
    ot.spectral_attention(query, query, query, torch.ones(120), torch.randn(120, 48), backend="triton")
    with pytest.raises(AssertionError):
        check(recorded, compiled, wanted=())
