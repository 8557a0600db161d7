"""Speculation: drafts that all members verify in one pass, so that a pass brings several tokens instead of one."""

from .speculation import Speculation

__all__ = ["Speculation"]
