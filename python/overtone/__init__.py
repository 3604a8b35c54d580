"""Fused kernels that steer a Transformer's smoothing through its eigenspectrum."""

from importlib.metadata import version as _version

from overtone import analysis, linalg, models, nn, reference, spectrum
from overtone.backends import BackendError, backends, use_backend
from overtone.integrations import reparameterize
from overtone.ops import flops as _flops  # noqa: F401  (the counts of all ops, for torch's FlopCounterMode)
from overtone.ops.attention import spectral_attention
from overtone.ops.frequency import de_escalate, frequency_filter, frequency_norms
from overtone.ops.metrics import (
    cosine_similarity,
    effective_rank,
    escalation_rate,
    stable_rank,
    token_diversity,
    token_similarity,
)
from overtone.types import FrequencyNorms, Spectrum

__version__ = _version("overtone")

__all__ = [
    "BackendError",
    "FrequencyNorms",
    "Spectrum",
    "analysis",
    "backends",
    "cosine_similarity",
    "de_escalate",
    "effective_rank",
    "escalation_rate",
    "frequency_filter",
    "frequency_norms",
    "linalg",
    "models",
    "nn",
    "reference",
    "reparameterize",
    "spectral_attention",
    "spectrum",
    "stable_rank",
    "token_diversity",
    "token_similarity",
    "use_backend",
]
