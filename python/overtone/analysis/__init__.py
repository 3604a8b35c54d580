"""Does a model oversmooth, where, and why: measurements of its tokens, attention and weights."""

from overtone.analysis.spectral_dominance import dominance
