"""Shares with their uncertainty."""

from math import sqrt


def share(right: int, of: int, z: float = 1.96) -> dict[str, float]:
    """A proportion with its Wilson interval (95 % for the default z)."""
    p, n = right / of, of
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return {"share": p, "low": max(0.0, middle - half), "high": min(1.0, middle + half), "of": n}
