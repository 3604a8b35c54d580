"""Models in several threads, replicas, recomputed blocks and after errors: nobody sees another call's state."""

from __future__ import annotations

import copy
import pickle
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from support import optional
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import overtone as ot
from overtone.integrations.adapter import cached_spectra
from overtone.models import VisionTransformer, ViTConfig

REGIMES = ["sharpen", "free", "smooth"]
ROUNDS = 10


def ours(**options):
    sizes = {"image_size": 8, "patch_size": 4, "num_classes": 5, "dim": 16, "num_heads": 2, "depth": 3}
    return VisionTransformer(ViTConfig(**sizes, regime=REGIMES, **options))


def timm_vit(kind="symmetric"):
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    model = optional.timm().create_model("vit_tiny_patch16_224", **sizes)
    ot.reparameterize(model, "sharpen", kind, layers=[0, 1])
    ot.reparameterize(model, "smooth", layers=[2])
    return model


MODELS = {
    "ours": ours,
    "ours, NeuTRENO": lambda: ours(method="neutreno", kind="general"),
    "timm": timm_vit,
    "timm, general": lambda: timm_vit("general"),
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]().double()


@pytest.fixture
def restless():
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def images(seed=0):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


def evaluation(model, x):
    with torch.no_grad():
        return (model(x),)


def run_together(*tasks):
    """Each task in its own thread; what one of them raises is raised here."""
    errors, start = [], threading.Barrier(len(tasks))

    def work(task):
        try:
            start.wait()
            task()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_forward_backward_and_evaluation_in_threads(model, restless):
    """Every result is that of one thread alone, and no gradient is missing."""

    def task(function, seed):
        x = images(seed)
        wanted = function(model, x)

        def repeat():
            for _ in range(ROUNDS):
                torch.testing.assert_close(function(model, x), wanted, rtol=1e-12, atol=1e-14)

        return repeat

    run_together(
        *(task(function, seed) for seed, function in enumerate((gradients, evaluation, gradients, evaluation)))
    )


def test_training_beside_an_evaluation_is_as_without(model, restless):
    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for step in range(ROUNDS):
            optimizer.zero_grad()
            model(images(step)).square().mean().backward()
            optimizer.step()

    alone = copy.deepcopy(model)
    train(alone)
    is_done = threading.Event()

    def evaluate():
        while not is_done.is_set():
            evaluation(model, images())

    def train_and_tell():
        try:
            train(model)
        finally:
            is_done.set()

    run_together(train_and_tell, evaluate)
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()), rtol=1e-12, atol=1e-14)


def replica_of(model):
    """As torch.nn.DataParallel makes it: shallow copies of modules, their parameters computed from the model's."""
    copies = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, other in copies.items():
        for name, child in module._modules.items():
            setattr(other, name, None if child is None else copies[child])
        for name, parameter in module._parameters.items():
            setattr(other, name, None if parameter is None else parameter.clone())
    return copies[model]


def test_replicas_in_threads(model, restless):
    replicas, results = [replica_of(model) for _ in range(3)], {}

    def task(seed):
        def run():
            results[seed] = replicas[seed](images(seed))

        return run

    run_together(*map(task, range(3)))
    loss = sum(results[seed].square().sum() for seed in range(3))
    found = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.autograd.grad(sum(model(images(seed)).square().sum() for seed in range(3)), list(model.parameters()))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_copies_pickles_and_copied_blocks_are_on_their_own(model):
    x = images()
    wanted, grads = evaluation(model, x), gradients(model, x)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
    for other in others:
        torch.testing.assert_close(gradients(other, x), grads, rtol=0, atol=0)
        for parameter in other.parameters():
            parameter.data.mul_(0.5)
    assert torch.equal(*wanted, *evaluation(model, x))
    for other in others:
        torch.testing.assert_close(evaluation(other, x), evaluation(others[0], x), rtol=0, atol=0)


def test_one_factorisation_per_step(model, factorisations):
    """Per kind, width and conversion; V of a general spectrum has a QR that bounds its condition, and an inverse. The
    model of ot.models is one, the converted one was converted twice."""
    for _ in range(2):
        gradients(model, images())
        evaluation(model, images())
    is_one = isinstance(model, VisionTransformer) and model.config.kind == "symmetric"
    assert len(factorisations) == (1 if is_one else 2)


class TestConverted:
    """What somebody else's model may do to the layers in it."""

    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return timm_vit().double()

    def test_an_error_in_the_middle_leaves_nothing_behind(self, model):
        def fail(*_):
            raise ValueError("in the middle")

        for hook in (model.blocks[1].register_forward_hook(fail), model.register_forward_pre_hook(fail)):
            with pytest.raises(ValueError, match="in the middle"):
                model(images())
            hook.remove()
            assert not cached_spectra._spectra
        fresh = copy.deepcopy(model)
        for other in (model, fresh):
            for parameter in other.parameters():
                parameter.data.mul_(0.5)
        assert torch.equal(model.forward_features(images()), fresh.forward_features(images()))

    def test_layers_that_are_called_alone_evaluate_their_own(self, model):
        x = images()
        wanted = gradients(model, x)
        features = torch.autograd.grad(
            model.forward_head(model.forward_features(x)).square().sum(), list(model.parameters())
        )
        torch.testing.assert_close(features, wanted, rtol=1e-10, atol=1e-12)

    def test_a_model_inside_a_models_forward(self, model):
        """A teacher that is called while its student runs, whole or in part."""
        x, teacher = images(), copy.deepcopy(model)
        for parameter in teacher.parameters():
            parameter.data.mul_(0.7)
        alone, seen = (gradients(model, x), evaluation(teacher, x)[0], teacher.forward_features(x), model(x)), []

        def call_others(*_):
            if not seen:
                seen.append(None)  # the model calls itself once
                seen[:] = teacher(x), teacher.forward_features(x), model(x)

        hook = model.blocks[0].register_forward_hook(call_others)
        found = gradients(model, x)
        hook.remove()
        torch.testing.assert_close(found, alone[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(tuple(seen), alone[1:])

    @pytest.mark.parametrize("way", ["ddp", "fsdp", "fsdp-blocks"])
    def test_distributed_by_others_means(self, model, way, factorisations):
        wanted, once = gradients(model, images()), len(factorisations)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            outer = _distributed(model, way)
            factorisations.clear()
            outer(images()).square().sum().backward()
            found = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters()]
            torch.testing.assert_close(found, list(wanted), rtol=1e-10, atol=1e-12)
            # Sharded blocks hold their bases only while they run.
            assert len(factorisations) == (len(model.blocks) if way == "fsdp-blocks" else 0) and once == 2
        finally:
            dist.destroy_process_group()

    @pytest.mark.parametrize("reentrant", [True, False])
    @pytest.mark.parametrize("way", ["wrapper", "own call", "timm"])
    def test_any_checkpointing_gives_the_same_gradients(self, model, way, reentrant):
        x = images().requires_grad_()
        wanted = gradients(model, x)
        names = [name for name, _ in model.named_parameters()]
        if way == "timm":
            model.set_grad_checkpointing()
        for index, block in enumerate(model.blocks if way != "timm" else ()):
            if way == "wrapper":
                model.blocks[index] = checkpoint_wrapper(block, **_implementation(reentrant))
            else:
                model.blocks[index] = _Checkpointed(block, reentrant)
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            found = [parameter.grad for parameter in model.parameters()]
            torch.testing.assert_close(found, list(wanted), rtol=1e-10, atol=1e-12, msg=lambda m: f"{names}: {m}")

    def test_checkpointing_in_threads(self, model, restless):
        for index, block in enumerate(model.blocks):
            model.blocks[index] = _Checkpointed(block, False)
        wanted = [gradients(model, images(seed)) for seed in range(2)]

        def task(seed):
            def repeat():
                for _ in range(5):
                    torch.testing.assert_close(gradients(model, images(seed)), wanted[seed], rtol=1e-12, atol=1e-14)

            return repeat

        run_together(*map(task, range(2)), lambda: [evaluation(model, images()) for _ in range(20)])

    @pytest.mark.parametrize("breaks", [False, True])
    def test_compiled_with_and_without_graph_breaks(self, breaks, factorisations):
        optional.timm()
        from timm.models.vision_transformer import Block

        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(
            *(part for _ in range(2) for part in (Block(16, 2, mlp_ratio=1), _Break(breaks)))
        ).double()
        ot.reparameterize(model, "sharpen")
        x = torch.randn(2, 5, 16, dtype=torch.float64)
        wanted, grads = model(x), gradients(model, x)
        compiled = torch.compile(model, backend="eager", fullgraph=not breaks)
        for _ in range(2):
            torch.testing.assert_close(compiled(x), wanted)
        torch.testing.assert_close(gradients(compiled, x), grads)
        run_together(lambda: compiled(x), lambda: torch.testing.assert_close(compiled(x), wanted))
        assert factorisations == [(2, 16, 16)] and not cached_spectra._spectra


def _distributed(model, way):
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for block in model.blocks if way == "fsdp-blocks" else ():
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class _Break(nn.Module):
    """Where torch.compile must stop, and start again."""

    def __init__(self, breaks):
        super().__init__()
        self.breaks = breaks

    def forward(self, x):
        if self.breaks:
            torch._dynamo.graph_break()
        return x


class _Checkpointed(nn.Module):
    """A block that a user's own model recomputes."""

    def __init__(self, block, reentrant):
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


def _implementation(reentrant):
    return {"checkpoint_impl": CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT}
