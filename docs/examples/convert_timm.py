"""Give a timm model sharpening spectra, train a step, and put ordinary weights back."""

import timm
import torch

import overtone as ot

torch.manual_seed(0)
model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4, num_classes=10)
images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)

handle = ot.reparameterize(model, "sharpen", bounded=True, layers=[2, 3])  # in place, the last two layers
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # made afterwards: there are new parameters
loss = torch.nn.functional.cross_entropy(model(images), labels)
loss.backward()
optimizer.step()
print(*ot.spectrum.guarantees(model), sep="\n")

model.eval()
with torch.no_grad():
    converted = model(images)
    handle.restore(weights="trained")  # timm's own modules again, with what was learned
    restored = model(images)
print("largest difference", (converted - restored).abs().max().item())
assert torch.allclose(converted, restored, atol=1e-4)
