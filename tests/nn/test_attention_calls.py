"""One attention op per layer and direction, whatever the method, the regime and the precision."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import overtone as ot
from overtone.models.config import HEAD_METHODS, METHODS

pytestmark = pytest.mark.usefixtures("cpu_kernels")

DEPTH = 3
FORWARD, BACKWARD = "spectral_attention_qkvpacked", "spectral_attention_qkvpacked_backward"


class Calls(TorchDispatchMode):
    """Counts attention, ours and torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "attention" in op._opname or op._opname in ("_softmax", "_softmax_backward_data"):
            self.seen[op._opname] += 1
        return op(*args, **(kwargs or {}))


def count(model: nn.Module, autocast: bool, **options) -> Counter[str]:
    images = torch.randn(4, 3, 16, 16)
    with Calls() as calls:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            outputs = model(images, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(y.float().sum() for y in (outputs[0], *(outputs[1] if len(outputs) > 1 else ()))).backward()
    return calls.seen


def vit(**options) -> nn.Module:
    return ot.models.vit_tiny(16, 8, num_classes=3, depth=DEPTH, **options)


@pytest.mark.parametrize("method", METHODS | HEAD_METHODS)
@pytest.mark.parametrize("autocast", [False, True])
class TestOneCallPerLayerAndDirection:
    def check(self, seen: Counter[str], method: str) -> None:
        # ContraNorm has a softmax of its own, over the block's result.
        own = ("_softmax", "_softmax_backward_data") if method == "contranorm" else ()
        found = {name: n for name, n in seen.items() if name not in own}
        if method == "value_residual":  # mixed values are no views of a packed tensor
            assert found == {"spectral_attention": DEPTH, "spectral_attention_backward": DEPTH}
        elif method == "gfsa":  # attention twice, the second time of what the first gave
            both = {"spectral_attention": DEPTH, "spectral_attention_backward": DEPTH}
            assert found == {FORWARD: DEPTH, BACKWARD: DEPTH} | both
        else:
            assert found == {FORWARD: DEPTH, BACKWARD: DEPTH}

    @pytest.mark.parametrize("regime", ["free", "sharpen"])
    @pytest.mark.parametrize("return_norms", [False, True])
    def test_model(self, method, autocast, regime, return_norms):
        self.check(count(vit(method=method, regime=regime), autocast, return_norms=return_norms), method)

    def test_stochastic_depth(self, method, autocast):
        self.check(count(vit(method=method, drop_path=0.4), autocast, return_norms=True), method)


class TestStochasticDepth:
    def test_is_what_it_says(self):
        """x + f · attention(x), f from the same draws."""
        torch.manual_seed(0)
        block = vit(drop_path=0.5, regime="sharpen").blocks[-1].train()
        x = torch.randn(6, 5, 192)
        torch.manual_seed(1)
        y, norms = block(x, return_norms=True)
        torch.manual_seed(1)
        attention, mlp = (torch.empty(6).bernoulli_(0.5).div_(0.5)[:, None, None] for _ in range(2))
        middle = x + attention * block.attn(block.norm1(x))
        torch.testing.assert_close(y, middle + mlp * block.mlp(block.norm2(middle)))
        torch.testing.assert_close(norms, ot.reference.frequency_norms(middle))

    def test_everything_dropped(self):
        block = vit(drop_path=1.0).blocks[-1].train()
        x = torch.randn(2, 5, 192)
        assert torch.equal(block(x)[0], x)


class TestMethods:
    """Every method as its formula says, in plain PyTorch, forward and backward."""

    def parts(self, attn: ot.nn.SpectralAttention, x: torch.Tensor, mask=None, is_causal=False):
        query, key, value = attn.project(x)[:3]
        if is_causal:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            mask = causal if mask is None else mask & causal
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        attended = torch.ones(1, x.shape[1], dtype=x.dtype) if mask is None else mask.to(x.dtype)
        mean = (attended / attended.sum(-1, keepdim=True)).to(x.dtype) @ value
        return heads, value, mean

    def check(self, attn, x, heads_of, values_0=None, **masks):
        residual, scale = torch.randn_like(x), torch.tensor([0.5, 2.0], dtype=x.dtype)
        options = {"values_0": values_0, "is_causal": masks.get("is_causal", False), "attn_mask": masks.get("mask")}
        y = attn(x, residual=residual, sample_scale=scale, **options)
        w_proj = attn.value_projection()[1]
        bias = attn._output_bias()
        update = heads_of(*self.parts(attn, x, **masks)).transpose(1, 2).flatten(2) @ w_proj
        expected = residual + scale[:, None, None] * (update if bias is None else update + bias)
        torch.testing.assert_close(y, expected)
        leaves = [x, *attn.parameters()]
        weights = torch.randn_like(y)
        ours, theirs = (torch.autograd.grad(z, leaves, weights, allow_unused=True) for z in (y, expected))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(*(torch.zeros(()) if g is None else g for g in (a, b)))

    @pytest.mark.parametrize("regime", ["free", "sharpen"])
    @pytest.mark.parametrize("masks", [{}, {"is_causal": True}, {"mask": True}, {"mask": True, "is_causal": True}])
    @pytest.mark.parametrize("method", ["head_gain", "centered", "neutreno", "all"])
    def test_attention(self, regime, masks, method):
        torch.manual_seed(0)
        options = {"head_gain": True, "centered": True, "neutreno": 0.6}
        options = options if method == "all" else {method: options[method]}
        attn = ot.nn.SpectralAttention(12, 3, regime, proj_bias=True, **options).double()
        for parameter in attn.parameters():  # nothing is zero, nor one
            nn.init.normal_(parameter, std=0.5)
        x = torch.randn(2, 7, 12, dtype=torch.float64, requires_grad=True)
        if masks.get("mask"):
            masks = {**masks, "mask": (torch.rand(2, 1, 7, 7) > 0.4) | torch.eye(7, dtype=torch.bool)}
        first = torch.randn(2, 3, 7, 4, dtype=torch.float64)
        omega = attn.head_gain[:, None, None] if "head_gain" in options else 0
        center, gamma = options.get("centered", False), options.get("neutreno", 0)

        def heads_of(heads, value, mean):
            return (1 + omega) * (heads - center * mean) - omega * mean * (not center) + gamma * (first - value)

        self.check(attn, x, heads_of, first, **masks)


class TestAutocast:
    @pytest.mark.parametrize("regime", ["free", "sharpen"])
    def test_the_residual_stream_stays_float32(self, regime):
        block = vit(regime=regime).blocks[0]
        x = torch.randn(2, 5, 192)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y, norms = block(x, return_norms=True)
        assert y.dtype == torch.float32 and norms.low.dtype == torch.float32

    def test_a_replaced_projection_is_called(self):
        attn = ot.nn.SpectralAttention(12, 3, "free")
        called = []
        attn.proj.register_forward_hook(lambda *_: called.append(1))
        x = torch.randn(2, 5, 12)
        residual, scale = torch.randn(2, 5, 12), torch.tensor([0.0, 2.0])
        y = attn(x, residual=residual, sample_scale=scale)
        assert called
        attn.proj._forward_hooks.clear()
        torch.testing.assert_close(y, attn(x, residual=residual, sample_scale=scale))
