"""Do the members speak the same tokens? Align ids that are permuted or padded, exactly; refuse anything else."""

from .agreement import Vocabulary, agree
from .alignment import Alignment
from .speakers import Speaker

__all__ = [
    "Alignment",
    "Speaker",
    "Vocabulary",
    "agree",
]
