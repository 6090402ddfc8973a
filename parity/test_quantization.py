"""Embeddings in fewer bytes, against the formulas of sentence-transformers."""

import numpy as np
import pytest

from pallas_models.quantization import PRECISIONS, find_ranges, quantize


@pytest.fixture
def embeddings() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(200, 48)).astype(np.float32)


def test_steps(embeddings):
    """uint8 counts the steps that lie below a value, of 255 that the dimension is divided into."""
    least, greatest = find_ranges(embeddings)
    exact = 255 * (embeddings.astype(float) - least) / (greatest.astype(float) - least)
    # float32 rounds both differences, the step and the quotient, each by 2**-24 of itself; exact is 255 at most.
    bound = 255 * 4 * 2.0**-24
    found = quantize(embeddings, "uint8")
    assert found.dtype == np.uint8 and found.min() == 0 and found.max() >= 254
    assert np.all(found <= exact + bound) and np.all(found > exact - 1 - bound)
    signed = quantize(embeddings, "int8")
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(signed, found.astype(int) - 128)


def test_bits(embeddings):
    found = quantize(embeddings, "ubinary")
    assert found.shape == (200, 6) and found.dtype == np.uint8
    np.testing.assert_array_equal(np.unpackbits(found, axis=1), embeddings > 0)
    signed = quantize(embeddings, "binary")
    assert signed.dtype == np.int8
    np.testing.assert_array_equal(signed, found.astype(int) - 128)
    odd = quantize(embeddings[:, :43], "ubinary")
    np.testing.assert_array_equal(np.unpackbits(odd, axis=1, count=43), embeddings[:, :43] > 0)


def test_floats(embeddings):
    for precision in ("float32", "float16"):
        found = quantize(embeddings, precision)
        assert found.dtype == precision
        np.testing.assert_array_equal(found, embeddings.astype(precision))


@pytest.mark.parametrize("precision", sorted(set(PRECISIONS) - {"float16"}))
def test_against_sentence_transformers(embeddings, precision):
    theirs = pytest.importorskip("sentence_transformers").quantize_embeddings(embeddings, precision)
    np.testing.assert_array_equal(quantize(embeddings, precision), theirs)


def test_ranges_are_kept_and_what_is_beyond_is_clipped(embeddings):
    """Whatever else is quantized beside it, a value keeps its code."""
    ranges = find_ranges(embeddings[:50])
    for precision, low in (("uint8", 0), ("int8", -128)):
        whole = quantize(embeddings, precision, ranges)
        np.testing.assert_array_equal(whole[:50], quantize(embeddings[:50], precision))
        assert np.all(whole[embeddings <= ranges[0]] == low)
        assert np.all(whole[embeddings > ranges[1]] == low + 255)


def test_a_dimension_that_spans_nothing(embeddings):
    embeddings[:, 3] = 0.25
    assert np.all(quantize(embeddings, "uint8")[:, 3] == 0) and np.all(quantize(embeddings, "int8")[:, 3] == -128)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_rows(precision):
    found = quantize(np.empty((0, 48), np.float32), precision)
    assert found.shape == (0, 6 if precision.endswith("binary") else 48)


def test_refused(embeddings):
    for precision, ranges, message in [
        ("int4", None, "precision='int4'; expected one of float32"),
        ("int8", np.zeros((2, 47)), r"ranges have shape \(2, 47\); expected \(2, 48\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            quantize(embeddings, precision, ranges)
    with pytest.raises(ValueError, match="at least one row"):
        find_ranges(embeddings[:0])
