"""A self-attention block of your own on ot.spectral_attention: the projection, residual and norms are in the op."""

import torch
from torch import nn

import overtone as ot


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qk = nn.Linear(dim, 2 * dim)
        self.spectrum = ot.spectrum.SymmetricSpectrum(dim, "sharpen", bounded=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ot.FrequencyNorms]:
        basis_in, eigenvalues, basis_out = self.spectrum()
        inputs = self.norm(x)
        packed = torch.cat((self.qk(inputs), inputs @ basis_in), -1)
        query, key, value = packed.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # views, no copies
        return ot.spectral_attention(query, key, value, eigenvalues, basis_out, residual=x, return_norms=True)


torch.manual_seed(0)
model = Attention(dim=64, heads=4)
y, norms = model(torch.randn(8, 50, 64))
(y.square().mean() - norms.ratio.mean()).backward()  # the norms are differentiable too
print("HFC/LFC", norms.ratio.mean().item())
assert all(parameter.grad is not None for parameter in model.parameters())
