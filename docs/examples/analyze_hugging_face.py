"""Does a Hugging Face model oversmooth? A small random ViT; a pretrained one is analyzed the same way."""

import torch
from transformers import ViTConfig, ViTModel

import overtone as ot

torch.manual_seed(0)
config = ViTConfig(
    hidden_size=48, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
)
model = ViTModel(config)  # or ViTModel.from_pretrained(…)
analysis = ot.analysis.analyze(model, torch.randn(8, 3, 32, 32), name="ViT")  # or a DataLoader

print(analysis.layer_table().text())
print("HFC/LFC over depth", [round(value, 3) for value in analysis.curve("ratio").mean(1).tolist()])
print("which eigenvalue dominates", analysis.verdicts())
# analysis.save("report") writes the page, a PNG per figure and a CSV per table: pip install 'overtone[report]'
assert len(analysis.layers) == 4 and not analysis.skipped
