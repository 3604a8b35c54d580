"""SymmetricSpectrum and GeneralSpectrum: definitions, initialisation, precision, the guarantee, batching."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import overtone as ot
from overtone.ops.basis import BasisCache
from overtone.reference.spectrum import compose
from overtone.spectrum import GeneralSpectrum, SymmetricSpectrum, evaluate, guarantees

KINDS = (SymmetricSpectrum, GeneralSpectrum)
REGIMES = ("sharpen", "smooth")
SIGN = {"sharpen": -1, "smooth": 1}


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [False, True])
def test_symmetric_is_the_reference(regime, bounded):
    spectrum = SymmetricSpectrum(8, regime, bounded=bounded, dtype=torch.float64)
    wanted = ot.reference.spectrum.symmetric(spectrum.basis, spectrum.raw_eigenvalues, regime, bounded)
    for ours, theirs in zip(spectrum(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("regime", REGIMES)
def test_general_is_the_reference(regime):
    spectrum = GeneralSpectrum(8, regime, dtype=torch.float64)
    torch.nn.init.normal_(spectrum.basis)
    torch.nn.init.normal_(spectrum.raw_eigenvalues)  # half of them outside the interval
    wanted = ot.reference.spectrum.general(spectrum.basis, spectrum.raw_eigenvalues, regime)
    for ours, theirs in zip(spectrum(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("dim", [192, 768])
def test_initial_eigenvalues_are_inside_the_guarantee_and_at_the_scale_of_a_plain_vit(kind, regime, bounded, dim):
    spectrum = kind(dim, regime, bounded=bounded)
    eigenvalues = spectrum.eigenvalues()
    size = SIGN[regime] * eigenvalues
    assert (size > 0).all() and (size <= 1).all()
    assert guarantees(spectrum)[0].holds
    plain = torch.randn(2, dim, dim).mul_(0.02)
    plain_size = torch.linalg.matrix_norm(plain[0] @ plain[1])
    torch.testing.assert_close(torch.linalg.vector_norm(eigenvalues), plain_size, rtol=0.15, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_construction_on_the_meta_device(kind):
    """As FSDP does it: no memory until reset_parameters."""
    spectrum = kind(6, device="meta")
    spectrum.to_empty(device="cpu").reset_parameters()
    assert guarantees(spectrum)[0].holds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounded", [False, True])
def test_set_spectrum(kind, bounded):
    spectrum = kind(6, "sharpen", bounded=bounded, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    eigenvalues = -torch.linspace(0.01, 1, 6, dtype=torch.float64)
    spectrum.set_spectrum(basis, eigenvalues)
    torch.testing.assert_close(compose(spectrum()), basis @ torch.diag(eigenvalues) @ basis.mT)
    with pytest.raises(ValueError, match="wanted the sign of regime 'sharpen'"):
        spectrum.set_spectrum(basis, -eigenvalues)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_inside_autocast_and_for_half_parameters(kind):
    spectrum = kind(16)
    outside = spectrum()
    with torch.autocast("cpu", torch.bfloat16):
        inside = kind.forward(copy.deepcopy(spectrum))
    assert all(map(torch.equal, outside, inside))
    assert all(part.dtype == torch.float32 for part in spectrum.to(torch.bfloat16)())


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_at_equal_eigenvalues(kind):
    """No gap is divided by: the gradient is finite, and that of the composed weight."""
    spectrum = kind(5, dtype=torch.float64)
    spectrum.set_spectrum(torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64)).Q, torch.full((5,), -0.5).double())
    grad = torch.randn(5, 5, dtype=torch.float64)
    compose(spectrum()).backward(grad)
    # λ equal means W = λI whatever the basis is.
    torch.testing.assert_close(spectrum.basis.grad, torch.zeros(5, 5, dtype=torch.float64))
    assert spectrum.raw_eigenvalues.grad.abs().min() > 0


class TestGuarantee:
    def test_an_unbounded_spectrum_with_large_psi_is_reported(self):
        model = torch.nn.Sequential(SymmetricSpectrum(6), SymmetricSpectrum(6, bounded=True))
        with torch.no_grad():
            for spectrum in model:
                spectrum.raw_eigenvalues.fill_(1.6)
        unbounded, bounded = guarantees(model)
        assert not unbounded.holds and unbounded.outside == 6 and unbounded.lowest == pytest.approx(-2.56)
        assert str(unbounded) == ("0: sharpen, λ from -2.56 to -2.56, NOT guaranteed: 6 eigenvalues outside [-1, 0)")
        assert bounded.holds and str(bounded).endswith("guaranteed")

    def test_and_really_smooths(self):
        """Every ψ² > 2/(1 + λ_1^A): the Perron eigenvalue dominates (MATH §5)."""
        attention = torch.softmax(torch.randn(8, 8, dtype=torch.float64), -1)
        spectrum = SymmetricSpectrum(6, dtype=torch.float64)
        for size, verdict in ((0.9, "other"), (4.0, "perron")):
            spectrum.set_spectrum(torch.eye(6), torch.full((6,), -size).double())
            found = ot.reference.analysis.dominance(attention, compose(spectrum()).detach())
            assert found.counts()[verdict] == 1
            assert guarantees(spectrum)[0].holds == (verdict == "other")

    @pytest.mark.parametrize("kind", KINDS)
    def test_bounded_spectra_hold_it_whatever_the_parameters_are(self, kind):
        spectrum = kind(7, bounded=True)
        for values in ([0, 1e-30, 1e-3, 1, 30, 1e6, 1e18], [0, -1e-30, -1e-3, -1, -30, -1e6, -1e18]):
            with torch.no_grad():
                spectrum.raw_eigenvalues.copy_(torch.tensor(values))
            assert guarantees(spectrum)[0].holds

    def test_clipped_eigenvalues_may_be_zero_which_is_a_tie(self):
        spectrum = GeneralSpectrum(2)
        with torch.no_grad():
            spectrum.raw_eigenvalues.copy_(torch.tensor([0.5, -0.5]))
        assert guarantees(spectrum)[0].outside == 1


def _drawn():
    """A spectrum with arguments drawn at random."""
    choose = lambda *values: values[torch.randint(len(values), ()).item()]  # noqa: E731
    dtype = choose(torch.float32, torch.float64, torch.bfloat16)
    kind, options = choose(*KINDS), {"bounded": choose(False, True), "dtype": dtype}
    if kind is GeneralSpectrum:
        options["max_condition"] = choose(1e5, 1e4)
    return kind(choose(4, 6), choose(*REGIMES), **options)


class TestEvaluate:
    def test_one_factorisation_per_kind(self, factorisations):
        spectra = [kind(6, regime) for kind in KINDS for regime in REGIMES] * 2
        results = evaluate(spectra, BasisCache())
        assert factorisations == [(4, 6, 6), (4, 6, 6)]
        for spectrum, result in zip(spectra, results, strict=True):
            for ours, alone in zip(result, spectrum(), strict=True):
                torch.testing.assert_close(ours, alone)

    def test_nothing_is_factorised_again_until_a_parameter_changes(self, factorisations):
        spectrum, weight = SymmetricSpectrum(6), torch.randn(6, 6)
        optimizer = torch.optim.SGD(spectrum.parameters(), lr=0.1)
        for steps in (1, 2):
            for _ in range(3):  # gradient accumulation
                (compose(spectrum()) * weight).sum().backward()
            with torch.no_grad():
                spectrum()
            spectrum.eval()()
            assert len(factorisations) == steps
            optimizer.step()

    @pytest.mark.parametrize("seed", range(5))
    def test_any_mixture_is_grouped_and_each_result_is_its_own(self, seed, factorisations):
        """Widths, kinds, regimes, dtypes, bounds and limits drawn at random, in any order."""
        torch.manual_seed(seed)
        spectra, cache = [_drawn() for _ in range(12)], BasisCache()
        for _ in range(2):
            for spectrum, result in zip(spectra, evaluate(spectra, cache), strict=True):
                for ours, alone in zip(result, copy.deepcopy(spectrum)(), strict=True):
                    assert ours.dtype == alone.dtype
                    torch.testing.assert_close(ours, alone)
        batches = {
            (type(each), each.dim, each().basis_in.dtype, getattr(each, "max_condition", None)) for each in spectra
        }
        together = BasisCache()
        factorisations.clear()
        for _ in range(3):
            evaluate(spectra, together)
        assert len(factorisations) == len(batches)
        assert sum(shape[0] for shape in factorisations) == len(spectra)

    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_changes_after_a_call_is_seen(self, seed):
        """One argument after the other is changed: as a new spectrum with these arguments and parameters."""
        torch.manual_seed(seed)
        changes = [
            ("regime", lambda s: setattr(s, "regime", "smooth" if s.regime == "sharpen" else "sharpen")),
            ("bounded", lambda s: setattr(s, "bounded", not s.bounded)),
            ("double", lambda s: s.double()),
            ("half", lambda s: s.bfloat16()),
            ("float", lambda s: s.float()),
            ("basis", lambda s: s.basis.data.add_(0.1 * torch.eye(6, dtype=s.basis.dtype))),
            ("eigenvalues", lambda s: s.raw_eigenvalues.data.mul_(0.5)),
            ("data", lambda s: setattr(s.basis, "data", s.basis.data.flip(0).clone())),
        ]
        for kind in KINDS:
            spectrum = kind(6)
            for _, change in [changes[place] for place in torch.randint(len(changes), (20,)).tolist()]:
                spectrum()
                change(spectrum)
                other = kind(6, spectrum.regime, bounded=spectrum.bounded, dtype=spectrum.basis.dtype)
                other.load_state_dict(spectrum.state_dict())
                for backend in ("cpu", "reference", None):
                    with ot.use_backend(backend):
                        assert all(map(torch.equal, spectrum(), other()))

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_a_lower_limit_holds_at_once_and_only_for_its_own_layer(self, backend):
        cache, spectra = BasisCache(), [GeneralSpectrum(6), GeneralSpectrum(6)]
        with torch.no_grad():
            spectra[0].basis.copy_(torch.diag(torch.tensor([1, 1, 1, 1, 1, 0.01])))
        with ot.use_backend(backend):
            evaluate(spectra, cache), spectra[0]()
            spectra[1].max_condition = 30.0  # an orthogonal basis' is 6 at most
            evaluate(spectra, cache)
            spectra[0].max_condition = 50.0
            with pytest.raises(torch.linalg.LinAlgError, match="condition number of 1e.02, above max_condition=50"):
                evaluate(spectra, cache)
            with pytest.raises(torch.linalg.LinAlgError, match="above max_condition=50"):
                spectra[0]()
            spectra[0].max_condition = 200.0
            evaluate(spectra, cache), spectra[0]()

    def test_a_cache_does_not_grow_for_ever(self):
        cache = BasisCache()
        for dim in range(1, 40):
            evaluate([SymmetricSpectrum(dim)], cache)
        assert len(cache._entries) <= 16

    def test_copies_and_pickles_work_on_their_own(self):
        spectrum = SymmetricSpectrum(6)
        before = compose(spectrum())
        for other in (copy.deepcopy(spectrum), pickle.loads(pickle.dumps(spectrum))):
            assert torch.equal(compose(other()), before)
            torch.nn.init.orthogonal_(other.basis)
            assert not torch.equal(compose(other()), before)
        assert torch.equal(compose(spectrum()), before)

    def test_loaded_weights_are_used(self):
        ours, other = SymmetricSpectrum(6), SymmetricSpectrum(6)
        ours(), other()
        ours.load_state_dict(other.state_dict())
        assert torch.equal(compose(ours()), compose(other()))
        assert set(ours.state_dict()) == {"basis", "raw_eigenvalues"}


class TestConditionLimit:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("kind", ["orthogonal", "random", "graded", "two equal columns", "huge", "zero column"])
    @pytest.mark.parametrize("limit", [1.5, 20.0])
    def test_v_is_well_conditioned_and_its_gradient_finite_whatever_the_basis(self, kind, limit, dtype):
        generator = torch.Generator().manual_seed(0)
        basis = torch.randn(12, 12, generator=generator, dtype=dtype)
        if kind == "orthogonal":
            basis = torch.linalg.qr(basis).Q
        elif kind == "graded":
            basis *= 10.0 ** torch.linspace(-6, 6, 12, dtype=dtype)
        elif kind == "two equal columns":
            basis[:, 7] = basis[:, 2]
        elif kind == "huge":
            basis *= 1e15
        elif kind == "zero column":
            basis[:, 5] = 1e-30 * basis[:, 5]
        spectrum = GeneralSpectrum(12, condition_limit=limit, dtype=dtype)
        spectrum.basis.data.copy_(basis)
        condition = torch.linalg.cond(spectrum().basis_in)
        assert condition <= limit * (1 + 100 * torch.finfo(dtype).eps)
        assert kind not in ("random", "two equal columns") or condition > 1.05, "it does not limit, it orthogonalizes"
        compose(spectrum()).square().sum().backward()
        assert spectrum.basis.grad.isfinite().all()

    def test_a_basis_inside_it_is_kept(self):
        """Up to the lengths of its columns, which V Λ V⁻¹ does not depend on."""
        torch.manual_seed(0)
        limited, plain = (GeneralSpectrum(8, condition_limit=limit, dtype=torch.float64) for limit in (20.0, None))
        limited.basis.data.add_(0.05 * torch.randn(8, 8)).mul_(torch.linspace(0.1, 7, 8))
        plain.load_state_dict(limited.state_dict())
        assert 1.05 < ot.spectrum.condition_numbers(limited)[""] < 20
        torch.testing.assert_close(compose(limited()), compose(plain()))

    @pytest.mark.parametrize("limit", [1.5, 20.0, 1e6])
    def test_gradients(self, limit):
        generator = torch.Generator().manual_seed(1)
        basis = torch.randn(5, 5, generator=generator, dtype=torch.float64, requires_grad=True)
        well_conditioned = ot.spectrum.well_conditioned
        assert torch.autograd.gradcheck(lambda b: well_conditioned(b, limit, BasisCache()), (basis,))

    def test_condition_numbers_by_name(self):
        model = torch.nn.ModuleDict({"a": GeneralSpectrum(4), "b": SymmetricSpectrum(4)})
        given = {"a.basis": torch.diag(torch.tensor([4.0, 1.0, 1.0, 1.0]))}
        assert ot.spectrum.condition_numbers(model) == {"a": pytest.approx(1)}
        assert ot.spectrum.condition_numbers(model, given) == {"a": pytest.approx(4)}

    @pytest.mark.parametrize("limit", [1, 0.5, float("inf"), float("nan")])
    def test_wrong_limits(self, limit):
        with pytest.raises(
            ValueError, match="GeneralSpectrum: condition_limit: got .*, wanted a number above 1, or None"
        ):
            GeneralSpectrum(4, condition_limit=limit)


def test_wrong_arguments_say_what_is_wanted():
    with pytest.raises(ValueError, match="regime: got 'flat', wanted 'sharpen' or 'smooth'"):
        SymmetricSpectrum(4, "flat")
    with pytest.raises(ValueError, match="dim: got 0, wanted an integer of at least 1"):
        GeneralSpectrum(0)
    with pytest.raises(ValueError, match="kind: got 'odd', wanted 'symmetric' or 'general'"):
        ot.spectrum.make_spectrum("odd", 4, "smooth")
