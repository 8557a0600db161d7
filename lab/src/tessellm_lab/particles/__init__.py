"""Samples of what the members say together about a whole text: sequential Monte Carlo."""

from .generation import generate
from .sampling import EndTokens, Particles, sample, systematic

__all__ = ["EndTokens", "Particles", "generate", "sample", "systematic"]
