"""Do the members speak the same tokens? Align ids that are permuted or padded, exactly; refuse anything else."""

from .agreement import Vocabulary, agree
from .alignment import Alignment
from .member_tokens import MemberTokens

__all__ = [
    "Alignment",
    "MemberTokens",
    "Vocabulary",
    "agree",
]
