"""Parity suite: every op and model against a reference written in torch."""

from pathlib import Path

ROOT = Path(__file__).parents[1]  # of the checkout
# Of a process that compiles for GPUs which are not here: it has none, and JAX's CUDA plugin asks for none.
COMPILES_ALONE = {"CUDA_VISIBLE_DEVICES": "", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
