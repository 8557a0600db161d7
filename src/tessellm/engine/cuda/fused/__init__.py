"""Decoding steps as few Triton kernels, for the common decoder architectures on a GPU. Others run on their modules."""
