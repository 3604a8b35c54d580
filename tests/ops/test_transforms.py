"""Every op under forward-mode AD and the transforms of torch.func, from one table of ops (support.calls)."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from support import calls
from support.calls import CALLS
from torch import func
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import overtone as ot

ALL = pytest.mark.parametrize("name", CALLS)


class Recorded(TorchDispatchMode):
    """The names of overtone's ops that ran, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "overtone":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


def scalar_of(name: str, **options):
    """The op's results, with weights, as one number that has second derivatives."""

    def function(*args):
        results = CALLS[name].function(*args, **options)
        weights = [torch.arange(1, y.numel() + 1, dtype=y.dtype).cos().reshape(y.shape) for y in results]
        return sum((w * y.sin()).sum() for w, y in zip(weights, results, strict=True))

    return function


def assert_same(actual, expected):
    torch.testing.assert_close(actual, expected)


def gradients(name: str, args: tuple) -> tuple[torch.Tensor, ...]:
    """Plain reverse mode: the kernels' own."""
    leaves = [x.clone().requires_grad_() for x in args]
    return torch.autograd.grad(scalar_of(name)(*leaves), leaves)


def hessian(name: str, args: tuple) -> torch.Tensor:
    return torch.autograd.functional.hessian(scalar_of(name), args)


class TestTheTable:
    def test_has_every_public_function(self):
        named = {name.split()[0] for name in CALLS} | calls.WITHOUT_DERIVATIVE | calls.ROUNDED
        assert named == calls.public_functions() | {"spectral_attention_qkvpacked"}

    def test_reaches_every_registered_op(self, cpu_kernels):
        """A gradient's own op is reached by its op's, which knows when a kernel will not do."""
        with Recorded() as recorded:
            for call in CALLS.values():
                call.function(*call.args())
        ops = {op for op in calls.registered_ops() if not op.endswith(("_backward", "_gradient"))}
        assert ops - calls.ROUNDED == set(recorded.names)
        for op in ops:
            for key in ("Autograd", "FuncTorchBatched"):
                assert torch._C._dispatch_has_kernel_for_dispatch_key(f"overtone::{op}", key), f"{op}: no {key}"


class TestDerivatives:
    @ALL
    def test_against_finite_differences(self, name):
        """Reverse and forward mode, and both under torch.vmap."""
        call = CALLS[name]
        args = tuple(x.requires_grad_() for x in call.args())
        assert torch.autograd.gradcheck(
            call.function, args, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True
        )

    @ALL
    def test_transforms_agree_with_the_kernels_gradients(self, name):
        args = CALLS[name].args()
        places = tuple(range(len(args)))
        scalar, expected = scalar_of(name), gradients(name, args)
        assert_same(func.grad(scalar, places)(*args), expected)
        assert_same(func.vjp(scalar, *args)[1](torch.ones((), dtype=torch.float64)), expected)
        assert_same(func.jacrev(scalar, places)(*args), expected)
        assert_same(func.jacfwd(scalar, places)(*args), expected)
        tangents = CALLS[name].args(seed=2)
        slope = sum((t * g).sum() for t, g in zip(tangents, expected, strict=True))
        assert_same(func.jvp(scalar, args, tangents)[1], slope)
        assert_same(torch.autograd.functional.jvp(scalar, args, tangents, strict=True)[1], slope)

    @pytest.mark.parametrize("name", ["de_escalate", "spectral_attention", "linear", "eigh", "inverse_basis"])
    def test_linearize(self, name):
        """It traces, so that no value can be looked at."""
        args, tangents = CALLS[name].args(), CALLS[name].args(seed=2)
        slope = func.jvp(scalar_of(name), args, tangents)[1]
        assert_same(func.linearize(scalar_of(name), *args)[1](*tangents), slope)

    @ALL
    def test_second_derivatives(self, name):
        """Each pair of modes, and products with a vector, against reverse over reverse."""
        args = CALLS[name].args()
        places = tuple(range(len(args)))
        scalar, expected = scalar_of(name), hessian(name, args)
        assert_same(func.hessian(scalar, places)(*args), expected)
        assert_same(func.jacrev(func.jacfwd(scalar, places), places)(*args), expected)
        first = func.grad(lambda *a: sum(g.sin().sum() for g in func.grad(scalar, places)(*a)), places)(*args)
        weights = [g.cos() for g in gradients(name, args)]
        products = torch.autograd.functional.hvp(scalar, args, tuple(weights))[1]
        assert_same(first, products)
        over_reverse = func.jvp(lambda *a: func.grad(scalar, places)(*a), args, tuple(weights))[1]
        assert_same(over_reverse, products)

    @ALL
    def test_dual_tensors(self, name):
        """torch.autograd.forward_ad without a transform, through the backward as well."""
        args, tangents = CALLS[name].args(), CALLS[name].args(seed=2)
        places = tuple(range(len(args)))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x.clone().requires_grad_(), t) for x, t in zip(args, tangents, strict=True)]
            value = scalar_of(name)(*duals)
            slope = forward_ad.unpack_dual(value).tangent
            turned = [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(value, duals)]
        assert_same(slope, sum((t * g).sum() for t, g in zip(tangents, gradients(name, args), strict=True)))
        assert_same(tuple(turned), func.jvp(func.grad(scalar_of(name), places), args, tangents)[1])

    @ALL
    def test_tangents_of_what_comes_back(self, name):
        """A graph made by the kernels, sent dual gradients: backward is linear in them."""
        leaves = [x.requires_grad_() for x in CALLS[name].args()]
        results = CALLS[name].function(*leaves)
        sent, turning = ([torch.randn_like(y) for y in results] for _ in range(2))
        back = partial(torch.autograd.grad, results, leaves, retain_graph=True)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(g, t) for g, t in zip(sent, turning, strict=True)]
            tangents = [forward_ad.unpack_dual(g).tangent for g in back(duals)]
        assert_same(tuple(tangents), back(turning))
        assert_same(func.jvp(lambda *g: back(g), tuple(sent), tuple(turning))[1], back(turning))


class TestVmap:
    @ALL
    def test_in_any_dimension(self, name):
        """Each argument alone mapped, and all of them, in the first and in the last dimension; also twice over."""
        call = CALLS[name]
        members = [call.args(seed) for seed in range(3)]
        count = len(members[0])
        for mapped, last in itertools.product([{place} for place in range(count)] + [set(range(count))], (False, True)):
            rows = [tuple(row[i] if i in mapped else members[0][i] for i in range(count)) for row in members]
            dims = tuple((-1 if last else 0) if i in mapped else None for i in range(count))
            stacked = [torch.stack(x, d) if d is not None else x[0] for x, d in zip(zip(*rows), dims)]  # noqa: B905
            expected = [torch.stack(y, -1) for y in zip(*(call.function(*row) for row in rows), strict=True)]
            results = torch.vmap(call.function, dims, -1)(*stacked)
            assert_same(list(results), expected)
        outer, inner = (tuple(0 for _ in range(count)) for _ in range(2))
        pairs = (torch.stack((x, x), 1) for x in stacked_rows(members))
        twice = torch.vmap(torch.vmap(call.function, inner), outer)(*pairs)
        once = torch.vmap(call.function)(*stacked_rows(members))
        assert_same([y[:, 1] for y in twice], list(once))

    def test_masks(self):
        """They have no derivative, and are mapped as tokens are."""
        tokens = torch.randn(3, 2, 4, 5)
        masks = torch.rand(3, 2, 4) > 0.4
        query, key, value, eigenvalues, weights = (x.float() for x in CALLS["spectral_attention"].args()[:5])
        logits = torch.rand(3, 2, 1, 3, 4) > 0.4

        def attend(query, mask):
            return ot.spectral_attention(query, key, value, eigenvalues, weights, attn_mask=mask)

        def measure(x, mask):
            return ot.frequency_norms(x, mask=mask).high

        assert_same(torch.vmap(measure)(tokens, masks), measure(tokens, masks))
        assert_same(torch.vmap(attend, (None, 0))(query, logits), torch.stack([attend(query, m) for m in logits]))
        mapped = torch.vmap(func.grad(lambda *a: attend(*a).sum()), (None, 0))(query, logits)
        assert_same(mapped, torch.stack([func.grad(lambda q, m=m: attend(q, m).sum())(query) for m in logits]))

    @ALL
    def test_runs_the_kernels_once(self, name, cpu_kernels):
        """The mapped dimension goes into the batch."""
        call = CALLS[name]
        args = call.args()
        with Recorded() as plainly:
            call.function(*args)
        batch_first = torch.stack((args[0], args[0] + 0.1))
        with Recorded() as mapped:
            torch.vmap(lambda x: call.function(x, *args[1:]))(batch_first)
        assert mapped.names == plainly.names

    @ALL
    def test_gradients_of_mapped_calls(self, name):
        """Plain autograd through torch.vmap, whose tensors do not say that they need a gradient."""
        members = [CALLS[name].args(seed) for seed in range(3)]
        leaves = [x.requires_grad_() for x in stacked_rows(members)]
        got = torch.autograd.grad(torch.vmap(scalar_of(name))(*leaves).sum(), leaves)
        each = [gradients(name, row) for row in members]
        assert_same(got, tuple(torch.stack(g) for g in zip(*each, strict=True)))

    @ALL
    def test_gradients_per_sample(self, name):
        members = [CALLS[name].args(seed) for seed in range(3)]
        places = tuple(range(len(members[0])))
        each = [gradients(name, row) for row in members]
        expected = tuple(torch.stack(g) for g in zip(*each, strict=True))
        stacked = stacked_rows(members)
        assert_same(torch.vmap(func.grad(scalar_of(name), places))(*stacked), expected)
        assert_same(func.grad(lambda *a: torch.vmap(scalar_of(name))(*a).sum(), places)(*stacked), expected)


class TestAutocast:
    """It chooses what attention's arguments are rounded to, and has no other say, as without a transform."""

    @pytest.mark.parametrize("name", ["spectral_attention", "spectral_attention_qkvpacked", "inverse", "eigh", "eig"])
    def test_products_stay_wide(self, name):
        args = tuple(x.float() for x in CALLS[name].args())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = CALLS[name].function(*args)
            for value in (
                func.jvp(CALLS[name].function, args, args)[0],
                func.vjp(CALLS[name].function, *args)[0],
                [y[0] for y in torch.vmap(CALLS[name].function)(*(x[None] for x in args))],
            ):
                for y, z in zip(value, expected, strict=True):
                    torch.testing.assert_close(y, z)
            with forward_ad.dual_level():
                dual = CALLS[name].function(*(forward_ad.make_dual(x, x) for x in args))
                for y, z in zip(dual, expected, strict=True):
                    torch.testing.assert_close(forward_ad.unpack_dual(y).primal, z)


class TestKernelsThatWereAskedFor:
    """A backend that is named runs or raises: what the reference would have to do, no kernel is said to have done."""

    WITH_KERNELS = pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.takes_backend])

    @WITH_KERNELS
    def test_named_in_the_call(self, name, cpu_kernels):
        args = CALLS[name].args()
        scalar = scalar_of(name, backend="cpu")
        with pytest.raises(ot.BackendError, match="backend 'cpu' cannot run this call: forward-mode AD and torch.func"):
            func.jvp(scalar, args, args)
        with pytest.raises(ot.BackendError, match="leave the backend to None, or ask for 'reference'"):
            func.grad(scalar)(*args)
        with forward_ad.dual_level(), pytest.raises(ot.BackendError, match="forward-mode AD"):
            scalar(forward_ad.make_dual(args[0], args[0]), *args[1:])
        expected = func.grad(scalar_of(name))(*args)
        assert_same(func.grad(scalar_of(name, backend="reference"))(*args), expected)

    @WITH_KERNELS
    def test_kernels_run_in_vmap(self, name, cpu_kernels):
        args = CALLS[name].args()
        mapped = torch.vmap(partial(CALLS[name].function, backend="cpu"))(*(x[None] for x in args))
        assert_same([y[0] for y in mapped], list(CALLS[name].function(*args)))

    @ALL
    def test_forced_for_all(self, name, cpu_kernels):
        args = CALLS[name].args()
        if name in ("effective_rank", "stable_rank"):  # plain PyTorch on every backend
            with ot.use_backend("cpu"):
                func.grad(scalar_of(name))(*args)
            return
        with ot.use_backend("cpu"), pytest.raises(ot.BackendError, match="backend 'cpu' cannot run this call"):
            func.grad(scalar_of(name))(*args)


class TestMatricesThatCannotBeSolved:
    BROKEN = torch.stack((torch.eye(3), torch.full((3, 3), torch.nan), 2 * torch.eye(3)))

    @pytest.mark.parametrize("function", [ot.linalg.eigh, ot.linalg.eigvalsh, ot.linalg.eig, ot.linalg.qr])
    def test_raises_in_transforms(self, function):
        def scalar(A):
            results = function(A)
            return (results if isinstance(results, torch.Tensor) else results[0]).abs().sum()

        expected = rf"{function.__name__}: A: matrix \(1,\) is not finite"
        for transformed in (func.grad(scalar), torch.vmap(scalar), torch.vmap(func.grad(scalar))):
            with pytest.raises(torch.linalg.LinAlgError, match=expected):
                transformed(self.BROKEN)

    def test_info_is_each_members(self):
        def solve(A):
            values, _, info = ot.linalg.eigh_ex(A)
            return values.sum(), info

        (gradient, (value, info)) = torch.vmap(func.grad_and_value(solve, has_aux=True))(self.BROKEN)
        assert info.tolist() == [0, 1, 0]
        assert_same(gradient[[0, 2]], torch.eye(3).expand(2, 3, 3))
        assert value[1].isnan()

    def test_a_basis_that_cannot_be_inverted(self):
        spectrum = ot.spectrum.GeneralSpectrum(4, max_condition=10.0)
        singular = torch.eye(4).index_fill(0, torch.tensor(2), 1e-3)

        def weight(basis):
            factors = func.functional_call(spectrum, {"basis": basis}, ())
            return (factors.basis_in @ factors.basis_out).sum()

        with pytest.raises(torch.linalg.LinAlgError, match="condition number of .* above max_condition=10"):
            torch.vmap(func.grad(weight))(torch.stack((torch.eye(4), singular)))

    def test_extremal_eigenvalues_have_no_derivative(self):
        A = torch.rand(5, 5).softmax(-1)
        for transform, given in (
            (func.grad, A),
            (torch.vmap, A[None]),
            (lambda f: lambda x: func.jvp(f, (x,), (x,)), A),
        ):
            with pytest.raises(NotImplementedError, match="extremal_eigvals: A: got a tensor of a torch.func"):
                transform(lambda A: ot.linalg.extremal_eigvals(A).second.real)(given)


def tiny_vit(regime: str, kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    options = {} if regime == "free" else {"kind": kind}
    model = ot.models.vit_tiny(16, 8, num_classes=3, depth=2, regime=regime, **options)
    return model.double().eval()


def loss_of(model: torch.nn.Module):
    buffers = dict(model.named_buffers())

    def loss(parameters, image, label):
        logits = func.functional_call(model, (parameters, buffers), (image[None],))
        return torch.nn.functional.cross_entropy(logits, label[None])

    return loss


@pytest.mark.parametrize(
    "regime, kind",
    [("free", ""), ("sharpen", "symmetric"), ("sharpen", "general"), ("smooth", "symmetric"), ("smooth", "general")],
)
class TestModels:
    def test_gradients_per_sample(self, regime, kind):
        model = tiny_vit(regime, kind)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        images, labels = torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.tensor([0, 2, 1])
        together = torch.vmap(func.grad(loss_of(model)), (None, 0, 0))(parameters, images, labels)
        for i in range(3):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(images[i : i + 1]), labels[i : i + 1]).backward()
            for name, parameter in model.named_parameters():
                assert_same(together[name][i], parameter.grad)

    def test_an_ensemble(self, regime, kind):
        """torch.func.stack_module_state: parameters are mapped too."""
        models = [tiny_vit(regime, kind) for _ in range(2)]
        with torch.no_grad():
            for parameter in models[1].parameters():
                parameter.add_(0.01)
        parameters, buffers = func.stack_module_state(models)
        images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
        run = lambda p, b: func.functional_call(models[0], (p, b), (images,))  # noqa: E731
        assert_same(torch.vmap(run)(parameters, buffers), torch.stack([model(images) for model in models]))

    def test_forward_mode(self, regime, kind):
        model = tiny_vit(regime, kind)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        tangents = {name: torch.randn_like(p) for name, p in parameters.items()}
        image, label = torch.randn(3, 16, 16, dtype=torch.float64), torch.tensor(1)
        loss = loss_of(model)
        slope = func.jvp(lambda p: loss(p, image, label), (parameters,), (tangents,))[1]
        torch.nn.functional.cross_entropy(model(image[None]), label[None]).backward()
        assert_same(slope, sum((p.grad * tangents[name]).sum() for name, p in model.named_parameters()))


class TestCompiled:
    @pytest.mark.parametrize("name", ["spectral_attention", "mlp", "qr", "orthonormal_basis"])
    def test_transforms_in_one_graph(self, name):
        """The same in torch.compile(fullgraph=True)."""
        args = CALLS[name].args()
        mapped = tuple(x[None] for x in args)
        for transformed, given in ((func.grad(scalar_of(name)), args), (torch.vmap(scalar_of(name)), mapped)):
            torch._dynamo.reset()
            compiled = torch.compile(transformed, fullgraph=True, backend="aot_eager")
            assert_same(compiled(*given), transformed(*given))


def stacked_rows(members: list[tuple]) -> list[torch.Tensor]:
    return [torch.stack(x) for x in zip(*members, strict=True)]
