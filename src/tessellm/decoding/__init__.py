"""The fast path: many sequences at once, token ids only. Every path is pinned to model.py by an equality test."""
