"""Composed outputs against merged weights, as fine-tuning goes on."""
