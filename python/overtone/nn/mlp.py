"""The MLP of a Transformer block, in chunks of tokens.

On a CPU a large part of a plain MLP's time goes into memory: the hidden tensor, four times as wide as the tokens, is
allocated, written and read again for the first product, for GELU, and for each of their gradients. Here only the first
product's result is kept. Everything else lives in buffers of one chunk, which stay in the cache; GELU is computed again
in backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.ops.library import differentiable_gradient

__all__ = ["Mlp"]

# Hidden values of a chunk, 4 MB in float32: smaller ones make the products slower, larger ones leave the cache.
CHUNK = 1 << 20


class Mlp(nn.Module):
    """fc2(GELU(fc1(x)))."""

    def __init__(self, dim: int, hidden: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden, device=device, dtype=dtype)
        self.fc2 = nn.Linear(hidden, dim, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if _runs_in_chunks(x):
            return _ChunkedMlp.apply(x, self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias)[0]
        return self.fc2(F.gelu(self.fc1(x)))


def _runs_in_chunks(x: Tensor) -> bool:
    """Where it pays: in training, eagerly, on the CPU. Compilers fuse GELU themselves, and autocast chooses dtypes."""
    return (
        torch.is_grad_enabled()
        and x.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


def _mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


class _ChunkedMlp(torch.autograd.Function):
    """With a = GELU(h), h = x W₁ᵀ + b₁ and G = ∂y: ∂W₂ = Gᵀ a, ∂h = (G W₂) GELU'(h), ∂W₁ = ∂hᵀ x, ∂x = ∂h W₁."""

    @staticmethod
    def forward(x, w1, b1, w2, b2):
        tokens = x.reshape(-1, x.shape[-1])
        hidden = x.new_empty(tokens.shape[0], w1.shape[0])
        y = x.new_empty(tokens.shape[0], w2.shape[0])
        active = hidden.new_empty(_chunk_rows(w1), w1.shape[0])
        for x_part, h_part, y_part in _chunks(w1, tokens, hidden, y):
            torch.addmm(b1, x_part, w1.t(), out=h_part)
            a = active[: len(h_part)]
            torch.ops.aten.gelu.out(h_part, out=a)
            torch.addmm(b2, a, w2.t(), out=y_part)
        return y.view(*x.shape[:-1], w2.shape[0]), hidden

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx, grad_y, _grad_hidden):
        x, w1, b1, w2, b2, hidden = ctx.saved_tensors
        if grad_y is None:
            return (None,) * 5
        if torch.is_grad_enabled():
            return differentiable_gradient(_mlp, (x, w1, b1, w2, b2), (grad_y,))
        tokens, grads = x.reshape(-1, x.shape[-1]), grad_y.reshape(-1, grad_y.shape[-1])
        grad_x = torch.empty_like(tokens)
        dw1, db1, dw2 = (torch.zeros_like(p) for p in (w1, b1, w2))
        active, upstream = (hidden.new_empty(_chunk_rows(w1), w1.shape[0]) for _ in range(2))
        for x_part, h_part, g_part, dx_part in _chunks(w1, tokens, hidden, grads, grad_x):
            a, dh = active[: len(h_part)], upstream[: len(h_part)]
            torch.ops.aten.gelu.out(h_part, out=a)
            dw2.addmm_(g_part.t(), a)
            torch.mm(g_part, w2, out=dh)
            torch.ops.aten.gelu_backward.grad_input(dh, h_part, grad_input=dh)
            dw1.addmm_(dh.t(), x_part)
            db1.add_(dh.sum(0))
            torch.mm(dh, w1, out=dx_part)
        return grad_x.view(x.shape), dw1, db1, dw2, grads.sum(0)


def _chunk_rows(w1: Tensor) -> int:
    return max(1, CHUNK // w1.shape[0])


def _chunks(w1: Tensor, *tensors: Tensor):
    """The tensors' rows, a chunk at a time."""
    return zip(*(tensor.split(_chunk_rows(w1)) for tensor in tensors), strict=True)
