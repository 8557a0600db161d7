"""Trigonometric proofs: expressions, proofs and their checker, problems, symbolic and trained provers."""
