"""Does a model oversmooth, where, and why: measurements of its tokens, attention and weights."""

from overtone.analysis.analyze import analyze
from overtone.analysis.measure import METRICS, Layer
from overtone.analysis.readers import READERS, Reader, Weights
from overtone.analysis.result import Analysis
from overtone.ops.dominance import dominance, eigenvalues
from overtone.reference.dominance import Dominance, Verdict, head_weights
from overtone.reference.enclosures import Eigenvalues

__all__ = [
    "METRICS",
    "READERS",
    "Analysis",
    "Dominance",
    "Eigenvalues",
    "Layer",
    "Reader",
    "Verdict",
    "Weights",
    "analyze",
    "dominance",
    "eigenvalues",
    "head_weights",
]
