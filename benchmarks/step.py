"""The price of a whole training step of ViT-Ti⁻: forward, backward and fused AdamW, with and without the layers' norms,
and under autocast to bfloat16; and what the factorisation of the bases takes of it.

The baseline is the same model as one would write it with PyTorch's best: SDPA, nn.Linear, torch.linalg.qr. Both start
from the same weights, and both are checked by the loss and the gradients of one step against float64.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overtone as ot
from overtone.benchmarks.harness.case import Case, Compiled, Function, Workload
from overtone.benchmarks.shapes import STEP_B_224, STEP_TI_224, STEP_TI_CIFAR, ImageShape
from overtone.ops.basis import BasisCache, orthonormal_basis

CLASSES = 10


def _model(shape: ImageShape) -> ot.models.VisionTransformer:
    config = ot.models.ViTConfig(
        image_size=shape.image_size, patch_size=shape.patch_size, num_classes=CLASSES, regime="sharpen",
        dim=shape.dim, num_heads=shape.num_heads, depth=shape.depth,
    )  # fmt: skip
    return ot.models.VisionTransformer(config)


# (eager against eager, compiled against compiled) that is wanted, and eager with the norms of every layer.
TARGETS, NORMS_TARGET = (1.15, 1.08), 1.25

# The largest share of a step that the factorisation of the bases and its gradient may take.
SHARES = {STEP_TI_224: 0.02, STEP_B_224: 0.05}


class PlainAttention(nn.Module):
    """V Λ Vᵀ attention in plain PyTorch."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qk = nn.Linear(dim, 2 * dim)
        self.theta = nn.Parameter(torch.empty(dim, dim))
        self.psi = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.linalg.qr(self.theta).Q
        query, key = self.qk(x).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        value = (x @ basis).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        heads = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return (heads * -self.psi.square()) @ basis.mT


class PlainBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn = PlainAttention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, return_norms: bool) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        x = x + self.attn(self.norm1(x))
        norms = _plain_norms(x) if return_norms else None
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)))), norms


def _plain_norms(x: Tensor) -> tuple[Tensor, Tensor]:
    mean = x.mean(-2, keepdim=True)
    low = math.sqrt(x.shape[-2]) * torch.linalg.vector_norm(mean, dim=(-2, -1))
    return low, torch.linalg.vector_norm(x - mean, dim=(-2, -1))


class PlainViT(nn.Module):
    """The same model as vit_tiny(..., "sharpen"), in plain PyTorch."""

    def __init__(self, shape: ImageShape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.dim, shape.patch_size, shape.patch_size)
        self.cls_token = nn.Parameter(torch.empty(1, 1, shape.dim))
        self.pos_embed = nn.Parameter(torch.empty(1, shape.tokens, shape.dim))
        self.blocks = nn.ModuleList(PlainBlock(shape.dim, shape.num_heads) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.dim, eps=1e-6)
        self.head = nn.Linear(shape.dim, CLASSES)

    def forward(self, images: Tensor, return_norms: bool = False):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + self.pos_embed
        norms = []
        for block in self.blocks:
            x, found = block(x, return_norms)
            norms.append(found)
        logits = self.head(self.norm(x)[:, 0])
        if not return_norms:
            return logits
        low, high = zip(*norms, strict=True)
        return logits, (torch.stack(low), torch.stack(high))


# Where our parameters are in the plain model.
RENAMED = {
    "patch_embed.proj": "patches",
    "attn.spectrum.basis": "attn.theta",
    "attn.spectrum.raw_eigenvalues": "attn.psi",
    "mlp.fc": "fc",
}


def _renamed(name: str) -> str:
    for ours, plain in RENAMED.items():
        name = name.replace(ours, plain)
    return name


def basis_caches(model: nn.Module) -> list[BasisCache]:
    """Where a model of ours keeps factorisations from call to call."""
    found = [value for part in model.modules() for value in vars(part).values() if isinstance(value, BasisCache)]
    return list(dict.fromkeys(found))


class Kind(NamedTuple):
    """Which step is taken."""

    shape: ImageShape
    return_norms: bool = False
    compiled: bool = False
    autocast: bool = False  # to bfloat16

    @property
    def variant(self) -> str:
        names = {"with norms": self.return_norms, "compiled": self.compiled, "autocast": self.autocast}
        return " ".join(name for name, holds in names.items() if holds)


class Step:
    """A training step of a model; calling it gives the loss, then the gradients, then takes AdamW's step."""

    def __init__(self, kind: Kind, plain: bool, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        ours = _model(kind.shape)
        model: nn.Module = ours
        if plain:
            model = PlainViT(kind.shape)
            model.load_state_dict({_renamed(name): value for name, value in ours.state_dict().items()})
        self.names = [name if plain else _renamed(name) for name, _ in model.named_parameters()]
        self.parameters = list(model.to(dtype).parameters())
        self.model = Compiled(model) if kind.compiled else model
        self.caches = basis_caches(model)
        self.kind = kind
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, weight_decay=0.0, fused=True)

    @torch.enable_grad()  # the kit calls forwards without
    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """lr is zero: every call gives the same result. It does all of a step's work: the bases are factorised anew."""
        for kept in self.caches:
            kept.clear()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind.autocast):
            loss = self._loss(images, labels)
        loss.backward()
        grads = dict(zip(self.names, (p.grad for p in self.parameters), strict=True))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), *(grads[name] for name in sorted(grads))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        if not self.kind.return_norms:
            return F.cross_entropy(self.model(images), labels)
        logits, (low, high) = self.model(images, True)
        return F.cross_entropy(logits, labels) + 1e-3 * (high.mean() - low.mean())


def _implementation(kind: Kind, plain: bool) -> Function:
    """A function of (images, labels). Its model is made at the first call, in the dtype of the images."""

    @cache
    def step(dtype: torch.dtype) -> Step:
        return Step(kind, plain, dtype)

    return lambda images, labels: step(images.dtype)(images, labels)


class _CompiledStep(Compiled):
    """So that the kit knows it for compiled: the model inside is."""

    def __call__(self, *inputs):
        return self.function(*inputs)


def _images_and_labels(shape: ImageShape) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(shape.batch, 3, shape.image_size, shape.image_size, generator=generator)
    return images, torch.randint(CLASSES, (shape.batch,), generator=generator)


def step_case(kind: Kind) -> Case:
    shape = kind.shape
    ours = _implementation(kind, False)
    baselines = {"plain": _implementation(kind._replace(compiled=False), True)}
    targets = {"plain": NORMS_TARGET if kind.return_norms else TARGETS[0]}
    if kind.compiled:
        baselines["compiled plain"] = _CompiledStep(_implementation(kind, True))
        targets = {"compiled plain": TARGETS[1]}
    tokens = shape.batch * shape.tokens
    linear = 12 * shape.dim**2 * tokens * shape.depth
    attention = 2 * shape.tokens * shape.dim * tokens * shape.depth
    return Case(
        op="training_step",
        variant=kind.variant,
        shape=shape.label,
        dtype=torch.bfloat16 if kind.autocast else torch.float32,
        mode="forward",  # the step takes its own backward
        targets={} if kind.autocast else targets,
        workload=Workload(
            setup=lambda: _images_and_labels(shape),
            ours=_CompiledStep(ours) if kind.compiled else ours,
            baselines=baselines,
            flops=2 * 3 * linear + 2 * 7 * attention // 2,
            bytes=0,
            bound_by="matmul",
        ),
    )


@torch.enable_grad()
def _basis_and_gradient(orthonormal: Function, theta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    theta = theta.detach().requires_grad_()
    basis = orthonormal(theta)
    return basis.detach(), *torch.autograd.grad(basis, theta, grad)


def _by_linalg(theta: Tensor) -> Tensor:
    basis, r = torch.linalg.qr(theta)
    return basis * r.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]


def _share_case(shape: ImageShape) -> Case:
    """The factorisation of all bases and its gradient. "whole step" over that is one over its share of the step."""
    step = _implementation(Kind(shape), False)

    def setup() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        theta, grad = torch.randn(2, shape.depth, shape.dim, shape.dim, generator=generator)
        return torch.linalg.qr(theta).Q, grad  # where training starts

    def ours(theta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _basis_and_gradient(lambda t: orthonormal_basis(t, BasisCache()), theta, grad)

    def by_linalg(theta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return _basis_and_gradient(_by_linalg, theta, grad)

    known = cache(lambda: (_images_and_labels(shape), ours(*setup())))

    def whole_step(theta: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """For its time: that the step's results are right is for the cases of its own."""
        inputs, results = known()
        step(*inputs)
        return results

    return Case(
        op="parameterization",
        shape=shape.label,
        dtype=torch.float32,
        mode="forward",
        targets={"whole step": 1 / SHARES[shape]},
        workload=Workload(
            setup=setup,
            ours=ours,
            baselines={"torch.linalg": by_linalg, "whole step": whole_step},
            flops=shape.depth * 23 * shape.dim**3 // 3,  # R and Q 8/3 n³; the gradient two products and a solve, 5 n³
            bytes=0,
            bound_by="matmul",
        ),
    )


def cases() -> list[Case]:
    steps = [
        Kind(shape, **options)
        for shape in (STEP_TI_CIFAR, STEP_TI_224)
        for options in ({}, {"return_norms": True}, {"compiled": True}, {"autocast": True})
    ]
    return [*map(step_case, steps), *map(_share_case, SHARES)]
