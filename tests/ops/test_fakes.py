"""The fake of every op, which torch.compile and torch.export believe, says what its kernel really gives back.

Also for sizes of zero and one, where strides say little about memory and are easily left to chance.
"""

from __future__ import annotations

import itertools

import torch
from support import calls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import overtone as ot
from overtone.ops import attention, basis, layer_norm, linear
from overtone.ops.linalg import inverse

SIZES = (0, 1, 3)
# With and without the gradients of tokens, and of weights.
NEEDS = ((True, True), (True, False), (False, True))
# Both sides of the sizes at which kernels change: a lane's group, a cache line, a block.
LARGER = (17, 40)


class AgainstFakes(TorchDispatchMode):
    """Runs every op of ours on fakes of its arguments too, and compares what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.fakes = FakeTensorMode()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        real = op(*args, **(kwargs or {}))
        if op.namespace == "overtone":
            self.seen.add(op._opname)
            with self.fakes:
                fake = op(*tree_map_only(torch.Tensor, self.fakes.from_tensor, args))
            given = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in args]
            for place, (ours, its) in enumerate(zip(tree_leaves(real), tree_leaves(fake), strict=True)):
                actual, said = ((x.dtype, tuple(x.shape), x.stride()) for x in (ours, its))
                assert said == actual, f"{op._opname}{given}: result {place} is {actual}, its fake says {said}"
        return real


def random(*shape: int, dtype=torch.float32, needs: bool = True) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_(needs)


def backward(*results: torch.Tensor) -> None:
    wanted = [y for y in results if y.requires_grad]
    if wanted:
        torch.autograd.backward(wanted, [torch.ones_like(y) for y in wanted])


def sizes(count: int):
    """Every combination of small sizes, and the larger ones."""
    return [*itertools.product(SIZES, repeat=count), *((n,) * count for n in LARGER)]


def sweep_frequency(dtype) -> None:
    for shape, needs in itertools.product(sizes(3)[::2], (False, True)):
        x = random(*shape, dtype=dtype, needs=needs)
        low = torch.ones(shape[-1]).requires_grad_()
        mask = torch.rand(shape[:-1]) > 0.5
        backward(*ot.frequency_norms(x, mask=mask))
        backward(ot.frequency_filter(x, low, 2.0, mask=mask), ot.frequency_filter(x.mT, 0.5, 2.0, is_causal=True))


def sweep_attention(dtype) -> None:
    for batch, queries, keys, channels in sizes(4)[::4]:
        for heads, width in ((1, 1), (2, 3)):
            query, key, value = (random(batch, heads, n, width, dtype=dtype) for n in (queries, keys, keys))
            lam, weights = random(heads * width), random(heads * width, channels, dtype=dtype)
            residual = random(batch, queries, channels, dtype=dtype)
            bias = random(heads, 1, keys)
            packed = random(batch, queries, 3, heads, width, dtype=dtype)
            y, norms = ot.spectral_attention(
                query, key, value, lam, weights, residual=residual, attn_mask=bias, return_norms=True
            )
            backward(y, *norms)
            y, norms = attention.spectral_attention_qkvpacked(packed, lam, weights, return_norms=True)
            backward(y, *norms)
            backward(ot.spectral_attention(query.detach(), key, value.detach(), lam.detach(), weights))


def sweep_linear(dtype) -> None:
    for (tokens, inputs, hidden, outputs), needs in itertools.product(sizes(4), NEEDS):
        x = random(2, tokens, inputs, dtype=dtype, needs=needs[0])
        w1, b1, w2, b2 = (
            random(*shape, dtype=dtype, needs=needs[1])
            for shape in ((hidden, inputs), (hidden,), (outputs, hidden), (outputs,))
        )
        backward(linear.linear(x, w1, b1), linear.linear(x, w1), linear.mlp(x, w1, b1, w2, b2))
        residual = random(2, tokens, outputs, dtype=torch.promote_types(dtype, torch.float32), needs=needs[0])
        wide = (w.detach().to(residual.dtype).requires_grad_(needs[1]) for w in (w1, b1, w2, b2))
        backward(linear.mlp(x, *wide, residual=residual))
        with torch.no_grad():
            linear.mlp(x, w1, b1, w2, b2)


def sweep_layer_norm(dtype) -> None:
    for (tokens, channels), needs in itertools.product(sizes(2), NEEDS):
        x = random(2, tokens, channels, dtype=dtype, needs=needs[0])
        weight, bias = (random(channels, dtype=dtype, needs=needs[1]) for _ in range(2))
        backward(layer_norm.rounded_layer_norm(x, weight, bias))


def sweep_matrices(dtype) -> None:
    cache = basis.BasisCache()
    for batch, n in [((), 3), *(((b,), n) for b, n in sizes(2)), ((2, 0), 3), ((2, 3), 5)]:
        A = torch.randn(*batch, n, n, dtype=dtype).requires_grad_()
        eye = 4 * n * torch.eye(n, dtype=dtype)
        for given in (A, A.detach(), A.mT):
            values, vectors, _ = ot.linalg.eigh_ex(given + given.mT)
            backward(values, vectors.square(), ot.linalg.eigvalsh(given + given.mT))
            backward(ot.linalg.eigvals_ex(given)[0].abs(), ot.linalg.eig(given)[1].abs())
            ot.linalg.eigvals(given.softmax(-1), row_stochastic=True)
            backward(inverse.inverse(given + eye), inverse.inverse_ex(given + eye)[0])
            backward(basis.orthonormal_basis(given + eye, cache), basis.inverse_basis(given + eye, 1e5, cache))
        ot.linalg.eig_ex(A)
        ot.linalg.eigh(A + A.mT)
    for batch, rows, columns in sizes(3):
        A = torch.randn(batch, rows, columns, dtype=dtype).requires_grad_()
        backward(*ot.linalg.qr(A))
        for mode in ("complete", "r", "reduced"):
            ot.linalg.qr_ex(A.detach().mT, mode)


SWEEPS = [
    (sweep_frequency, torch.float32),
    (sweep_frequency, torch.bfloat16),
    (sweep_attention, torch.float32),
    (sweep_attention, torch.bfloat16),
    (sweep_linear, torch.float32),
    (sweep_linear, torch.bfloat16),
    (sweep_layer_norm, torch.float32),
    (sweep_matrices, torch.float64),
]


def test_fakes_have_the_kernels_strides(cpu_kernels):
    """Every op is reached, but for one that another calls within itself."""
    torch.manual_seed(0)
    with AgainstFakes() as compared:
        for sweep, dtype in SWEEPS:
            sweep(dtype)
    assert compared.seen == calls.registered_ops() - {"eigh_backward"}
