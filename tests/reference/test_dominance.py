"""dominance: cases whose answer is known (MATH §5), undecided ones by name, and the cheap facts of DBK's Table 1."""

from __future__ import annotations

import math

import pytest
import torch

from overtone import reference
from overtone.reference.dominance import (
    Eigenvalues,
    Verdict,
    deviation,
    dominance,
    eigenvalue_dominance,
    ergodicity,
    gain,
    gain_rounding,
    head_weights,
    matrix_eigenvalues,
    underflow,
)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def diagonal(*values):
    return torch.diag(torch.tensor(values, dtype=torch.float64))


def exact(*values):
    values = torch.tensor(values, dtype=torch.complex128)
    return Eigenvalues(values, torch.zeros(values.shape, dtype=torch.float64))


def uniform(n, dtype=torch.float64):
    return torch.full((n, n), 1 / n, dtype=dtype)


def mixture(n, e):
    """Eigenvalues 1 and, n − 1 times, 1 − e."""
    return (1 - e) * torch.eye(n, dtype=torch.float64) + e * uniform(n)


def cycle(n):
    return torch.eye(n, dtype=torch.float64).roll(1, 0)


def shrinking(e):
    """Two tokens with eigenvalues 1 and 1 − 2e, negative for e > 1/2."""
    return torch.tensor([[1 - e, e], [e, 1 - e]], dtype=torch.float64)


class TestKnownCases:
    @pytest.mark.parametrize("n", [2, 5, 64, 65, 197])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_uniform_attention(self, n, dtype):
        """spec(A) = {1, 0, …}: the margin is max|1 + λ| − 1. Its zero is as degenerate as an eigenvalue can be."""
        for value in (0.5, -0.5):
            result = dominance(uniform(n, dtype), diagonal(value, 0.1 * value).to(dtype))
            wanted = max(1 + value, 1 + 0.1 * value) - 1
            assert result.verdict == (Verdict.PERRON if value > 0 else Verdict.OTHER)
            assert abs(result.margin - wanted) <= result.error + 1e-15 and result.error < 1e-5

    @pytest.mark.parametrize("e, value, wanted", [(0.3, 0.5, 0.15), (0.3, -0.5, -0.15), (0.8, 0.4, 0.32)])
    def test_mixture(self, e, value, wanted):
        result = dominance(mixture(6, e), diagonal(value))
        torch.testing.assert_close(result.margin.item(), wanted)
        assert result.perron == (wanted > 0) and result.other == (wanted < 0)

    @pytest.mark.parametrize("n", [3, 4, 7])
    def test_cycle(self, n):
        """Roots of unity: all of modulus one, yet 1 + λz has its largest modulus at z = 1 for λ > 0."""
        z = [complex(math.cos(2 * math.pi * k / n), math.sin(2 * math.pi * k / n)) for k in range(1, n)]
        for value in (0.5, -0.5):
            result = dominance(cycle(n), diagonal(value))
            wanted = abs(1 + value) - max(abs(1 + value * root) for root in z)
            torch.testing.assert_close(result.margin.item(), wanted)
            assert result.verdict == (Verdict.PERRON if value > 0 else Verdict.OTHER)

    def test_circulant(self):
        row = randn(7).softmax(0)
        a = torch.stack([row.roll(i) for i in range(7)])
        other = torch.fft.fft(row)[1:]
        h = [-0.9, -0.2, 0.05]
        wanted = max(abs(1 + x) for x in h) - max(float((1 + x * other).abs().max()) for x in h)
        result = dominance(a, diagonal(*h))
        torch.testing.assert_close(result.margin.item(), wanted)
        assert result.verdict == (Verdict.PERRON if wanted > 0 else Verdict.OTHER)

    def test_complex_eigenvalues_of_the_weight(self):
        """H a rotation: λ = ±0.5i."""
        h = torch.tensor([[0.0, -0.5], [0.5, 0.0]], dtype=torch.float64)
        result = dominance(mixture(4, 0.6), h)
        torch.testing.assert_close(result.margin.item(), abs(1 + 0.5j) - abs(1 + 0.2j))

    def test_causal_takes_the_diagonal(self):
        a = randn(3, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), -math.inf).softmax(-1)
        h = torch.tensor([0.4, -0.7, 0.1], dtype=torch.float64)
        result = dominance(a, torch.diag(h), is_causal=True)
        for b in range(3):
            other = max(abs(1 + x * z) for x in h.tolist() for z in a[b].diagonal()[1:].tolist())
            torch.testing.assert_close(result.margin[b].item(), 1.4 - other)
        general = dominance(a, torch.diag(h))
        assert torch.equal(general.verdict, result.verdict)

    def test_the_diagonal_decides_where_a_solver_cannot(self):
        """Each token attends to the one before: one Jordan block at zero, whose eigenvalues no solver can bound."""
        chain = torch.eye(9, dtype=torch.float64)[[0, 0, 1, 2, 3, 4, 5, 6, 7]]
        result = dominance(chain, diagonal(0.5), is_causal=True)
        assert result.verdict == Verdict.PERRON and result.margin == 0.5
        assert dominance(chain, diagonal(0.5)).verdict == Verdict.CLOSE

    @pytest.mark.parametrize("seed", range(5))
    def test_any_attention_sharpens_with_eigenvalues_in_minus_one_to_zero(self, seed):
        """DBK: λ^H ∈ [−1, 0) avoids oversmoothing whatever A is; (0, 1] always smooths."""
        a = (3 * randn(4, 12, 12, seed=seed)).softmax(-1)
        v = torch.linalg.qr(randn(5, 5, seed=seed + 100)).Q
        sizes = torch.rand(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.99 + 0.01
        assert dominance(a, -(v * sizes) @ v.T).other.all()
        assert dominance(a, (v * sizes) @ v.T).perron.all()

    @pytest.mark.parametrize("lowest", [-0.9, -0.2, 0.3])
    def test_one_eigenvalue_sharpens_only_inside_its_interval(self, lowest):
        """λ ∈ (−2/(1 + λ₁), 0) sharpens; −ψ² beyond it smooths."""
        edge = -2 / (1 + lowest)
        a = shrinking((1 - lowest) / 2)
        for value, wanted in ((edge * 0.999, Verdict.OTHER), (edge * 1.001, Verdict.PERRON), (1e-3, Verdict.PERRON)):
            assert dominance(a, diagonal(value)).verdict == wanted


class TestUndecided:
    def test_zero_weight_is_a_tie(self):
        assert dominance(mixture(4, 0.5), torch.zeros(3, 3)).verdict == Verdict.TIE

    def test_a_zero_eigenvalue_that_wins_is_a_tie(self):
        """Rank k < d: with λ ≤ 0 and a positive λ₁ both sides are |1 + 0|."""
        w_v, w_proj = randn(6, 2), randn(2, 6, seed=1)
        sharpening = -w_v @ torch.linalg.inv(w_proj @ w_v) @ w_proj * 0.5  # eigenvalues −0.5 twice, 0 four times
        result = dominance(mixture(4, 0.5), sharpening)
        assert result.verdict == Verdict.TIE and abs(result.margin) <= result.error
        assert result.undecided and not result.perron and not result.other

    def test_a_zero_eigenvalue_that_loses_is_none(self):
        assert dominance(mixture(4, 0.5), diagonal(0.0, 0.3)).verdict == Verdict.PERRON
        assert dominance(shrinking(0.9), diagonal(0.0, -0.3)).verdict == Verdict.OTHER

    @pytest.mark.parametrize("a", [torch.eye(4), torch.block_diag(torch.full((2, 2), 0.5), torch.full((3, 3), 1 / 3))])
    def test_a_second_eigenvalue_one_is_a_tie(self, a):
        assert dominance(a, diagonal(0.5, 0.2)).verdict == Verdict.TIE

    def test_closer_than_rounding_is_close(self):
        """At the edge of the interval both sides are equal up to the rounding of float32 entries."""
        a = shrinking(0.3).float()
        lowest = 1 - 2 * 0.3
        result = dominance(a, diagonal(-2 / (1 + lowest)).float())
        assert result.verdict == Verdict.CLOSE and abs(result.margin) <= result.error < 1e-5

    def test_the_error_grows_with_the_condition(self):
        """A defective H: its eigenvalues are uncertain by far more than ε, and the verdict knows."""
        h = torch.tensor([[-1.5, 1e8], [0.0, -1.5]], dtype=torch.float64)
        assert dominance(shrinking(1 / 3), h).verdict == Verdict.CLOSE

    def test_what_is_no_attention_is_invalid_and_hurts_nobody(self):
        a = mixture(4, 0.5).repeat(4, 1, 1)
        a[1, 2] = 0  # a row that attends to nothing
        a[2, 0, 0] = math.nan
        result = dominance(a, diagonal(0.5))
        assert result.verdict.tolist() == [Verdict.PERRON, Verdict.INVALID, Verdict.INVALID, Verdict.PERRON]
        assert result.counts() == {"other": 0, "perron": 2, "tie": 0, "close": 0, "invalid": 2}
        h = diagonal(0.5).repeat(2, 1, 1)
        h[1] = math.inf
        assert dominance(mixture(4, 0.5), h).verdict.tolist() == [Verdict.PERRON, Verdict.INVALID]


class TestShapes:
    def test_leading_dimensions_broadcast(self):
        a = torch.stack([mixture(4, 0.5), shrinking(0.9).repeat(2, 2) / 2]).expand(3, 2, 4, 4)
        h = torch.stack([diagonal(0.5), diagonal(-0.5)])
        result = dominance(a, h)
        assert result.verdict.shape == result.margin.shape == result.error.shape == (3, 2)
        for i in range(2):
            assert torch.equal(result.verdict[:, i], dominance(a[:, i], h[i]).verdict)

    def test_one_token_is_perron(self):
        result = dominance(torch.ones(1, 1), diagonal(-0.5))
        assert result.verdict == Verdict.PERRON and result.margin == math.inf and result.error == 0

    def test_batch_zero(self):
        assert dominance(torch.ones(0, 3, 3) / 3, diagonal(0.5)).verdict.shape == (0,)

    @pytest.mark.parametrize(
        "a, h, name", [((3, 4), (2, 2), "attention"), ((3, 3), (2,), "weight"), ((0, 0), (2, 2), "attention")]
    )
    def test_errors(self, a, h, name):
        with pytest.raises(ValueError, match=f"dominance: {name}: got shape .* wanted square matrices"):
            dominance(torch.zeros(a), torch.zeros(h))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_types(self, dtype):
        assert dominance(mixture(4, 0.5).to(dtype), diagonal(-0.5).to(dtype)).verdict == Verdict.OTHER


def test_from_eigenvalues():
    result = eigenvalue_dominance(exact(0.3, -0.1), exact(-0.5, -0.25))
    assert result.verdict == Verdict.OTHER
    torch.testing.assert_close(result.margin.item(), 0.75 - 1.05)


def test_ergodicity_bounds_every_eigenvalue_but_one():
    a = (2 * randn(20, 6, 6)).softmax(-1)
    second = torch.linalg.eigvals(a).abs().sort(-1).values[:, -2]
    assert (second <= ergodicity(a)).all()
    assert ergodicity(uniform(5)) < 1e-15 and abs(ergodicity(torch.eye(3)) - 1) < 1e-6


def test_gains_keep_their_digits_at_every_scale():
    """|1 + z| − 1 within its bound: 1e-300 is not lost beside 1, and 1e300 has no square."""
    mpmath = pytest.importorskip("mpmath", reason="needs mpmath for numbers beyond float64")
    sizes = 10 ** torch.linspace(-300, 300, 301, dtype=torch.float64)
    angles = torch.cat([torch.linspace(0, 2 * math.pi, 8, dtype=torch.float64), torch.tensor([math.pi, math.pi / 2])])
    z = torch.polar(sizes[:, None].expand(-1, len(angles)).contiguous(), angles.expand(len(sizes), -1).contiguous())
    circle = torch.polar(torch.ones(50, dtype=torch.float64), torch.linspace(0, 6, 50, dtype=torch.float64)) - 1
    z = torch.cat([z.flatten(), circle])
    with mpmath.workdps(700):
        for value, found, bound in zip(z.tolist(), gain(z).tolist(), gain_rounding(z, 1.0).tolist(), strict=True):
            assert abs(abs(1 + mpmath.mpc(value)) - 1 - found) <= bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_deviation_reaches_rows_divided_by_their_sums_and_what_rounds_to_them(dtype):
    exact_rows = (3 * randn(50, 9, 9)).softmax(-1)
    for off in (0, 0.5 * math.sqrt(torch.finfo(dtype).eps)):
        a = (exact_rows * (1 + off * randn(50, 9, 1, seed=1).clamp(-1, 1))).to(dtype)
        wide = a.double()
        allowed = deviation(a)[:, None, None] * wide + underflow(dtype)
        assert ((wide / wide.sum(-1, keepdim=True) - wide).abs() <= allowed * (1 + 1e-9)).all()
        assert off or ((exact_rows - wide).abs() <= allowed).all()
        assert (deviation(a) <= (off or torch.finfo(dtype).eps * 5) * 1.5).all()


def test_error_bounds_hold():
    """Eigenvalues in float32 differ from those of the matrix before rounding by no more than the bound."""
    exact_matrix = randn(50, 8, 8)
    truth = torch.linalg.eigvals(exact_matrix)
    rounded = matrix_eigenvalues(exact_matrix.float())
    nearest = (rounded.values[:, :, None] - truth[:, None, :]).abs().amin(-1)
    assert (nearest <= rounded.error).all()
    assert rounded.error.median() < 1e-4


def test_head_weights_have_the_nonzero_eigenvalues():
    w_v, w_proj, heads, width = randn(6, 6), randn(6, 6, seed=1), 3, 2
    small = torch.linalg.eigvals(head_weights(w_v, w_proj, heads))
    for h in range(heads):
        rows = slice(h * width, (h + 1) * width)
        whole = torch.linalg.eigvals(w_v[:, rows] @ w_proj[rows])
        largest = whole[whole.abs().argsort(descending=True)[:width]]
        assert (small[h][:, None] - largest[None]).abs().amin(-1).max() < 1e-12


class TestTableOne:
    """DBK Table 1 on a small random ViT: ViT⁺ all Perron, ViT⁻ none; one case per image, layer and head."""

    IMAGES, TOKENS, DIM, HEADS, LAYERS = 3, 17, 24, 3, 4

    def cases(self, regime: str):
        """(attention [B, H, N, N], weight [H, k, k]) of every layer, tokens running through."""
        torch.manual_seed(0)
        x = torch.randn(self.IMAGES, self.TOKENS, self.DIM)
        for _ in range(self.LAYERS):
            theta, psi = torch.randn(self.DIM, self.DIM), torch.rand(self.DIM) * 3
            spectrum = reference.spectrum.symmetric(theta, psi, regime, bounded=True)
            w_q, w_k = (torch.randn(self.DIM, self.DIM) / self.DIM**0.5 for _ in range(2))
            normed = torch.nn.functional.layer_norm(x, (self.DIM,))
            query, key, value = (
                (normed @ w).unflatten(-1, (self.HEADS, -1)).transpose(1, 2) for w in (w_q, w_k, spectrum.basis_in)
            )
            weights = head_weights(spectrum.basis_in * spectrum.eigenvalues, spectrum.basis_out, self.HEADS)
            yield reference.attention_weights(query, key), weights
            x = reference.spectral_attention(query, key, value, spectrum.eigenvalues, spectrum.basis_out, residual=x)

    @pytest.mark.parametrize("regime, name", [("smooth", "perron"), ("sharpen", "other")])
    def test_all_cases(self, regime, name):
        total = self.IMAGES * self.HEADS
        for attention, weight in self.cases(regime):
            assert dominance(attention, weight).counts()[name] == total


@pytest.mark.parametrize("value", [-0.5, 0.5])
def test_the_winner_shows_after_many_layers(value):
    """X ← X + A X H with constant A and H: the tokens converge exactly where `dominance` says so, and otherwise
    HFC/LFC goes to ‖(I − Π)v₁‖/‖Πv₁‖ of the winning eigenvector (MATH §7)."""
    a = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0.25, 0.25, 0.5]], dtype=torch.float64)
    h = diagonal(value, 0.5 * value)
    x = randn(3, 2)
    for _ in range(400):
        x = x + a @ x @ h.T
        x = x / x.norm()
    ratio = reference.frequency_norms(x).ratio
    if dominance(a, h).perron:
        assert ratio < 1e-8
        return
    values, vectors = torch.linalg.eig(a)
    gains = (1 + torch.tensor([value, 0.5 * value])[:, None] * values).abs()
    v = vectors[:, int(gains.amax(0).argmax())].real
    torch.testing.assert_close(ratio, (v - v.mean()).norm() / (v.mean().abs() * 3**0.5))
