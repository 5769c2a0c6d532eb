"""Models on a GPU: CUDA graphs and Triton kernels."""
