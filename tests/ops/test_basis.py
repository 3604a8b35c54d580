"""The bases of spectra: values, gradients and errors of the two ops, and when a factorisation is done again."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from support import accuracy
from torch.autograd import gradcheck, gradgradcheck

import overtone as ot
from overtone import reference
from overtone.ops.basis import BasisCache, inverse_basis, orthonormal_basis

BACKENDS = ("cpu", "reference")
LIMIT = 1e4


def by_qr(theta):
    return orthonormal_basis(theta, BasisCache())


def by_inverse(v):
    return inverse_basis(v, LIMIT, BasisCache())


def plain_qr(theta):
    return reference.linalg.qr(theta).Q


OPS = {"orthonormal": (by_qr, plain_qr), "inverse": (by_inverse, reference.linalg.inverse)}


def draw(shape, dtype=torch.float32, seed=0):
    """Matrices far from singular: their condition number would be all that is compared."""
    generator = torch.Generator().manual_seed(seed)
    n = shape[-1]
    matrix = torch.randn(shape, generator=generator, dtype=torch.float64) + 2 * n**0.5 * torch.eye(n)
    return matrix.to(dtype).requires_grad_()


@pytest.fixture
def factorisations(monkeypatch):
    """The number of factorisations done, by kind."""
    counts = dict.fromkeys(("orthonormal", "inverse"), 0)
    store = BasisCache.store

    def counting(name, kind, *args):
        counts[kind] += 1
        store(name, kind, *args)

    monkeypatch.setattr(BasisCache, "store", staticmethod(counting))
    return counts


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(3, 17, 17), (2, 64, 64), (5, 5), (0, 4, 4)])
def test_values_and_gradients(op, backend, dtype, shape):
    ours, plain = OPS[op]
    draws = [(draw(shape, dtype, seed),) for seed in range(3)]
    with ot.use_backend(backend):
        accuracy.check_against_truth(ours, plain, draws[0], more_draws=draws[1:])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradcheck(op, backend):
    matrix = draw((3, 3), torch.float64)
    with ot.use_backend(backend):
        assert gradcheck(OPS[op][0], (matrix,))
        assert gradgradcheck(OPS[op][0], (matrix,))


@pytest.mark.parametrize("op", OPS)
def test_opcheck_and_compile(op):
    """By way of AOTAutograd; tests/nn/test_models.py compiles whole models with Inductor."""
    cache = BasisCache()
    extra = () if op == "orthonormal" else (LIMIT,)
    name = getattr(torch.ops.overtone, f"{op}_basis").default
    torch.library.opcheck(name, (draw((2, 6, 6)), *extra, cache.name))
    function = orthonormal_basis if op == "orthonormal" else inverse_basis
    compiled = torch.compile(lambda matrix: function(matrix, *extra, cache), fullgraph=True, backend="aot_eager")
    eager = accuracy.outputs_and_gradients(lambda matrix: function(matrix, *extra, cache), (draw((2, 6, 6)),))
    ours = accuracy.outputs_and_gradients(compiled, (draw((2, 6, 6)),))
    torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_inside_autocast_is_as_outside(op):
    ours, _ = OPS[op]
    for backend in BACKENDS:
        grads = []
        for enabled in (False, True):
            matrix = draw((2, 8, 8))
            with ot.use_backend(backend), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                y = ours(matrix)
                y.backward(torch.linspace(0, 1, y.numel()).reshape(y.shape))
            grads.append((y, matrix.grad))
        assert grads[0][0].dtype == torch.float32
        assert all(map(torch.equal, *grads))


class TestCache:
    def test_equal_values_are_factorised_once(self, factorisations):
        cache, matrix = BasisCache(), draw((2, 6, 6))
        results = [orthonormal_basis(m, cache) for m in (matrix, matrix, matrix.detach().clone())]
        inverses = [inverse_basis(m, LIMIT, cache) for m in (matrix, matrix.detach())]
        assert factorisations == {"orthonormal": 1, "inverse": 1}
        assert torch.equal(results[0], results[2]) and torch.equal(*inverses)

    @pytest.mark.parametrize("op", OPS)
    def test_every_use_has_its_own_graph(self, op, factorisations):
        """Gradient accumulation: two backwards, one factorisation, the gradient twice."""
        cache, matrix = BasisCache(), draw((2, 6, 6))
        run = orthonormal_basis if op == "orthonormal" else lambda m, c: inverse_basis(m, LIMIT, c)
        weight = torch.randn(2, 6, 6)
        (run(matrix, cache) * weight).sum().backward()
        once = matrix.grad.clone()
        (run(matrix, cache) * weight).sum().backward()
        assert factorisations[op] == 1
        assert torch.equal(matrix.grad, 2 * once)

    @pytest.mark.parametrize(
        "write",
        [
            lambda m: m.data.mul_(2).add_(1),  # no version counter sees it
            lambda m: m.detach().numpy().fill(0.5) or m.data.add_(torch.eye(6)),
            lambda m: setattr(m, "data", torch.eye(6).repeat(2, 1, 1) * 3),
            lambda m: torch._foreach_add_([m.detach()], 1.0),
        ],
        ids=["data", "numpy", "new data", "foreach"],
    )
    def test_no_write_goes_unnoticed(self, write):
        cache, matrix = BasisCache(), draw((2, 6, 6))
        before = orthonormal_basis(matrix, cache).clone()
        write(matrix)
        after = orthonormal_basis(matrix, cache)
        assert torch.equal(after, by_qr(matrix))
        assert not torch.equal(after, before) or torch.equal(plain_qr(matrix), before)

    def test_a_result_that_is_overwritten_does_not_reach_the_cache(self):
        cache, matrix = BasisCache(), draw((2, 6, 6)).detach()
        for _ in range(3):
            result = orthonormal_basis(matrix, cache)
            assert torch.equal(result, by_qr(matrix))
            result.fill_(float("nan"))

    def test_another_backend_factorises_again(self, factorisations):
        cache, matrix = BasisCache(), draw((2, 6, 6))
        for backend in BACKENDS:
            with ot.use_backend(backend):
                orthonormal_basis(matrix, cache)
        assert factorisations["orthonormal"] == 2

    def test_what_inference_mode_cached_can_be_trained(self):
        cache, matrix = BasisCache(), draw((2, 6, 6))
        with torch.inference_mode():
            orthonormal_basis(matrix, cache)
        orthonormal_basis(matrix, cache).sum().backward()
        assert matrix.grad.isfinite().all()

    def test_copies_are_empty(self):
        cache = BasisCache()
        orthonormal_basis(draw((2, 6, 6)), cache)
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert other.name != cache.name and not other._entries

    def test_a_dead_cache_leaves_nothing_behind(self):
        name = BasisCache().name
        assert name not in BasisCache._alive


class TestErrors:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_an_ill_conditioned_basis_is_named(self, backend):
        v = draw((3, 6, 6)).detach()
        v[1] = torch.diag(torch.tensor([1, 1, 1, 1, 1, 1e-6]))
        with ot.use_backend(backend), pytest.raises(torch.linalg.LinAlgError) as error:
            by_inverse(v)
        assert "basis (1,) has a condition number of 1e+06, above max_condition=10000" in str(error.value)
        assert "kind='symmetric'" in str(error.value)

    def test_it_is_an_error_under_compile_too(self):
        cache = BasisCache()
        compiled = torch.compile(lambda v: inverse_basis(v, LIMIT, cache), fullgraph=True, backend="aot_eager")
        compiled(torch.eye(3)[None])
        with pytest.raises(torch.linalg.LinAlgError, match="condition number"):
            compiled(torch.diag(torch.tensor([1, 1, 1e-7]))[None])

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("op", OPS)
    def test_a_matrix_that_is_not_finite(self, op, backend):
        matrix = draw((2, 3, 3)).detach()
        matrix[1, 0, 0] = float("nan")
        with ot.use_backend(backend), pytest.raises(torch.linalg.LinAlgError, match=r"\(1,\).*not finite"):
            OPS[op][0](matrix)

    def test_a_singular_basis(self):
        with pytest.raises((torch.linalg.LinAlgError, RuntimeError), match="condition number|no inverse"):
            by_inverse(torch.zeros(1, 3, 3))

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"theta: got .*, wanted a floating-point or complex tensor \[..., n, n\]"):
            by_qr(torch.randn(2, 3))
