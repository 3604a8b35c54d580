"""Methods of the field that act on attention heads (math.md §3): what each makes of A V, before the projection.

Two places are theirs. `before` may change the values, and gives the gain and addend of O = gain · A V + addend, which
the fused op takes. `after` sees O itself: methods that have one cost one more product of the heads' size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone import _validate as validate
from overtone.ops.attention import QKV

__all__ = ["AttInv", "GatedHeads", "GraphFilter", "HeadMethod", "LaplacianHeads", "ValueResidual", "XSA"]

Attend = Callable[[QKV], Tensor]  # A V of every head, [B, H, N, D]


class HeadMethod(nn.Module):
    """A method of attention's heads: by itself O = A V."""

    reads_values_0 = False  #: whether `before` wants V⁰, the values of the first layer
    has_after = False  #: whether `after` does anything

    def before(
        self, qkv: QKV, values_0: Tensor | None, attend: Attend
    ) -> tuple[QKV, Tensor | None, Tensor | None]:  # fmt: skip
        """query, key and value of the op, gain [H] and addend [B, H, N, D] of its heads."""
        return qkv, None, None

    def after(self, heads: Tensor, value: Tensor, tokens: Any) -> Tensor:
        """What O [B, H, N, D] becomes; `value` are the tokens' own, `tokens` [B, N, dim] attention's input."""
        return heads


class LaplacianHeads(HeadMethod):
    """V_h − A_h V_h in the last heads, a share of all (arXiv 2602.09297)."""

    is_laplacian: Tensor

    def __init__(self, num_heads: int, share: float = 0.5, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not 0 <= share <= 1:
            raise ValueError(f"LaplacianHeads: share: got {share}, wanted 0 to 1")
        chosen = torch.arange(num_heads, device=device) >= num_heads - round(share * num_heads)
        self.register_buffer("is_laplacian", chosen, persistent=False)

    def before(self, qkv: QKV, values_0: Tensor | None, attend: Attend):
        value = own_values(qkv)
        chosen = self.is_laplacian.to(validate.accumulate_dtype(value.dtype))
        return qkv, 1 - 2 * chosen, value * chosen.to(value.dtype)[:, None, None]


class ValueResidual(HeadMethod):
    """Values mixed with the first layer's, V ← (1−γ)V + γV⁰."""

    reads_values_0 = True

    def __init__(self, gamma: float = 0.5) -> None:
        super().__init__()
        self.gamma = float(gamma)

    def before(self, qkv: QKV, values_0: Tensor | None, attend: Attend):
        if values_0 is None:
            return qkv, None, None
        if values_0.shape != qkv.value.shape:
            got, wanted = list(values_0.shape), list(qkv.value.shape)
            raise ValueError(f"ValueResidual: values_0: got shape {got}, wanted that of the values, {wanted}")
        return QKV(qkv.query, qkv.key, torch.lerp(qkv.value, values_0.to(qkv.value.dtype), self.gamma)), None, None


class GraphFilter(HeadMethod):
    """GFSA (Choi et al. 2024): w₀V + u + w_K [u + (K−1)(A u − u)] with u = A V: two calls of the op."""

    def __init__(self, num_heads: int, order: int = 3, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.order = validate.count("GraphFilter", "order", order)
        self.w_0 = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))
        self.w_k = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def before(self, qkv: QKV, values_0: Tensor | None, attend: Attend):
        if qkv.query.shape[2] != qkv.key.shape[2]:
            got = f"{qkv.query.shape[2]} queries and {qkv.key.shape[2]} keys"
            raise ValueError(f"GraphFilter: got {got}, wanted as many: A is applied twice, so it has no cache")
        u = attend(qkv)
        dtype = validate.accumulate_dtype(u.dtype)
        w_0, w_k = (w.to(dtype)[:, None, None] for w in (self.w_0, self.w_k))
        addend = w_0 * qkv.value + (1 + w_k * (2 - self.order)) * u
        return QKV(qkv.query, qkv.key, u), (self.order - 1) * self.w_k.to(dtype), addend


class XSA(HeadMethod):
    """y − α (y·v̂) v̂ for every token and head, v̂ = v/‖v‖ its own value, α = tanh(a) per head (arXiv 2603.09078)."""

    has_after = True

    def __init__(self, num_heads: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def after(self, heads: Tensor, value: Tensor, tokens: Any) -> Tensor:
        direction = F.normalize(value, dim=-1)
        shadow = (heads * direction).sum(-1, keepdim=True) * direction
        return heads - self.a.tanh().to(heads.dtype)[:, None, None] * shadow


class GatedHeads(HeadMethod):
    """heads ⊙ σ(x W_g), elementwise (gated attention, NeurIPS 2025)."""

    has_after = True

    def __init__(self, dim: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim, bias=False, device=device, dtype=dtype)

    def after(self, heads: Tensor, value: Tensor, tokens: Any) -> Tensor:
        gate = self.gate(tokens).sigmoid().unflatten(-1, (heads.shape[1], -1)).transpose(1, 2)
        return heads * gate.to(heads.dtype)


class AttInv(HeadMethod):
    """FDAM's attention inversion (ICCV 2025) for x = A V and its complement h = V − x, which a low pass leaves out.

    x + γ_l tanh(l) x + γ_h g h with g = 2s²/(s² + 0.3678) and s = softplus(t); l and t are linear in the token, one
    number per head, and γ_l, γ_h learned numbers, 1e-5 at first.
    """

    has_after = True

    def __init__(self, dim: int, num_heads: int, *, device=None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weights = nn.Linear(dim, 2 * num_heads, device=device, dtype=dtype)
        self.gammas = nn.Parameter(torch.full((2,), 1e-5, device=device, dtype=dtype))

    def after(self, heads: Tensor, value: Tensor, tokens: Any) -> Tensor:
        low, high = self.weights(tokens).transpose(1, 2)[..., None].chunk(2, dim=1)  # [B, H, N, 1]
        squared = F.softplus(high).square()
        gain = 2 * squared / (squared + 0.3678)
        gamma_low, gamma_high = self.gammas
        mixed = heads + gamma_low * low.tanh() * heads + gamma_high * gain * (value - heads)
        return mixed.to(heads.dtype)


def own_values(qkv: QKV) -> Tensor:
    """The values of the queries' own tokens: with a cache the last ones."""
    return qkv.value[:, :, qkv.value.shape[2] - qkv.query.shape[2] :]
