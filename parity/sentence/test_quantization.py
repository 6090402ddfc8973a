"""Embeddings of a byte or a bit a dimension: the values of sentence-transformers."""

import numpy as np
import pytest

from pallas_models.quantization import quantize_embeddings, ranges_of

EMBEDDINGS = np.random.default_rng(0).normal(size=(150, 20)).astype(np.float32)
EMBEDDINGS[:, 3] = 0.25  # a dimension without a range


@pytest.mark.parametrize("precision", ["float32", "int8", "uint8", "binary", "ubinary"])
@pytest.mark.parametrize("given", [False, True], ids=["own-ranges", "ranges"])
def test_against_sentence_transformers(precision, given):
    module = pytest.importorskip("sentence_transformers.util.quantization")
    ranges = ranges_of(EMBEDDINGS[:100] * 0.5) if given else None
    expected = module.quantize_embeddings(EMBEDDINGS, precision=precision, ranges=ranges)
    found = quantize_embeddings(EMBEDDINGS, precision, ranges=ranges)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_bytes_follow_the_values():
    """Without sentence-transformers: the ends of a range are the ends of the type, and a bit is a sign."""
    x = np.array([[0.0, -255.0], [255.0, 255.0], [127.5, 0.0]], np.float32)  # steps of 1 and 2
    np.testing.assert_array_equal(quantize_embeddings(x, "uint8"), [[0, 0], [255, 255], [127, 127]])
    np.testing.assert_array_equal(quantize_embeddings(x, "int8"), [[-128, -128], [127, 127], [-1, -1]])
    np.testing.assert_array_equal(quantize_embeddings(10 * x, "uint8", ranges=ranges_of(x))[2], [255, 127])
    np.testing.assert_array_equal(quantize_embeddings(x, "ubinary"), [[0], [0b11000000], [0b10000000]])
    np.testing.assert_array_equal(quantize_embeddings(x, "binary"), [[-128], [64], [0]])
    assert quantize_embeddings(x[:0], "int8").shape == (0, 2)


def test_errors():
    with pytest.raises(ValueError, match="precision='int4' is unknown; expected one of"):
        quantize_embeddings(EMBEDDINGS, "int4")
    with pytest.raises(ValueError, match="embeddings has 1 rows; expected at least 2"):
        quantize_embeddings(EMBEDDINGS[:1], "int8")
    with pytest.raises(ValueError, match=r"ranges has shape \(2, 5\); expected \(2, 20\)"):
        quantize_embeddings(EMBEDDINGS, "int8", ranges=np.zeros((2, 5)))
