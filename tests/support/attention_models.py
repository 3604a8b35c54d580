"""Small attention models of known make, and a recorder of what analyze's observer sees in them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

import overtone as ot
from overtone import reference
from overtone.analysis.observe import observed
from overtone.analysis.sites import find_sites

DIM, HEADS, TOKENS = 12, 3, 7


class Attention(nn.Module):
    """As timm's, by SDPA, or by a softmax."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.num_heads, self.fused = HEADS, fused
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v)
        else:
            heads = (q @ k.mT / math.sqrt(DIM / HEADS)).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(DIM), Attention(fused), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, depth: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(fused) for _ in range(depth)])
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        for block in self.blocks:
            x = block(self.dropout(x))
        return x.mean(1)


def tokens(count=5):
    return torch.randn(count, TOKENS, DIM, generator=torch.Generator().manual_seed(0))


class Recorder:
    """A Listener that keeps everything."""

    def __init__(self) -> None:
        self.attention, self.heads, self.inputs, self.outputs = [], [], [], []

    def on_input(self, x):
        self.inputs.append(x)

    def on_attention(self, attention, heads):
        self.attention.append(attention)
        self.heads.append(heads)

    def on_output(self, x):
        self.outputs.append(x)


@torch.no_grad()
def record(model, *inputs, **kwargs):
    sites, skipped = find_sites(model)
    recorders = [Recorder() for _ in sites]
    with observed(sites, recorders, skipped):
        model.eval()(*inputs, **kwargs)
    assert not skipped
    return sites, recorders


def check_projection(site, recorder, output):
    """The heads, put through W_proj, are what the module gave; A and the values it read make the heads."""
    w_v, w_proj, _ = site.weights()
    heads = recorder.heads[0].transpose(1, 2).flatten(2)
    difference = output - heads.to(output.dtype) @ w_proj
    bias = difference.flatten(0, 1)[0]  # the same for all tokens: the projection's bias
    torch.testing.assert_close(difference, bias.expand_as(difference), atol=1e-5, rtol=1e-4)
    assert torch.allclose(recorder.attention[0].sum(-1), torch.ones(()), atol=1e-5)
    assert w_v.shape == w_proj.mT.shape


def check_values(site, recorder, x):
    """heads = A (x W_V + bias): without the bias they differ by a constant per channel."""
    values = (x @ site.weights().w_v).unflatten(-1, (site.weights().num_heads, -1)).transpose(1, 2)
    difference = recorder.heads[0] - recorder.attention[0].to(x.dtype) @ values
    torch.testing.assert_close(difference, difference[:1, :, :1].expand_as(difference), atol=1e-5, rtol=1e-4)


def check_site(model, *inputs, **kwargs):
    """The first attention module of a model is read as it computes."""
    sites, _ = find_sites(model)
    seen = {}

    def keep(module, args, kwargs, output):
        seen["x"] = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        seen["y"] = output[0] if isinstance(output, tuple) else output

    handle = sites[0].module.register_forward_hook(keep, with_kwargs=True)
    sites, recorders = record(model, *inputs, **kwargs)
    handle.remove()
    check_values(sites[0], recorders[0], seen["x"])
    return sites, recorders, seen


class Protocol(nn.Module):
    """What ot.nn.SpectralAttention offers: attention_weights, value_projection, num_heads."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.w = nn.Parameter(torch.randn(2, DIM, DIM, generator=torch.Generator().manual_seed(1)) / 4)
        basis = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(2))).Q
        self.register_buffer("basis", basis)
        self.register_buffer("eigenvalues", sign * torch.linspace(0.2, 1, DIM))

    def split(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def queries_and_keys(self, x):
        return [self.split(F.layer_norm(x, (DIM,)) @ w) for w in self.w]

    def attention_weights(self, x, *, attn_mask=None, is_causal=False):
        q, k = self.queries_and_keys(x)
        return reference.attention_weights(q, k, attn_mask=attn_mask, is_causal=is_causal)

    def value_projection(self):
        return self.basis, self.eigenvalues[:, None] * self.basis.mT

    def forward(self, x):
        (q, k), v = self.queries_and_keys(x), self.split(x @ self.basis)
        return ot.spectral_attention(q, k, v, self.eigenvalues, self.basis.mT.contiguous(), residual=x)
