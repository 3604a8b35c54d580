"""ot.linalg.qr on the CPU kernels: LAPACK's error ratios over a gallery, members, gradients, contracts, every level."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import accuracy, compiling, repeat, shapes
from torch.autograd import gradcheck, gradgradcheck

import overtone as ot

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DTYPES = (torch.float32, torch.float64)
RATIO = 10  # residuals in units of max(m, n) · ‖A‖ · ε, as in LAPACK's own test programs, which accept 20 to 50
# Matrices in lanes up to 40 × 40 elements, panels of 32 columns beyond; around both, and ViT's own.
OBLONG = ((5, 3), (3, 5), (1, 9), (9, 1), (70, 33), (33, 70), (97, 64), (64, 97))
SIZES = (1, 2, 3, 7, 8, 16, 17, 31, 33, 40, 41, 64, 65, 96, 127, 192, 197)


def randn(*shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def conditioned(n: int, condition: float) -> torch.Tensor:
    """Singular values from 1 down to 1/condition, in equal ratios."""
    u, v = torch.linalg.qr(randn(n, n, seed=1)).Q, torch.linalg.qr(randn(n, n, seed=2)).Q
    return (u * torch.logspace(0, -math.log10(condition), n, dtype=torch.float64)) @ v


def kahan(n: int, angle: float = 1.2) -> torch.Tensor:
    """Triangular, nearly singular, and no element shows it."""
    s, c = math.sin(angle), math.cos(angle)
    upper = torch.eye(n, dtype=torch.float64) - c * torch.ones(n, n, dtype=torch.float64).triu(1)
    return s ** torch.arange(n, dtype=torch.float64)[:, None] * upper


def gallery(n: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    info = torch.finfo(dtype)
    base = randn(n, n)
    rank_one = randn(n, 1) @ randn(1, n, seed=3)
    # The norm of a column must be representable: R has it on its diagonal.
    near_overflow = base / base.abs().max() * (info.max / (4 * math.sqrt(n)))
    exponents = torch.linspace(0, math.log10(info.tiny) + 3, n, dtype=torch.float64)
    matrices = {
        "random": base,
        "zero": torch.zeros(n, n),
        "identity": torch.eye(n),
        "minus identity": -torch.eye(n),
        "ones": torch.ones(n, n),
        "rank one": rank_one,
        "half rank": randn(n, (n + 1) // 2) @ randn((n + 1) // 2, n, seed=3),
        "equal columns": base[:, :1].expand(n, n),
        "zero column": base * (torch.arange(n) != n // 2),
        "upper": base.triu(),
        "lower": base.tril(),
        "anti-diagonal": torch.eye(n).flip(0),
        "kahan": kahan(n),
        "hilbert": 1 / (torch.arange(n)[:, None] + torch.arange(n) + 1.0),
        "columns graded down": base * 10**exponents,
        "columns graded up": base * 10 ** exponents.flip(0),
        "rows graded": base * 10 ** (exponents / 2)[:, None],
        "condition 1e6": conditioned(n, 1e6),
        "condition 1e9": conditioned(n, 1e9),
        "condition 1e12": conditioned(n, 1e12),
        "subnormal": base * info.tiny / 8,
        "tiny": base * info.tiny * 8,
        "near overflow": near_overflow,
        "one huge element": torch.where(torch.eye(n).bool() & (torch.arange(n) == n // 2), info.max / 2, base),
    }
    return {name: matrix.to(dtype) for name, matrix in matrices.items()}


def assert_is_qr(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, names: list[str] | None = None) -> None:
    """The ratios of every member, R's triangle and its diagonal's sign."""
    eps, n = torch.finfo(a.dtype).eps, max(a.shape[-2:])
    # In float64 and at size one: the norms themselves must not overflow or vanish.
    size = a.double().abs().amax((-2, -1), keepdim=True)
    size = torch.where(size == 0, 1, size)
    scaled, r_scaled, q = a.double() / size, r.double() / size, q.double()
    norm = torch.linalg.matrix_norm(scaled)
    residual = torch.linalg.matrix_norm(scaled - q @ r_scaled) / torch.where(norm == 0, 1, norm) / (n * eps)
    # A subnormal R is rounded to the spacing of subnormal numbers, whatever computed it.
    spacing = torch.finfo(a.dtype).tiny * eps / size[..., 0, 0] / (n * eps)
    residual = residual - spacing * n
    loss = torch.linalg.matrix_norm(torch.eye(q.shape[-1], dtype=torch.float64) - q.mT @ q) / (n * eps)
    for what, ratio in (("residual", residual), ("orthogonality", loss)):
        worst = int(ratio.flatten().argmax())
        label = names[worst] if names else f"member {worst}"
        assert (ratio <= RATIO).all(), f"{what} of {label}: ratio {ratio.max():.3g}"
    assert (r.tril(-1) == 0).all() and (r.diagonal(dim1=-2, dim2=-1) >= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("poisoned_empty")
class TestRatios:
    @pytest.mark.parametrize("n", SIZES)
    def test_gallery(self, dtype, n):
        members = gallery(n, dtype)
        a = torch.stack(list(members.values()))
        q, r, info = ot.linalg.qr_ex(a, backend="cpu")
        assert not info.any()
        assert_is_qr(a, q, r, list(members))

    @pytest.mark.parametrize("n", [384, 400])
    def test_large(self, dtype, n):
        a = torch.stack([gallery(n, dtype)[name] for name in ("random", "kahan", "condition 1e9", "half rank")])
        assert_is_qr(a, *ot.linalg.qr(a, backend="cpu"))

    @pytest.mark.parametrize("rows, columns", [*OBLONG, (200, 3), (3, 600), (300, 40), (2000, 5)])
    @pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
    def test_shapes_and_modes(self, dtype, rows, columns, mode):
        a = randn(3, rows, columns, dtype=dtype)
        a[1, :, columns // 2 :] = 0  # one member of lower rank
        q, r = ot.linalg.qr(a, mode, backend="cpu")
        wanted = torch.linalg.qr(a, mode)
        assert q.shape == wanted.Q.shape and r.shape == wanted.R.shape and q.dtype == r.dtype == dtype
        if mode == "r":
            q = ot.linalg.qr(a, backend="cpu").Q
        assert_is_qr(a, q, r)

    def test_small_columns_keep_their_digits(self, dtype):
        """Scaling a column of A scales one of R and leaves Q alone, however small the column becomes."""
        for n in (12, 50):
            a = randn(n, n, dtype=dtype)
            exponent = -torch.arange(n) * (100 if dtype == torch.float32 else 900) // n  # columns down to 2^-100
            scaled = torch.ldexp(a, exponent)
            q, r = ot.linalg.qr(a, backend="cpu")
            q_scaled, r_scaled = ot.linalg.qr(scaled, backend="cpu")
            assert torch.equal(q_scaled, q) and torch.equal(r_scaled, torch.ldexp(r, exponent))

    def test_batches(self, dtype):
        a = randn(100_000, 3, 3, dtype=dtype)
        assert_is_qr(a, *ot.linalg.qr(a, backend="cpu"))
        a = randn(2, 3, 1, 5, 6, 6, dtype=dtype)
        q, r, info = ot.linalg.qr_ex(a, backend="cpu")
        assert q.shape == r.shape == a.shape and info.shape == a.shape[:-2] and info.dtype == torch.int32
        assert_is_qr(a, q, r)

    @pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (2, 3, 0), (2, 0, 3), (0, 0), (3, 0, 50, 50)])
    @pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
    def test_empty(self, dtype, shape, mode):
        a = torch.empty(shape, dtype=dtype)
        for ours, wanted in zip(ot.linalg.qr(a, mode, backend="cpu"), torch.linalg.qr(a, mode), strict=True):
            assert torch.equal(ours, wanted)


def test_sums_of_many_rows_keep_their_digits():
    """The residual of four times the size: in long running sums it would double, and so would a gradient's error."""
    residuals = []
    for n in (192, 768):
        a = randn(n, n, dtype=torch.float32)
        q, r = (part.double() for part in ot.linalg.qr(a, backend="cpu"))
        residuals.append(torch.linalg.matrix_norm(q @ r - a) / torch.linalg.matrix_norm(a))
    assert residuals[1] < math.sqrt(2) * residuals[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [9, 50])
def test_it_is_the_cholesky_factor(dtype, n):
    """R is unique: the Cholesky factor of AᵀA."""
    a = randn(n, n) + 4 * math.sqrt(n) * torch.eye(n)
    wanted = torch.linalg.cholesky(a.T @ a).T
    error = (ot.linalg.qr(a.to(dtype), backend="cpu").R.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= n * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [6, 30, 70])
class TestMembers:
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_bad_member_hurts_nobody_else(self, dtype, n, bad):
        a = randn(2, 17, n, n, dtype=dtype)
        good = ot.linalg.qr_ex(a, backend="cpu")
        a[1, 2, n - 1, 0] = bad
        a[0, 0, 0, n - 1] = bad
        q, r, info = ot.linalg.qr_ex(a, backend="cpu")
        assert info.nonzero().tolist() == [[0, 0], [1, 2]] and info.max() == 1
        assert q[info == 1].isnan().all() and r[info == 1].isnan().all()
        assert torch.equal(q[info == 0], good.Q[info == 0]) and torch.equal(r[info == 0], good.R[info == 0])
        with pytest.raises(
            torch.linalg.LinAlgError,
            match=r"qr: A: matrix \(0, 0\), \(1, 2\) is not finite or has results beyond the largest number; qr_ex",
        ):
            ot.linalg.qr(a, backend="cpu")

    def test_the_place_in_the_batch_does_not_matter(self, dtype, n):
        a = randn(40, n, n, dtype=dtype)
        q, r = ot.linalg.qr(a, backend="cpu")
        for index in (0, 7, 16, 39):
            alone = ot.linalg.qr(a[index], backend="cpu")
            assert torch.equal(alone.Q, q[index]) and torch.equal(alone.R, r[index])

    @pytest.mark.parametrize("layout", shapes.LAYOUTS)
    def test_strides(self, dtype, n, layout):
        a = shapes.with_layout(randn(3, n, n + 1, dtype=dtype), layout)
        packed = ot.linalg.qr(a.contiguous(), backend="cpu")
        for ours, wanted in zip(ot.linalg.qr(a, backend="cpu"), packed, strict=True):
            assert torch.equal(ours, wanted) and ours.is_contiguous()

    def test_threads(self, dtype, n):
        repeat.check_bit_equal(
            lambda a: tuple(ot.linalg.qr(a, backend="cpu")), (randn(21, n, n, dtype=dtype).requires_grad_(),)
        )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(0, 90), columns=st.integers(0, 90), batch=st.integers(0, 3), dtype=st.sampled_from(DTYPES),
    mode=st.sampled_from(("reduced", "complete")), layout=st.sampled_from(shapes.LAYOUTS),
)  # fmt: skip
@pytest.mark.usefixtures("poisoned_empty")
def test_any_shape(rows, columns, batch, dtype, mode, layout):
    a = shapes.with_layout(randn(batch, rows, columns, dtype=dtype), layout)
    q, r = ot.linalg.qr(a, mode, backend="cpu")
    if a.numel():
        assert_is_qr(a, q, r)


def well_conditioned(*shape, dtype=torch.float32, seed=0):
    """Q and R are then as exact as sums are: the comparison is of kernels, not of condition numbers."""
    rows, columns = shape[-2:]
    return (randn(*shape, seed=seed) + 2 * math.sqrt(rows) * torch.eye(rows, columns)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
class TestGradients:
    @pytest.mark.parametrize("rows, columns", [*OBLONG, (1, 1), (4, 4), (40, 40), (41, 41), (100, 97), (192, 192)])
    @pytest.mark.usefixtures("poisoned_empty")
    def test_against_truth(self, dtype, rows, columns):
        draws = [(well_conditioned(2, rows, columns, dtype=dtype, seed=seed),) for seed in range(3)]
        accuracy.check_against_truth(
            lambda a: tuple(ot.linalg.qr(a, backend="cpu")),
            lambda a: tuple(ot.reference.linalg.qr(a)),
            draws[0],
            more_draws=draws[1:],
        )

    def test_every_level(self, isa_level, cpu_kernels, dtype):
        for n in (9, 45):
            draws = [(well_conditioned(5, n, n, dtype=dtype, seed=seed),) for seed in range(3)]
            accuracy.check_against_truth(
                lambda a: tuple(ot.linalg.qr(a, backend="cpu")),
                lambda a: tuple(ot.reference.linalg.qr(a)),
                draws[0],
                more_draws=draws[1:],
            )
            assert cpu_kernels.last_kernel() == f"qr_backward/{isa_level}"
            members = gallery(n, dtype)
            a = torch.stack(list(members.values()))
            assert_is_qr(a, *ot.linalg.qr(a, backend="cpu"), list(members))
            assert cpu_kernels.last_kernel() == f"qr/{isa_level}"

    @pytest.mark.parametrize("part", [0, 1])
    @pytest.mark.parametrize("rows, columns", [(5, 5), (6, 4), (4, 6)])
    def test_of_one_result(self, dtype, part, rows, columns):
        draws = [(well_conditioned(rows, columns, dtype=dtype, seed=seed),) for seed in range(5)]
        accuracy.check_against_truth(
            lambda a: ot.linalg.qr(a, backend="cpu")[part],
            lambda a: ot.reference.linalg.qr(a)[part],
            draws[0],
            more_draws=draws[1:],
        )

    def test_strided_gradients(self, dtype):
        a = well_conditioned(3, 20, 20, dtype=dtype)
        q, r = ot.linalg.qr(a, backend="cpu")
        weight = randn(3, 20, 20, dtype=dtype)
        (wanted,) = torch.autograd.grad((q, r), a, (weight.mT.contiguous(), weight.mT.contiguous()), retain_graph=True)
        (ours,) = torch.autograd.grad((q, r), a, (weight.mT, weight.mT))
        assert torch.equal(ours, wanted)

    def test_a_bad_member_gets_no_gradient_and_spoils_none(self, dtype):
        a = well_conditioned(3, 6, 6, dtype=dtype).detach()
        a[1] = math.nan
        a.requires_grad_()
        q, r, info = ot.linalg.qr_ex(a, backend="cpu")
        (q[info == 0].square().sin().sum() + r[info == 0].sum()).backward()
        assert a.grad.isfinite().all() and (a.grad[1] == 0).all() and (a.grad[0] != 0).any()

    def test_dependent_columns_have_none(self, dtype):
        a = randn(2, 3, 5, 5, dtype=dtype)
        a[1, 1, :, 2] = 0
        q, _ = ot.linalg.qr(a.requires_grad_(), backend="cpu")
        with pytest.raises(RuntimeError, match=r"qr: no gradient: the columns of matrix \(1, 1\) of A are"):
            q.sum().backward()

    def test_modes_without_one(self, dtype):
        a = randn(5, 3, dtype=dtype).requires_grad_()
        with pytest.raises(NotImplementedError, match="more rows .5. than columns .3., which has no gradient"):
            ot.linalg.qr(a, "complete", backend="cpu").R.sum().backward()
        with pytest.raises(NotImplementedError, match="mode: got 'r', which has no gradient"):
            ot.linalg.qr(a, "r", backend="cpu").R.sum().backward()
        wide = randn(3, 5, dtype=dtype).requires_grad_()
        ot.linalg.qr(wide, "complete", backend="cpu").R.sum().backward()


@pytest.mark.parametrize("rows, columns", [(3, 3), (5, 3), (3, 5), (42, 42)])
def test_gradcheck(rows, columns):
    a = well_conditioned(2, rows, columns, dtype=torch.float64)
    assert gradcheck(lambda a: tuple(ot.linalg.qr(a, backend="cpu")), (a,), fast_mode=rows > 10)
    if rows < 10:
        assert gradgradcheck(lambda a: tuple(ot.linalg.qr(a, backend="cpu")), (a,))


@pytest.mark.parametrize("shape", [(2, 4, 4), (3, 7, 3), (2, 3, 7), (45, 45), (0, 3, 3)])
@pytest.mark.parametrize("options", [(False, True), (True, True), (False, False)])
def test_opcheck(shape, options):
    a = randn(*shape, dtype=torch.float32)
    tests = ("test_schema", "test_faketensor") if options != (False, True) else None
    a.requires_grad_(tests is None)
    for op, more in ((torch.ops.overtone.qr_ex, ()), (torch.ops.overtone.qr, ("qr",))):
        torch.library.opcheck(op, (a, *options, *more), **({"test_utils": tests} if tests else {}))


@pytest.mark.parametrize("function", [ot.linalg.qr, ot.linalg.qr_ex])
def test_compiles(function):
    calls = [(well_conditioned(batch, n, n),) for batch, n in ((3, 5), (4, 6), (2, 45))]
    compiling.check_compiles(lambda a: tuple(function(a, backend="cpu"))[:2], calls)


def test_compiled_calls_raise():
    compiled = torch.compile(lambda a: ot.linalg.qr(a, backend="cpu").R, fullgraph=True)
    a = randn(3, 4, 4)
    compiled(a)
    a[2, 0, 0] = math.nan
    with pytest.raises(torch.linalg.LinAlgError, match=r"matrix \(2,\) is not finite"):
        compiled(a)


def test_backward_twice():
    repeat.check_backward_twice(lambda a: tuple(ot.linalg.qr(a, backend="cpu")), (well_conditioned(2, 9, 9),))


class TestContract:
    def test_names(self):
        result, extended = ot.linalg.qr(torch.eye(2)), ot.linalg.qr_ex(torch.eye(2))
        assert result._fields == ("Q", "R") and extended._fields == ("Q", "R", "info")

    def test_wrong_arguments(self):
        with pytest.raises(TypeError, match="qr: A: got list .*, wanted a floating-point or complex tensor"):
            ot.linalg.qr([1.0])
        with pytest.raises(ValueError, match=r"qr_ex: A: got torch.int64 of shape \[2, 2\]"):
            ot.linalg.qr_ex(torch.eye(2).long())
        with pytest.raises(ValueError, match=r"qr: A: got torch.float32 of shape \[3\]"):
            ot.linalg.qr(torch.ones(3))
        with pytest.raises(ValueError, match="qr: mode: got 'q', wanted 'reduced' or 'complete' or 'r'"):
            ot.linalg.qr(torch.eye(2), "q")

    @pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16])
    def test_other_dtypes_take_the_reference(self, dtype):
        a = randn(3, 3).to(dtype)
        for ours, wanted in zip(ot.linalg.qr(a), ot.reference.linalg.qr(a), strict=True):
            assert torch.equal(ours, wanted)
        with pytest.raises(ot.BackendError, match="takes torch.float32, torch.float64, got"):
            ot.linalg.qr(a, backend="cpu")
