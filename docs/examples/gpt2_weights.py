"""A GPT-2 of Hugging Face, here one with random weights, as a model of overtone."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import overtone as ot

config = GPT2Config(vocab_size=100, n_positions=32, n_embd=48, n_layer=3, n_head=3, bos_token_id=0, eos_token_id=0)
original = GPT2LMHeadModel(config).eval()
model = ot.models.GPT.from_hf(original)

tokens = torch.randint(100, (2, 32))
logits, norms = model(tokens, return_norms=True)
torch.testing.assert_close(logits, original(tokens).logits, rtol=1e-4, atol=1e-4)
print("‖HFC‖/‖LFC‖ after each layer's attention:", norms.ratio.mean(1).tolist())

written = model.generate(tokens[:, :4], max_new_tokens=8, temperature=0)
assert written.shape == (2, 12)
