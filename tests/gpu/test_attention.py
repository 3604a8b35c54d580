"""spectral_attention on a real GPU: what the interpreter cannot show (bfloat16, TF32, races, devices, graphs)."""

from __future__ import annotations

import pytest
import torch
from ops.test_attention import as_call, random_call
from support import accuracy, compiling, repeat, shapes
from support.attention_calls import step_by_step

import overtone as ot

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA or ROCm device: the same kernels ran in the interpreter"
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def on_gpu(args):
    return tuple(None if a is None else shapes.on_gpu(a) for a in args)


def random_calls(**sizes):
    return [on_gpu(random_call(seed=seed, **sizes)) for seed in range(4)]


def check(*draws, return_norms=True, **options):
    plain = ot.reference.spectral_attention if draws[0][0].dtype == torch.float32 else step_by_step
    accuracy.check_against_truth(
        as_call(ot.spectral_attention, return_norms, backend="triton", **options),
        as_call(plain, return_norms, **options),
        draws[0],
        more_draws=draws[1:],
    )


@pytest.mark.parametrize("dtype", DTYPES)
class TestExactness:
    @pytest.mark.parametrize("tokens", [3, 50, 65, 113, 197, 257, 577])
    def test_tokens(self, dtype, tokens):
        for channels in (192, 384):  # one launch, two launches
            check(*random_calls(heads=3, queries=tokens, keys=tokens, width=64, channels=channels, dtype=dtype))

    @pytest.mark.parametrize("width", [16, 32, 64, 72, 80, 88, 96, 128])
    def test_widths(self, dtype, width):
        check(*random_calls(width=width, channels=width + 3, dtype=dtype))

    @pytest.mark.parametrize(
        "queries, keys, is_causal", [(1, 40, False), (40, 2, False), (100, 17, True), (17, 300, True)]
    )
    def test_different_lengths(self, dtype, queries, keys, is_causal):
        check(*random_calls(queries=queries, keys=keys, dtype=dtype), is_causal=is_causal)

    @pytest.mark.parametrize("mask", ["none", "bool", "bias"])
    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("gain", [False, True])
    def test_masks_and_gain(self, dtype, mask, is_causal, gain):
        check(*random_calls(mask=mask, gain=gain, dtype=dtype), is_causal=is_causal)

    def test_packed_views(self, dtype):
        check(*random_calls(packed=True, dtype=dtype))


@pytest.mark.parametrize("width", [64, 72, 128])
@pytest.mark.parametrize("mask", ["none", "bool", "bias"])
def test_tf32(width, mask):
    """As exact as PyTorch with TF32, whose matrix products round their operands too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        check(*random_calls(queries=65, keys=65, width=width, channels=192, mask=mask, dtype=torch.float32))
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bit_equal_over_repeats(dtype):
    args = on_gpu(random_call(4, 3, 300, 300, 64, 192, dtype=dtype))
    repeat.check_bit_equal(as_call(ot.spectral_attention, backend="triton"), args, thread_counts=(1, 2))


def test_compile():
    calls = [on_gpu(random_call(b, 5, n, n, 16, 24)) for b, n in ((2, 17), (3, 50), (4, 65))]
    compiling.check_compiles(as_call(ot.spectral_attention, backend="triton"), calls)


def test_autocast():
    args = on_gpu(random_call())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y, low, _ = as_call(ot.spectral_attention, backend="triton")(*args)
    assert y.dtype == torch.bfloat16 and low.dtype == torch.float32


def test_cuda_graph():
    """A captured call, replayed on new values, gives what an eager call gives."""
    args = on_gpu(random_call(dtype=torch.bfloat16))
    args = tuple(None if a is None else a.detach() for a in args)
    call = as_call(ot.spectral_attention, False, backend="triton")
    call(*args)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(*args)
    args[0].normal_()
    graph.replay()
    assert torch.equal(y, call(*args))


def test_autotuning(monkeypatch, tmp_path):
    """As exact as the table, repeatable, and cached: a process that reads the file times nothing."""
    from overtone.triton_kernels import autotune

    monkeypatch.setenv("OVERTONE_AUTOTUNE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(autotune, "_known", {})
    calls = random_calls(heads=3, queries=197, keys=197, width=64, channels=384, dtype=torch.bfloat16)
    check(*calls)
    assert len(autotune._known) == 6  # kernels: two forward, four backward
    call = as_call(ot.spectral_attention, False, backend="triton")
    y = call(*calls[0])
    autotune._known.clear()
    monkeypatch.setattr(autotune, "measure", None)
    assert torch.equal(call(*calls[0]), y)


def test_many_tokens():
    """16k tokens: a matrix of logits would take 1 GiB a head."""
    query, key, value = (torch.randn(1, 1, 16384, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    basis = torch.eye(64, device="cuda", dtype=torch.bfloat16)
    y = ot.spectral_attention(query, key, value, torch.ones(64, device="cuda"), basis, backend="triton")
    rows = torch.tensor([0, 777, 16383], device="cuda")
    truth = torch.softmax(query[0, 0, rows].double() @ key[0, 0].double().T / 8, -1) @ value[0, 0].double()
    torch.testing.assert_close(y[0, rows].double(), truth, rtol=2e-2, atol=2e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_device():
    args = random_call(dtype=torch.float16)
    results = [
        as_call(ot.spectral_attention, False, backend="triton")(
            *(None if a is None else a.detach().to(f"cuda:{index}") for a in args)
        )
        for index in range(2)
    ]
    assert results[1].device.index == 1 and torch.equal(results[0].cpu(), results[1].cpu())
