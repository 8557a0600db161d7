"""Steps captured as CUDA graphs, rules compiled, members fused into few kernels."""
