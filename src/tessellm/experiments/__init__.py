"""Experiments: a folder each; what they share stands beside the folders. The library imports none of them."""
