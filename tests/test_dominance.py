"""dominance by bounds and by ot.linalg: known cases, the reference's verdicts, certificates that hold."""

from __future__ import annotations

import math

import pytest
import torch

from overtone import reference
from overtone.analysis import Dominance, Eigenvalues, Verdict, dominance, eigenvalues, spectral_dominance
from overtone.analysis.spectral_dominance import enclosing_disk

F64 = torch.float64


def generator(seed):
    return torch.Generator().manual_seed(seed)


def attention(count, n, sharpness, seed=0, dtype=torch.float32):
    q, k = torch.randn(2, count, n, 8, generator=generator(seed), dtype=F64)
    return (sharpness * q @ k.mT / math.sqrt(8)).softmax(-1).to(dtype)


def weights(count, k, size, seed=0, dtype=torch.float32):
    return (size * torch.randn(count, k, k, generator=generator(seed), dtype=F64) / math.sqrt(k)).to(dtype)


def exact_spectrum(matrix):
    """The eigenvalues of a small matrix to forty digits, rounded to complex128."""
    mpmath = pytest.importorskip("mpmath", reason="needs mpmath for eigenvalues beyond float64")
    with mpmath.workdps(40):
        values = mpmath.eig(mpmath.matrix(matrix.double().tolist()), left=False, right=False)
    return torch.tensor([complex(value) for value in values], dtype=torch.complex128)


def exact_margin(a, h):
    """From eigenvalues to forty digits; the Perron eigenvalue is the one nearest to 1."""
    a, h = exact_spectrum(a), exact_spectrum(h)
    others = a[(a - 1).abs().argsort()[1:]]
    return float((1 + h).abs().max() - (1 + h[:, None] * others).abs().max())


@pytest.fixture
def only_bounds(monkeypatch):
    """No eigenvalue of A may be computed."""

    def refuse(*args, **kwargs):
        raise AssertionError("the bounds did not decide")

    monkeypatch.setattr(spectral_dominance, "_from_eigenvalues", refuse)


@pytest.fixture
def no_bounds(monkeypatch):
    """Every case is solved."""

    def leave_open(a, h, squarings):
        unknown = torch.full(a.shape[:1], math.nan, dtype=F64)
        return Dominance(torch.full_like(unknown, Verdict.CLOSE, dtype=torch.int8), unknown, unknown)

    monkeypatch.setattr(spectral_dominance, "_from_disk", leave_open)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("sharpness", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("size", [-0.3, 0.3, 2.0])
def test_certificates_hold(dtype, sharpness, size):
    """The true margin is within the error, and never on the other side of a verdict."""
    a, h = attention(2, 7, sharpness, dtype=dtype), weights(2, 4, size, dtype=dtype)
    result = dominance(a, h)
    for i in range(2):
        truth = exact_margin(a[i], h[i])
        assert abs(truth - result.margin[i]) <= result.error[i]
        assert result.verdict[i] == (Verdict.PERRON if truth > 0 else Verdict.OTHER)
    assert (result.margin.abs() > result.error).all()


def test_certificates_hold_for_what_rounds_to_the_matrix():
    """bfloat16 entries stand for every matrix that rounds to them."""
    for seed in range(5):
        a, h = attention(1, 7, 2.0, seed, F64)[0], weights(1, 3, 0.8, seed, F64)[0]
        result = dominance(a.bfloat16(), h.bfloat16())
        assert abs(exact_margin(a, h) - result.margin) <= result.error


@pytest.mark.parametrize("sharpness", [0.2, 1.0, 4.0])
def test_solved_certificates_hold(no_bounds, sharpness):
    a, h = attention(2, 7, sharpness, seed=1), weights(2, 4, 1.0, seed=1)
    result = dominance(a, h)
    for i in range(2):
        assert abs(exact_margin(a[i], h[i]) - result.margin[i]) <= result.error[i] < 1e-3


@pytest.mark.parametrize("n", [2, 3, 17, 65, 197])
def test_verdicts_are_those_of_the_reference(n):
    a = torch.cat([attention(4, n, sharpness, seed=n) for sharpness in (0.1, 1.0, 4.0)])
    h = weights(12, 6, 1.0, seed=n) * torch.tensor([-1.0, 0.4, 3.0]).repeat(4)[:, None, None]
    found, wanted = dominance(a, h), reference.analysis.dominance(a, h)
    decided = ~wanted.undecided & ~found.undecided
    assert torch.equal(found.verdict[decided], wanted.verdict[decided])
    assert decided.all() == (~wanted.undecided).all()
    assert ((found.margin - wanted.margin).abs() <= found.error + wanted.error).all()


@pytest.mark.parametrize("size, name", [(0.5, "perron"), (-0.5, "other")])
def test_smooth_attention_needs_no_eigenvalues(only_bounds, size, name):
    """λ ∈ (0, 1] always smooths, λ ∈ [−1, 0) never."""
    v = torch.linalg.qr(torch.randn(12, 12, generator=generator(0), dtype=F64)).Q
    spread = torch.linspace(0.5, 1, 12, dtype=F64) * size
    h = ((v * spread) @ v.T).float()
    for sharpness in (0.0, 0.3, 1.0):
        assert dominance(attention(10, 50, sharpness), h).counts()[name] == 10


@pytest.mark.parametrize("n", [2, 5, 50])
@pytest.mark.parametrize("e", [0.1, 0.5, 0.9])
def test_mixture_has_a_known_margin(n, e):
    """(1 − e)I + eΠ has the eigenvalues 1 and 1 − e: one λ smooths outside (−2/(2 − e), 0)."""
    a = (1 - e) * torch.eye(n, dtype=F64) + e / n
    edge = -2 / (2 - e)
    for value in (0.5, 1e-3, -1e-3, edge * 0.99, edge * 1.01, -4.0):
        result = dominance(a, torch.tensor([[value]], dtype=F64))
        truth = abs(1 + value) - abs(1 + value * (1 - e))
        assert result.verdict == (Verdict.PERRON if truth > 0 else Verdict.OTHER)
        assert abs(truth - result.margin) <= result.error + 1e-15


class TestUndecided:
    def test_ties(self):
        mixture = 0.5 * torch.eye(4) + 0.125
        assert dominance(mixture, torch.zeros(3, 3)).verdict == Verdict.TIE
        assert dominance(torch.eye(4), torch.diag(torch.tensor([0.5, 0.2]))).verdict == Verdict.TIE

    def test_closer_than_rounding(self):
        a = torch.tensor([[0.7, 0.3], [0.3, 0.7]])
        result = dominance(a, torch.tensor([[-2 / 1.4]]))
        assert result.verdict == Verdict.CLOSE and abs(result.margin) <= result.error < 1e-5

    def test_a_jordan_block_is_close_unless_it_is_causal(self):
        chain = torch.eye(9, dtype=F64)[[0, 0, 1, 2, 3, 4, 5, 6, 7]]
        h = torch.tensor([[0.5]], dtype=F64)
        assert dominance(chain, h, is_causal=True).verdict == Verdict.PERRON
        # Solvers cannot bound its zeros; its powers, which vanish, do.
        assert dominance(chain, h).verdict == Verdict.PERRON

    def test_what_is_no_attention_is_invalid_and_hurts_nobody(self):
        a = (0.5 * torch.eye(4) + 0.125).repeat(4, 1, 1)
        a[1, 2] = 0
        a[2, 0, 0] = math.nan
        result = dominance(a, torch.tensor([[0.5]]))
        assert result.verdict.tolist() == [Verdict.PERRON, Verdict.INVALID, Verdict.INVALID, Verdict.PERRON]
        h = torch.tensor([[[0.5]], [[math.inf]]])
        assert dominance(a[0], h).verdict.tolist() == [Verdict.PERRON, Verdict.INVALID]


class TestArguments:
    def test_leading_dimensions_broadcast(self):
        a, h = attention(6, 5, 1.0).reshape(2, 3, 5, 5), weights(3, 4, 1.0)
        result = dominance(a, h)
        assert result.verdict.shape == result.margin.shape == result.error.shape == (2, 3)
        for i in range(2):
            for j in range(3):
                assert result.verdict[i, j] == dominance(a[i, j], h[j]).verdict
        assert dominance(a[:, :1], h).verdict.shape == (2, 3)

    def test_eigenvalues_stand_for_the_weight(self):
        a, h = attention(3, 5, 1.0), weights(3, 4, 1.0)
        spectrum = eigenvalues(h)
        assert isinstance(spectrum, Eigenvalues)
        assert all(map(torch.equal, dominance(a, h), dominance(a, spectrum)))

    def test_chunks_do_not_matter(self, monkeypatch):
        a, h = attention(7, 20, 2.0), weights(7, 4, 2.0)
        whole = dominance(a, h)
        monkeypatch.setattr(spectral_dominance, "CHUNK_ELEMENTS", 800)
        for one, other in zip(whole, dominance(a, h), strict=True):
            torch.testing.assert_close(one, other)

    def test_one_token_no_case_and_errors(self):
        one = dominance(torch.ones(1, 1), torch.tensor([[-0.5]]))
        assert one.verdict == Verdict.PERRON and one.margin == math.inf
        assert dominance(torch.ones(0, 3, 3) / 3, torch.eye(2)).verdict.shape == (0,)
        with pytest.raises(ValueError, match="dominance: attention: got .* wanted a floating-point"):
            dominance(torch.zeros(3, 4), torch.eye(2))
        with pytest.raises(ValueError, match=r"dominance: weight: got shape \[0, 0\]"):
            dominance(torch.eye(3), torch.zeros(0, 0))
        with pytest.raises(TypeError, match="dominance: is_causal: got int"):
            dominance(torch.eye(3), torch.eye(2), is_causal=1)

    def test_causal_takes_the_diagonal(self):
        a = (
            torch.randn(9, 9, generator=generator(0))
            .masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf)
            .softmax(-1)
        )
        h = torch.diag(torch.tensor([0.4, -0.7]))
        other = max(abs(1 + x * z) for x in (0.4, -0.7) for z in a.diagonal()[1:].tolist())
        assert dominance(a, h, is_causal=True).margin.item() == pytest.approx(1.4 - other, abs=1e-6)

    @pytest.mark.parametrize("backend", ["reference", None])
    def test_backends_agree(self, backend):
        a, h = attention(4, 30, 4.0), weights(4, 8, 3.0)
        assert torch.equal(dominance(a, h, backend=backend).verdict, reference.analysis.dominance(a, h).verdict)


@pytest.mark.parametrize("squarings", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_disks_enclose(squarings, dtype):
    a = torch.cat([attention(5, 40, sharpness, dtype=dtype) for sharpness in (0.2, 1.0, 5.0)])
    disk = enclosing_disk(a, squarings)
    values = torch.linalg.eigvals(a.double())
    others = values.gather(-1, (values - 1).abs().argsort(-1)[:, 1:])
    assert ((others - disk.centre[:, None]).abs().amax(-1) <= disk.radius).all()
    assert (others.abs().amax(-1) <= disk.reach).all()
    assert ((others.mean(-1).real - disk.centre).abs() <= disk.centre_error + 1e-14).all()
    variance = (others - disk.centre[:, None]).square().mean(-1).real
    assert ((variance - disk.variance).abs() <= disk.variance_error + 1e-14).all()


def test_a_lower_matmul_precision_widens_to_float64():
    """torch may then multiply float32 in fewer bits, which the disk's rounding does not count."""
    a = attention(2, 30, 1.0)
    with_float32_rounding = enclosing_disk(a, 3).radius
    torch.set_float32_matmul_precision("medium")
    try:
        assert (enclosing_disk(a, 3).radius < with_float32_rounding).all()
    finally:
        torch.set_float32_matmul_precision("highest")
