"""The rule `evidence`: Eq. 2 while the members are compatible, one owner at a time where they are not."""

from .rule import Evidence
from .table import ENTRY
from .termination import POLICIES, Stopping

__all__ = ["ENTRY", "POLICIES", "Evidence", "Stopping"]
