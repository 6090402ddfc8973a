"""Kernels for Pallas's Mosaic GPU backend: NVIDIA Hopper GPUs (compute capability 9.0)."""
