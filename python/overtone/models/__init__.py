"""Models with a regime per layer: Vision Transformers, and decoder language models."""

from overtone.models.blocks import Block
from overtone.models.cache import TokenCache
from overtone.models.config import HEAD_METHODS, METHODS, GPTConfig, TransformerConfig, ViTConfig
from overtone.models.files import load, save
from overtone.models.gpt import GPT, gpt
from overtone.models.vit import VisionTransformer, vit_base, vit_small, vit_tiny

__all__ = [
    "GPT",
    "HEAD_METHODS",
    "METHODS",
    "Block",
    "GPTConfig",
    "TokenCache",
    "TransformerConfig",
    "ViTConfig",
    "VisionTransformer",
    "gpt",
    "load",
    "save",
    "vit_base",
    "vit_small",
    "vit_tiny",
]
