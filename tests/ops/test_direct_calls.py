"""The extension's ops called directly, past the checks in Python: what does not fit is refused, in words that say why.

tests/project/fuzz_workload.py does the same with thousands of calls, under sanitizers too (test_sanitizers.py).
"""

from __future__ import annotations

import pytest
import torch
from project import fuzz_workload

import overtone as ot
from overtone.ops import linear

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def test_calls_that_do_not_fit_are_refused_in_words_that_name_the_op(isa_level):
    calls = fuzz_workload.valid_calls()
    outcomes = fuzz_workload.fuzz(calls, 1500, seed=1)
    assert min(outcomes["ran"], outcomes["refused"]) > 300, outcomes


@pytest.mark.parametrize(
    ("norm", "got"),
    [
        (torch.zeros(3, dtype=torch.float64), r"got contiguous Double\[3\]"),
        (torch.zeros(2), r"got contiguous Float\[2\]"),
        (torch.zeros(6)[::2], r"got Float\[3\]"),
    ],
)
def test_norms_of_another_dtype_or_size_are_refused(norm, got):
    grads, x = torch.ones(3), torch.randn(3, 4, 5)
    with pytest.raises(
        RuntimeError, match=rf"frequency_norms_backward: low: {got} on the CPU, wanted contiguous Float"
    ):
        torch.ops.overtone.frequency_norms_backward(grads, grads, x, norm, grads, None, None)


def huge(*shape: int) -> torch.Tensor:
    """So large that no machine has the memory for a result of this shape; itself it takes none."""
    return torch.ones(1).expand(shape)


LARGE = 1 << 22

OUT_OF_MEMORY = {
    "frequency_filter": lambda: ot.frequency_filter(huge(LARGE, LARGE), 0.5, 1.0),
    "spectral_attention": lambda: ot.spectral_attention(*(huge(1, 1, LARGE, 1),) * 3, torch.ones(1), huge(1, LARGE)),
    "eigh": lambda: ot.linalg.eigh(huge(LARGE, LARGE)),
    "qr": lambda: ot.linalg.qr(huge(LARGE, LARGE)),
    "linear": lambda: linear.linear(huge(LARGE, 1), huge(LARGE, 1), None),
    "mlp": lambda: linear.mlp(huge(LARGE, 1), huge(1, 1), huge(1).contiguous(), huge(LARGE, 1), torch.ones(LARGE)),
}


@pytest.mark.parametrize("op", OUT_OF_MEMORY)
def test_out_of_memory_names_the_op_and_the_bytes(op):
    with pytest.raises(RuntimeError, match=rf"^{op}: out of memory: could not allocate (\d+) bytes$") as caught:
        OUT_OF_MEMORY[op]()
    assert int(str(caught.value).split()[-2]) >= 4 * LARGE**2
