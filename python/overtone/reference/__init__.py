"""The specification: every function of overtone in plain PyTorch, readable as the papers' formulas."""

from overtone.reference import dominance, linalg, spectrum
from overtone.reference.attention import attention_weights, spectral_attention
from overtone.reference.frequency import de_escalate, frequency_components, frequency_filter, frequency_norms
from overtone.reference.linear import linear, mlp
from overtone.reference.metrics import (
    cosine_similarity,
    effective_rank,
    escalation_rate,
    spectral_gap,
    stable_rank,
    token_diversity,
    token_similarity,
)

analysis = dominance  # where ot.analysis.dominance is mirrored

__all__ = [
    "attention_weights",
    "cosine_similarity",
    "de_escalate",
    "dominance",
    "effective_rank",
    "escalation_rate",
    "frequency_components",
    "frequency_filter",
    "frequency_norms",
    "linalg",
    "linear",
    "mlp",
    "spectral_attention",
    "spectral_gap",
    "spectrum",
    "stable_rank",
    "token_diversity",
    "token_similarity",
]
