"""Other people's models: timm's ViT and DeiT, Hugging Face's ViT, DeiT, BERT and GPT-2."""

from overtone.foreign.convert import Handle, reparameterize

__all__ = ["Handle", "reparameterize"]
