"""Layers of several widths in one model: one factorisation per width, and the numbers of layers on their own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support import optional
from torch import nn

import overtone as ot

TIMM = {"pit_ti_224": {"img_size": 64}, "mobilevit_xxs": {}, "crossvit_tiny_240": {}}


class TwoTowers(nn.Module):
    """Two models of different width, depth and dtype, called one after the other."""

    def __init__(self):
        super().__init__()
        sizes = {"img_size": 8, "patch_size": 4, "num_classes": 5, "num_heads": 2}
        create = optional.timm().create_model
        self.first = create("vit_tiny_patch16_224", embed_dim=16, depth=2, **sizes)
        self.second = create("vit_tiny_patch16_224", embed_dim=24, depth=3, **sizes)
        self.third = create("vit_tiny_patch16_224", embed_dim=16, depth=1, **sizes)

    def double(self):
        super().double()
        self.third.float()
        return self

    def forward(self, x):
        return self.first(x) + self.second(x) + self.third(x.float())


def build(name):
    torch.manual_seed(0)
    if name == "two towers":
        return TwoTowers().double().eval(), torch.randn(2, 3, 8, 8).double()
    model = optional.timm().create_model(name, num_classes=3, **TIMM[name])
    size = TIMM[name].get("img_size", 240 if "crossvit" in name else 64)
    return model.double().eval(), torch.randn(1, 3, size, size).double()


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


@pytest.mark.parametrize(
    ("name", "kind"), [("two towers", "symmetric"), ("two towers", "general"), *((name, "symmetric") for name in TIMM)]
)
def test_one_factorisation_per_width(name, kind, factorisations):
    model, x = build(name)
    handle = ot.reparameterize(model, "sharpen", kind, bounded=True)
    groups = Counter((attention.dim, attention.spectrum.basis.dtype) for attention in handle.attentions)
    assert len(groups) > 1
    found = model(x), *gradients(model, x)
    assert sorted(factorisations) == sorted((count, dim, dim) for (dim, _), count in groups.items())
    # A hook of its own on each spectrum: it is then evaluated where it is called, alone.
    for attention in handle.attentions:
        attention.spectrum.register_forward_hook(lambda *_: None)
    factorisations.clear()
    alone = model(x), *gradients(model, x)
    assert len(factorisations) == len(handle.attentions)
    # A matrix alone may go to another kernel: equal to the rounding of the narrowest dtype, through all layers.
    eps = max(torch.finfo(parameter.dtype).eps for parameter in model.parameters())
    bound = 100 * len(handle.attentions) * eps * max(each.abs().max() for each in alone)
    assert all((ours - theirs).abs().max() <= bound for ours, theirs in zip(found, alone, strict=True))
