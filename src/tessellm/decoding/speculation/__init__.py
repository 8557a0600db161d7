"""Speculation: drafts that all members verify in one pass, so that a pass brings several tokens instead of one.

engine = Engine(model, speculation=Speculation("lookup"))          # or "member:base", "belief", "none"
"""

from .who import Speculation

__all__ = ["Speculation"]
