"""Methods of the heads against their published formulas (math.md §3) in plain PyTorch, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overtone as ot
from overtone.models import VisionTransformer, ViTConfig
from overtone.nn import head_methods

DIM, HEADS, TOKENS = 12, 3, 7


def laplacian(method, a, v, v0, x):
    keep = torch.tensor([1.0, 0, 0])[:, None, None].to(v)  # the share 0.5 of three heads is two
    return keep * (a @ v) + (1 - keep) * (v - a @ v)


def value_residual(method, a, v, v0, x):
    return 0.3 * (a @ v0) + 0.7 * (a @ v)


def gfsa(method, a, v, v0, x):
    w_0, w_k = method.w_0[:, None, None], method.w_k[:, None, None]
    u = a @ v
    return w_0 * v + u + w_k * (u + (method.order - 1) * (a @ u - u))


def xsa(method, a, v, v0, x):
    y, direction = a @ v, v / v.norm(dim=-1, keepdim=True)
    return y - method.a.tanh()[:, None, None] * torch.einsum("bhnd,bhnd->bhn", y, direction)[..., None] * direction


def gated(method, a, v, v0, x):
    gates = 1 / (1 + (-(x @ method.gate.weight.T)).exp())
    return (a @ v) * gates.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def att_inv(method, a, v, v0, x):
    parts = x @ method.weights.weight.T + method.weights.bias
    low, high = (parts[..., half].transpose(1, 2)[..., None] for half in (slice(HEADS), slice(HEADS, None)))
    s = F.softplus(high)
    y = a @ v
    return y + method.gammas[0] * low.tanh() * y + method.gammas[1] * 2 * s**2 / (s**2 + 0.3678) * (v - y)


METHODS = {
    "laplacian": (laplacian, lambda: head_methods.LaplacianHeads(HEADS)),
    "value_residual": (value_residual, lambda: head_methods.ValueResidual(0.3)),
    "gfsa": (gfsa, lambda: head_methods.GraphFilter(HEADS, 4)),
    "xsa": (xsa, lambda: head_methods.XSA(HEADS)),
    "gated": (gated, lambda: head_methods.GatedHeads(DIM)),
    "att_inv": (att_inv, lambda: head_methods.AttInv(DIM, HEADS)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("regime", ["free", "sharpen"])
@pytest.mark.parametrize("name", METHODS)
def test_formula(name, regime, is_causal):
    torch.manual_seed(0)
    formula, make = METHODS[name]
    attn = ot.nn.SpectralAttention(DIM, HEADS, regime, proj_bias=True, head_method=make()).double()
    for parameter in attn.parameters():  # nothing is zero, nor one
        nn.init.normal_(parameter, std=0.5)
    x, first = torch.randn(2, TOKENS, DIM).double().requires_grad_(), torch.randn(2, HEADS, TOKENS, 4).double()
    residual, scale = torch.randn(2, TOKENS, DIM).double(), torch.tensor([0.5, 2.0]).double()
    y, norms = attn(x, residual=residual, values_0=first, sample_scale=scale, is_causal=is_causal, return_norms=True)
    query, key, value = attn.project(x)[:3]
    logits = query @ key.mT / math.sqrt(DIM / HEADS)
    if is_causal:
        logits = logits.masked_fill(~torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(), -math.inf)
    heads = formula(attn.head_method, logits.softmax(-1), value, first, x)
    update = heads.transpose(1, 2).flatten(2) @ attn.value_projection()[1] + attn._output_bias()
    expected = residual + scale[:, None, None] * update
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(norms, ot.reference.frequency_norms(expected))
    leaves = [x, *attn.parameters()]
    weights = torch.randn_like(y)
    ours, theirs = (torch.autograd.grad(z, leaves, weights, allow_unused=True) for z in (y, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(*(torch.zeros(()) if g is None else g for g in (a, b)))


@pytest.mark.parametrize("name", ["xsa", "att_inv", "gfsa"])
def test_starts_as_plain_attention(name):
    torch.manual_seed(0)
    config = ViTConfig(image_size=16, patch_size=8, num_classes=3, dim=DIM, num_heads=HEADS, depth=2)
    plain, model = VisionTransformer(config), VisionTransformer(config.replace(method=name))
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected and missing
    images = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-4, atol=1e-5)


def test_layernorm_scaling():
    """LN(x) / √ℓ before attention and the MLP of layer ℓ."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=8, num_classes=3, dim=DIM, num_heads=HEADS, depth=4, method="layernorm_scaling"
    )
    block = VisionTransformer(config).blocks[3]
    x = torch.randn(2, 5, DIM)
    middle = x + block.attn(block.norm1(x) / 2)
    torch.testing.assert_close(block(x)[0], middle + block.mlp(block.norm2(middle) / 2))


class TestErrors:
    def test_beside_another_method(self):
        with pytest.raises(
            ValueError, match="head_method: got XSA, wanted None beside head_gain, centered or neutreno"
        ):
            ot.nn.SpectralAttention(DIM, HEADS, centered=True, head_method=head_methods.XSA(HEADS))

    def test_a_share_of_heads(self):
        with pytest.raises(ValueError, match="LaplacianHeads: share: got 2, wanted 0 to 1"):
            head_methods.LaplacianHeads(HEADS, 2)

    @pytest.mark.parametrize("name", ["gfsa", "value_residual"])
    def test_methods_without_a_cache(self, name):
        with pytest.raises(ValueError, match=f"method: got '{name}', wanted"):
            ot.models.gpt(method=name)
