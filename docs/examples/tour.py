"""A tour in under a minute on two cores: watch tokens blur, stop it, train, and ask a finished model."""

import time

import torch
from torch import nn

import overtone as ot

start = time.perf_counter()
torch.manual_seed(0)

print("1. Attention smooths. LFC repeats the mean token, HFC is the rest; twelve times softmax attention:")
x = torch.randn(1, 65, 64)
ratios = []
for _ in range(12):
    q, k, v = (x.unflatten(-1, (4, 16)).transpose(1, 2) for _ in range(3))
    x = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    ratios.append(ot.frequency_norms(x).ratio.item())
print("   HFC/LFC", *(f"{ratio:.1e}" for ratio in ratios[::3]))

print("2. The eigenvalues of the value-projection weight decide. One op: attention, V Λ Vᵀ, residual and norms:")
basis, _ = ot.linalg.qr(torch.randn(64, 64))
x = torch.randn(1, 65, 64)
q, k, v = (t.unflatten(-1, (4, 16)).transpose(1, 2) for t in (x, x, x @ basis))
for name, sign in (("smooth", 1.0), ("sharpen", -1.0)):
    y, norms = ot.spectral_attention(q, k, v, sign * torch.rand(64), basis.mT, residual=x, return_norms=True)
    print(f"   {name:8} {ot.frequency_norms(x).ratio.item():.2f} → {norms.ratio.item():.2f}")

print("3. A model that cannot smooth, trained for a few steps; its norms come with the logits:")
model = ot.models.vit_tiny(16, 4, num_classes=4, regime="sharpen", bounded=True, depth=4)
labels = torch.arange(4).repeat(16)
patterns = torch.randn(4, 3, 16, 16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(21):
    logits, norms = model(patterns[labels] + 0.5 * torch.randn(64, 3, 16, 16), return_norms=True)
    loss = nn.functional.cross_entropy(logits, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"   step {step:2} loss {loss.item():.3f}  HFC/LFC", *(f"{r:.2f}" for r in norms.ratio.mean(1).tolist()))
print("  ", *ot.spectrum.guarantees(model)[:1])

print("4. Any model can be asked: does it oversmooth, and why?")
layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
print(ot.analysis.analyze(encoder, torch.randn(8, 17, 32)))

print(f"{time.perf_counter() - start:.0f} s. Next: `overtone study`, or your own model in ot.analysis.analyze.")
