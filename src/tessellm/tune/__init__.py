"""Weights of Eq. 2 from a development set, by the likelihood of its texts."""
