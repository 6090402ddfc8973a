"""Embeddings in fewer bytes: the public names of `pallas_models.sentence.quantization`."""

from pallas_models.sentence.quantization import Precision, check_precision, quantize_embeddings, ranges_of

__all__ = ["Precision", "check_precision", "quantize_embeddings", "ranges_of"]
