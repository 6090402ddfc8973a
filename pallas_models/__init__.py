"""Hand-written Pallas GPU kernels and the models made from them."""

from pallas_models import minilm, ops, trimul

__all__ = ["minilm", "ops", "trimul"]
__version__ = "0.1.0"
