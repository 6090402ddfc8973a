"""Hand-written Pallas GPU kernels and the models made from them."""

from pallas_models import gpt2, minilm, ops, qwen3, training, trimul

__all__ = ["gpt2", "minilm", "ops", "qwen3", "training", "trimul"]
__version__ = "0.1.0"
