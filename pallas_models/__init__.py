"""Hand-written Pallas GPU kernels and the models made from them."""

from pallas_models import minilm, ops

__all__ = ["minilm", "ops"]
__version__ = "0.1.0"
