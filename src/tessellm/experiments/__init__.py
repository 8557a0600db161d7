"""Experiments: one file each. The library imports none of them."""
