"""The frequency ops on a real GPU: what the interpreter cannot show (races, the hardware's arithmetic, graphs)."""

from __future__ import annotations

import pytest
import torch
from support import compiling, repeat, shapes
from support.frequency_calls import DTYPES, check_filter, check_norms, random_call, random_mask

import overtone as ot

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="torch sees no CUDA or ROCm device: the same kernels ran in the interpreter"
)


def on_gpu(args):
    return tuple(map(shapes.on_gpu, args))


@pytest.mark.parametrize("dtype", DTYPES)
class TestExactness:
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("tokens", [1, 50, 65, 197, 577, 5000])
    def test_norms(self, dtype, tokens, masked):
        x, _, _ = on_gpu(random_call((8, tokens, 192), dtype))
        check_norms(x, random_mask(x.shape).cuda() if masked else None)

    @pytest.mark.parametrize("is_causal", [False, True])
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("tokens", [1, 65, 197, 5000])
    def test_filter(self, dtype, tokens, masked, is_causal):
        args = on_gpu(random_call((4, tokens, 96), dtype))
        check_filter(args, mask=random_mask(args[0].shape).cuda() if masked else None, is_causal=is_causal)


@pytest.mark.parametrize("layout", shapes.LAYOUTS)
def test_layouts(layout):
    args = on_gpu(random_call((2, 2, 65, 48), layout=layout))
    check_norms(args[0])
    for is_causal in (False, True):
        check_filter(args, is_causal=is_causal)


def norms(x):
    return tuple(ot.frequency_norms(x, backend="triton"))


def test_bit_equal_over_repeats():
    args = on_gpu(random_call((4, 3000, 192), torch.bfloat16))
    repeat.check_bit_equal(norms, args[:1], thread_counts=(1, 2))
    repeat.check_bit_equal(lambda *args: ot.frequency_filter(*args, backend="triton"), args, thread_counts=(1, 2))


def test_compile():
    compiling.check_compiles(norms, [on_gpu(random_call((b, n, 24)))[:1] for b, n in ((2, 17), (3, 50), (4, 65))])


def test_cuda_graph():
    """A captured call, replayed on new values, gives what an eager call gives."""
    x = torch.randn(4, 197, 192, device="cuda")
    norms(x)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        low, high = norms(x)
    x.normal_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip((low, high), norms(x), strict=True))
