"""Weights from a development set: by the likelihood of its texts, or by the score on its problems."""
