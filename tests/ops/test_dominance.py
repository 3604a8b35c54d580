"""dominance by bounds and by ot.linalg: known cases, the reference's verdicts, certificates that hold."""

from __future__ import annotations

import math

import pytest
import torch

from overtone import reference
from overtone.analysis import Dominance, Eigenvalues, Verdict, dominance, eigenvalues
from overtone.ops import dominance as spectral_dominance
from overtone.ops.dominance import enclosing_disk
from overtone.reference.enclosures import enclosed_eigenvalues, reference_solver

F64 = torch.float64
FLOATS = [torch.float32, F64, torch.bfloat16, torch.float16]
DIGITS = 60


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


def exact_eigenvalues(rows):
    """Of a square matrix of mpmath numbers, given as rows."""
    mpmath = pytest.importorskip("mpmath", reason="needs mpmath for eigenvalues beyond float64")
    if len(rows) == 1:
        return [rows[0][0]]
    if len(rows) == 2:
        (a, b), (c, d) = rows
        root = mpmath.sqrt(mpmath.mpc(((a - d) / 2) ** 2 + b * c))
        return [(a + d) / 2 + root, (a + d) / 2 - root]
    return list(mpmath.eig(mpmath.matrix(rows), left=False, right=False))


def exact_others(a):
    """The eigenvalues but the Perron one of A with each row divided by its sum. Equal rows count once: A has a zero for
    each that another one equals, and the rest acts on their classes."""
    mpmath = pytest.importorskip("mpmath", reason="needs mpmath for eigenvalues beyond float64")
    rows = [tuple(row) for row in a.double().tolist()]
    kinds = sorted(set(rows))
    columns = [[j for j, row in enumerate(rows) if row == kind] for kind in kinds]
    with mpmath.workdps(DIGITS):
        quotient = []
        for kind in kinds:
            whole = mpmath.fsum(kind)
            quotient.append([mpmath.fsum(kind[j] for j in places) / whole for places in columns])
        # Modulo vectors that are equal on all tokens.
        inner = [[row[j] - quotient[0][j] for j in range(1, len(kinds))] for row in quotient[1:]]
        return [mpmath.mpf(0)] * (len(rows) - len(kinds)) + (exact_eigenvalues(inner) if inner else [])


def true_margins(others, h):
    """For every case, from `exact_others` of each A and H [B, d, d], to sixty digits."""
    mpmath = pytest.importorskip("mpmath", reason="needs mpmath for eigenvalues beyond float64")
    margins = []
    with mpmath.workdps(DIGITS):
        for z, weight in zip(others, h.double().tolist(), strict=True):
            values = exact_eigenvalues([[mpmath.mpf(x) for x in row] for row in weight])
            margins.append(max(abs(1 + x) for x in values) - max(abs(1 + x * y) for x in values for y in z))
    return margins


def assert_certain(result, truths):
    """No verdict is wrong, every true margin is within the error, and no error is negative or nan."""
    assert (result.error >= 0).all()
    for verdict, margin, error, truth in zip(*(field.tolist() for field in result), truths, strict=True):
        assert verdict != Verdict.INVALID
        assert abs(truth - margin) <= error, (verdict, margin, error, float(truth))
        assert verdict != Verdict.PERRON or truth > 0, (margin, error, float(truth))
        assert verdict != Verdict.OTHER or truth < 0, (margin, error, float(truth))


def few_kinds_of_rows(kind, count, n, seed):
    """Attention [count, n, n] in float64 with two or three kinds of rows, so that its eigenvalues are quickly exact."""
    g = generator(seed)
    size = 10 ** (6 * torch.rand(count, 1, 1, generator=g, dtype=F64) - 5)
    logits = torch.randn(count, min(n, 3), n, generator=g, dtype=F64)
    rows = (size * logits).softmax(-1)
    if kind == "pair":  # of tokens in uniform attention, as near to it as can be told
        rows = torch.full_like(rows, 1 / n)
        change = torch.tensor([[-1.0, 1.0], [1.0, -1.0]], dtype=F64) * torch.randn(count, 1, 1, generator=g, dtype=F64)
        rows[:, :2, :2] += change.clamp(-0.9, 0.9) * size.clamp(max=1) / n
    elif kind == "sharp":
        rows = (30 * logits).softmax(-1)
    elif kind == "one-hot":
        rows = torch.nn.functional.one_hot(logits.argmax(-1), n).to(F64)
    elif kind == "nonnormal":
        hidden = torch.arange(n) > torch.arange(min(n, 3))[:, None]
        rows = (5 * logits).masked_fill(hidden, -20).softmax(-1)
    kinds = torch.randint(0, rows.shape[1], (count, n), generator=g)
    kinds[:, : rows.shape[1]] = torch.arange(rows.shape[1])
    return rows.gather(1, kinds[..., None].expand(count, n, n))


def near_ties(others, seed):
    """H [B, 1, 1] in float64 with λ at, or close to, the edge −2/(1 + z) of an eigenvalue z of each A."""
    g = generator(seed)
    lowest = [float(max(z, key=lambda y: abs(1 - 2 * y)).real) for z in others]
    lowest = torch.tensor(lowest, dtype=F64).clamp(min=-0.99)
    off = 10 ** (-15 * torch.rand(len(lowest), generator=g, dtype=F64))
    side = torch.randint(0, 2, (len(lowest),), generator=g) * 2 - 1
    return (-2 / (1 + lowest) * (1 + side * off))[:, None, None]


WAYS = ["bounds", "solved", "all", "reference"]


def by(way, a, h, monkeypatch, **options):
    """The verdicts of one way alone."""
    if way == "reference":
        return reference.analysis.dominance(a, h, **options)
    unknown = "_from_eigenvalues" if way == "bounds" else "_from_disk" if way == "solved" else None
    with monkeypatch.context() as patch:
        if unknown:
            patch.setattr(spectral_dominance, unknown, _nothing)
        return dominance(a, h, **options)


def _nothing(a, h, **options):
    unknown = torch.zeros(a.shape[:1], dtype=F64)
    return Dominance(torch.full_like(unknown, Verdict.CLOSE, dtype=torch.int8), unknown, unknown + math.inf)


@pytest.mark.parametrize("kind", ["uniform", "pair", "sharp", "one-hot", "nonnormal"])
@pytest.mark.parametrize("n", [2, 3, 8, 23, 40])
def test_no_certificate_is_wrong(kind, n, monkeypatch):
    for place, dtype in enumerate(FLOATS):
        a = few_kinds_of_rows(kind, 12, n, seed=10 * n + place).to(dtype)
        others, g = [exact_others(matrix) for matrix in a], generator(n)
        gauss = torch.randn(12, 2, 2, generator=g, dtype=F64)
        scaled = gauss * 10 ** (60 * torch.rand(12, 1, 1, generator=g, dtype=F64) - 30)
        for h in (near_ties(others, n), gauss.float(), scaled, gauss.triu() * torch.tensor([1, 1e3], dtype=F64)):
            truths = true_margins(others, h)
            for way in WAYS:
                assert_certain(by(way, a, h, monkeypatch), truths)


@pytest.mark.parametrize("dtype", FLOATS)
def test_no_certificate_is_wrong_where_rows_are_rounded_unevenly(dtype, monkeypatch):
    """Sums of rows that are off as far as is admitted are in the bound."""
    off = 0.9 * math.sqrt(torch.finfo(dtype).eps)
    for n in (2, 3):
        a = few_kinds_of_rows("uniform", 60, n, seed=n)
        a = (a * (1 + off * (2 * torch.rand(60, n, 1, generator=generator(n), dtype=F64) - 1))).to(dtype)
        others = [exact_others(matrix) for matrix in a]
        h = near_ties(others, n)
        truths = true_margins(others, h)
        for way in WAYS:
            assert_certain(by(way, a, h, monkeypatch), truths)


@pytest.mark.parametrize("n", [4, 6])
def test_no_certificate_is_wrong_for_general_matrices(n, monkeypatch):
    """Every row another one; H of three rows, defective among them."""
    for seed in range(3):
        logits = torch.randn(4, n, n, generator=generator(seed), dtype=F64)
        sharpness = torch.tensor([1e-3, 1.0, 8.0, 30.0], dtype=F64)[:, None, None]
        a = (sharpness * logits).softmax(-1).to(FLOATS[seed % 2])
        h = torch.randn(4, 3, 3, generator=generator(seed + 50), dtype=F64)
        h[0] = torch.diag(torch.full((3,), -1.5)) + torch.diag(torch.full((2,), 0.3), 1)
        truths = true_margins([exact_others(matrix) for matrix in a], h)
        for way in ("solved", "all", "reference"):
            assert_certain(by(way, a, h, monkeypatch), truths)


@pytest.mark.parametrize("way", ["all", "reference"])
def test_no_causal_certificate_is_wrong(way, monkeypatch):
    for place, dtype in enumerate(FLOATS):
        hidden = torch.ones(3, 3).triu(1).bool()
        a = torch.randn(60, 3, 3, generator=generator(place), dtype=F64).masked_fill(hidden, -math.inf).softmax(-1)
        a = a.to(dtype)
        others = [exact_others(matrix) for matrix in a]
        h = near_ties(others, place)
        assert_certain(by(way, a, h, monkeypatch, is_causal=True), true_margins(others, h))


def test_bounds_are_not_wide_for_nothing():
    """Of near-uniform and ordinary attention what is further from a tie than rounding is decided."""
    for dtype, floor in ((torch.float32, 1e-4), (F64, 1e-12)):
        for n in (3, 8, 40):
            a = few_kinds_of_rows("uniform", 20, n, seed=n).to(dtype)
            others = [exact_others(matrix) for matrix in a]
            h = near_ties(others, n)
            is_clear = torch.tensor([abs(float(truth)) > floor for truth in true_margins(others, h)])
            assert is_clear.any() and not dominance(a, h).undecided[is_clear].any()


@pytest.mark.parametrize("way", ["solver", "reference"])
@pytest.mark.parametrize("order", [2, 3, 5])
def test_radii_hold_for_defective_matrices(way, order):
    """A Jordan block changed by e in its corner has its eigenvalues on a circle of radius e^(1/order): not κe."""
    solver = spectral_dominance._solver(None) if way == "solver" else reference_solver
    block = torch.diag(torch.ones(order - 1, dtype=F64), 1) + 0.5 * torch.eye(order, dtype=F64)
    for e in (1e-12, 1e-8, 1e-4):
        found = enclosed_eigenvalues(block, torch.tensor(e, dtype=F64), solver)
        for k in range(order):
            z = 0.5 + e ** (1 / order) * complex(math.cos(2 * math.pi * k / order), math.sin(2 * math.pi * k / order))
            assert ((found.values - z).abs() <= found.error).any()
        assert (found.error >= e ** (1 / order) * (1 - 1e-6)).all()


@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-4, 1e-6])
def test_radii_are_more_than_first_order(gap):
    """Two eigenvalues 2·gap apart meet where a matrix gap² away is defective; to first order each moves half as far."""
    pair = torch.tensor([[0.5, 1.0], [gap**2, 0.5]], dtype=F64)
    found = enclosed_eigenvalues(pair, torch.tensor(gap**2, dtype=F64), reference_solver)
    assert ((found.values - 0.5).abs() <= found.error).all()
    assert (found.error <= 10 * gap).all()


@pytest.mark.parametrize("kind", ["gauss", "graded", "nonnormal", "clustered"])
def test_radii_hold_for_all_matrices_that_near(kind):
    """Every eigenvalue of M + E is within a radius of a value, and every value's radius has one."""
    g = generator(0)
    matrix = torch.randn(6, 9, 9, generator=g, dtype=F64)
    if kind == "graded":
        matrix = matrix * torch.logspace(0, -8, 9, dtype=F64)[:, None]
    elif kind == "nonnormal":
        matrix = matrix.triu() + 10 * matrix.triu(1)
    elif kind == "clustered":
        matrix = torch.eye(9, dtype=F64) + 1e-6 * matrix
    for e in (0.0, 1e-9, 1e-5):
        found = enclosed_eigenvalues(matrix, torch.full((6,), e, dtype=F64), reference_solver)
        for _ in range(5):
            u, v = torch.randn(2, 6, 9, generator=g, dtype=F64)
            change = e * u[:, :, None] * v[:, None, :] / (u.norm(dim=-1) * v.norm(dim=-1))[:, None, None]
            truth = torch.linalg.eigvals(matrix + change)
            gaps = (truth[:, :, None] - found.values[:, None, :]).abs() - found.error[:, None, :]
            # What LAPACK's own rounding may add to the truth.
            slack = 1e-6 if kind == "nonnormal" else 1e-10
            assert (gaps.amin(-1) <= slack).all() and (gaps.amin(-2) <= slack).all()


class TestNoCertainty:
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("way", ["all", "reference"])
    def test_numbers_that_are_none(self, way, value, monkeypatch):
        for n in (1, 3, 9):
            a = torch.full((3, n, n), 1 / n)
            h = torch.full((3, 2, 2), 0.5)
            a[0, 0, 0], h[1, 0, 1] = value, value
            result = by(way, a, h, monkeypatch)
            assert result.verdict.tolist()[:2] == [Verdict.INVALID] * 2 and result.verdict[2] != Verdict.INVALID
            assert result.margin[:2].isnan().all() and (result.error[:2] == math.inf).all()

    @pytest.mark.parametrize("way", ["all", "reference"])
    def test_a_row_without_keys_and_a_broken_promise(self, way, monkeypatch):
        a = torch.full((2, 4, 4), 0.25)
        a[0, 2] = 0
        h = torch.tensor([[0.5]])
        assert by(way, a, h, monkeypatch).verdict.tolist() == [Verdict.INVALID, Verdict.PERRON]
        assert by(way, a, h, monkeypatch, is_causal=True).verdict.tolist() == [Verdict.INVALID] * 2

    @pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
    def test_huge_and_tiny_weights_are_decided(self, scale, monkeypatch):
        a = torch.tensor([[0.7, 0.3], [0.2, 0.8]], dtype=F64)
        for sign in (-1, 1):
            for way in ("all", "reference"):
                result = by(way, a, torch.full((1, 1), sign * scale, dtype=F64), monkeypatch)
                assert result.verdict == (Verdict.PERRON if sign > 0 or scale > 1 else Verdict.OTHER)
                assert math.isfinite(result.error)


def test_autocast_and_short_products_change_nothing():
    """Products in fewer bits than the bound counts would make it wrong."""
    a, h = attention(6, 30, 1.0), weights(6, 3, 1.0)
    wanted = dominance(a, h)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, dominance(a, h), wanted))
    matmul, with_float32_rounding = torch.backends.mkldnn.matmul, enclosing_disk(a, 3).radius
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "bf16"
        assert (enclosing_disk(a, 3).radius < with_float32_rounding).all()
        found = dominance(a, h)
        assert ((found.margin - wanted.margin).abs() <= wanted.error + found.error).all()
    finally:
        matmul.fp32_precision = before
    torch.get_float32_matmul_precision()  # it raises where settings are left mixed
