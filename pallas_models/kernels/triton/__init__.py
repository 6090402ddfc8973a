"""Kernels for Pallas's Triton GPU backend: NVIDIA GPUs from Ampere on."""
