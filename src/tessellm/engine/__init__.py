"""The fast path: many sequences at once, token ids only. Equality tests hold every path to the reference model."""
