"""Members that run together: stacked into groups, with low-rank deltas, over slots of keys and values."""
