"""The paper's theory as running code: exact laws, definitions as measurements, theorems as errors.

sequences    laws of all sequences of a small vocabulary, in float64
operators    Eq. 2 step by step, and C, normalised once
definitions  how far from Definitions 1–5, and where
families     random laws that satisfy the hypotheses, exactly or up to ε
theorems     what must be zero, and the approximate version with its bounds
sampled      the same checks on texts, for models that cannot be enumerated
"""

from .definitions import (
    Gap,
    disjoint_coordinates,
    factorized,
    find_partition,
    jointly_factorizable,
    projective,
    skill_factorizable,
)
from .operators import once, stepwise

__all__ = [
    "Gap",
    "disjoint_coordinates",
    "factorized",
    "find_partition",
    "jointly_factorizable",
    "once",
    "projective",
    "skill_factorizable",
    "stepwise",
]
