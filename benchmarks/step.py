"""The price of a whole training step of ViT-Ti⁻: forward, backward and fused AdamW, with and without the layers' norms.

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
from overtone.benchmarks.case import Case, Compiled
from overtone.spectrum import BasisCache

CLASSES, DEPTH = 10, 12


class Shape(NamedTuple):
    label: str
    batch: int
    image: int
    patch: int
    dim: int = 192
    heads: int = 3
    depth: int = DEPTH

    @property
    def tokens(self) -> int:
        return (self.image // self.patch) ** 2 + 1


CIFAR = Shape("Ti-cifar", 64, 32, 4)
TI_224 = Shape("Ti-224", 16, 224, 16)

# (eager against eager, compiled against compiled) that is wanted, and eager with the norms of every layer.
TARGETS, NORMS_TARGET = (1.15, 1.08), 1.25


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

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, shape.dim, shape.patch, shape.patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, shape.dim))
        self.pos_embed = nn.Parameter(torch.empty(1, shape.tokens, shape.dim))
        self.blocks = nn.ModuleList(PlainBlock(shape.dim, shape.heads) for _ in range(shape.depth))
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


class Step:
    """A training step of a model; calling it gives the loss, then the gradients, then takes AdamW's step."""

    def __init__(self, shape: Shape, plain: bool, return_norms: bool, compiled: bool, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        ours = ot.models.vit_tiny(shape.image, shape.patch, CLASSES, "sharpen", depth=shape.depth)
        model: nn.Module = ours
        if plain:
            model = PlainViT(shape)
            model.load_state_dict({_renamed(name): value for name, value in ours.state_dict().items()})
        self.names = [name if plain else _renamed(name) for name, _ in model.named_parameters()]
        self.parameters = list(model.to(dtype).parameters())
        self.model = Compiled(model) if compiled else model
        self.caches = basis_caches(model)
        self.return_norms = return_norms
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, weight_decay=0.0, fused=True)

    @torch.enable_grad()  # the kit calls forwards without
    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """lr is zero: every call does all of a step's work, and gives the same result.

        All of it, so our model factorises its bases anew, as it must after a step that changed them.
        """
        for kept in self.caches:
            kept.forget()
        loss = self._loss(images, labels)
        loss.backward()
        grads = dict(zip(self.names, (p.grad for p in self.parameters), strict=True))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), *(grads[name] for name in sorted(grads))

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        if not self.return_norms:
            return F.cross_entropy(self.model(images), labels)
        logits, (low, high) = self.model(images, True)
        return F.cross_entropy(logits, labels) + 1e-3 * (high.mean() - low.mean())


def _contender(shape: Shape, plain: bool, return_norms: bool, compiled: bool = False):
    """A function of (images, labels). Its model is made at the first call, in the dtype of the images."""

    @cache
    def step(dtype: torch.dtype) -> Step:
        return Step(shape, plain, return_norms, compiled, dtype)

    return lambda images, labels: step(images.dtype)(images, labels)


class _CompiledStep(Compiled):
    """So that the kit knows it for compiled: the model inside is."""

    def __call__(self, *inputs):
        return self.function(*inputs)


def step_case(shape: Shape, return_norms: bool = False, compiled: bool = False) -> Case:
    def inputs() -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(shape.batch, 3, shape.image, shape.image, generator=generator)
        return images, torch.randint(CLASSES, (shape.batch,), generator=generator)

    ours = _contender(shape, False, return_norms, compiled)
    baselines = {"plain": _contender(shape, True, return_norms)}
    targets = {"plain": NORMS_TARGET if return_norms else TARGETS[0]}
    if compiled:
        baselines["compiled plain"] = _CompiledStep(_contender(shape, True, return_norms, compiled=True))
        targets = {"compiled plain": TARGETS[1]}
    tokens = shape.batch * shape.tokens
    linear = 12 * shape.dim**2 * tokens * shape.depth
    attention = 2 * shape.tokens * shape.dim * tokens * shape.depth
    return Case(
        op="training_step",
        variant=" ".join(filter(None, ("with norms" if return_norms else "", "compiled" if compiled else ""))),
        shape=shape.label,
        dtype=torch.float32,
        mode="forward",  # the step takes its own backward
        setup=inputs,
        ours=_CompiledStep(ours) if compiled else ours,
        baselines=baselines,
        flops=2 * 3 * linear + 2 * 7 * attention // 2,
        bytes=0,
        limit="matmul",
        targets=targets,
    )


def cases() -> list[Case]:
    return [
        step_case(shape, return_norms, compiled)
        for shape in (CIFAR, TI_224)
        for return_norms, compiled in ((False, False), (True, False), (False, True))
    ]
