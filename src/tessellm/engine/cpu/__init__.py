"""Decode steps on a CPU without Hugging Face's modules: packed products, and few operations beside them."""
