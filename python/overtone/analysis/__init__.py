"""Does a model oversmooth, where, and why: measurements of its tokens, attention and weights."""

from overtone.analysis.measure import METRICS, Layer
from overtone.analysis.readers import READERS, Reader, Weights
from overtone.analysis.result import Analysis
from overtone.analysis.runner import analyze
from overtone.analysis.spectral_dominance import dominance, eigenvalues
from overtone.reference.analysis import Dominance, Verdict, head_weights
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
