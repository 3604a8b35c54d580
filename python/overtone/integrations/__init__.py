"""Other people's models: timm's ViT and DeiT, Hugging Face's ViT, DeiT, BERT and GPT-2."""

from overtone.integrations import huggingface, timm  # their adapters register themselves
from overtone.integrations.attention_interface import register_hf_attention
from overtone.integrations.reparameterize import Handle, reparameterize
from overtone.integrations.timm import timm_attention

__all__ = ["Handle", "register_hf_attention", "reparameterize", "timm_attention"]
