"""Experiments: one folder each; what they share is in lab/. The library imports none of them."""
