"""Modules: attention with a spectrum, and the filters and norms that go with it."""

from overtone.nn import plain  # noqa: F401  ot.spectrum.fold asks it
from overtone.nn.attention import SpectralAttention
from overtone.nn.filters import ContraNorm, DeEscalation, FeatScale
from overtone.nn.norms import SignedLayerNorm

__all__ = ["ContraNorm", "DeEscalation", "FeatScale", "SignedLayerNorm", "SpectralAttention"]
