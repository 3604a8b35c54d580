"""The matrix square roots of many symmetric matrices, with gradients, equal eigenvalues and a broken one included."""

import torch

import overtone as ot

torch.manual_seed(0)
factors = torch.randn(1000, 16, 16, dtype=torch.float64)
matrices = factors @ factors.mT
matrices[0] = torch.eye(16)  # sixteen equal eigenvalues
matrices.requires_grad_()

values, vectors = ot.linalg.eigh(matrices)
roots = vectors * values.sqrt()[..., None, :] @ vectors.mT
roots.diagonal(dim1=-2, dim2=-1).sum().backward()  # torch.linalg.eigh gives NaN for the first matrix
expected = torch.linalg.inv(roots.detach()) / 2  # d tr √A = tr(A^(−1/2) dA) / 2
print("largest error of the gradient", (matrices.grad - expected).abs().max().item())
assert torch.allclose(matrices.grad, expected)

broken = matrices.detach().clone()
broken[7, 3, 3] = torch.nan
result = ot.linalg.eigh_ex(broken)  # an info per matrix; eigh would raise and name matrix 7
print("not solved:", result.info.nonzero().flatten().tolist())
assert result.info.nonzero().tolist() == [[7]]
