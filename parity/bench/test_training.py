"""Training curves: a small GPT-2 takes the same steps here and in torch, and the losses stay beside each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.models import train_programs as programs
from pallas_models import gpt2, training
from pallas_models.gpt2 import GPT2Config
from parity.support.common import ON_GPU

RATE = 1e-3
CONFIG = GPT2Config(
    vocab_size=64, hidden_size=64, num_layers=2, num_heads=1, intermediate_size=128, max_positions=32
)
LARGER = GPT2Config(
    vocab_size=512, hidden_size=256, num_layers=4, num_heads=4, intermediate_size=1024, max_positions=256
)
# AdamW divides gradients by their size, so that a parameter whose gradient is nothing but rounding moves by up to
# RATE either way. Such parameters hardly change the loss: 1e-3 of it bounds what 20 steps add up to, and is far
# below what one step takes off it.
FLOAT32 = 1e-3
# In bfloat16, over 300 steps: the loss is the mean over 4,096 tokens, each of whose logits, of about 4, is moved
# by up to half an ulp of 8 bits, 2^-9 of it, and that is all that the first steps differ by. Then the paths drift
# apart by some of what a step takes off, which the mean over several steps evens out. After hundreds of steps they
# are different paths: ours has ended up 2.5% lower, and must not end higher.
FIRST = 2.0**-9
BFLOAT16 = 2e-2


def curves(config, batches, steps, dtype, device):
    """The losses of the steps, ours and torch's in float32, from the same parameters on the same batches."""
    params = gpt2.init(jax.random.key(0), config)
    ours = programs.in_jax(programs.gpt2_ours(config, dtype), params, batches, RATE, gpu=False)
    loss, leaves = programs.gpt2_torch(config, params, device)
    theirs = programs.in_torch(loss, leaves, batches, RATE, compiled=False, autocast=False)
    return (np.array([float(trainer.step(i)) for i in range(steps)]) for trainer in (ours, theirs))


def texts(config, batch, seq, number):
    """Batches of sequences that follow a rule, the sum of the two tokens before, after two random ones."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, config.vocab_size, (number, batch, seq), dtype=np.int32)
    for i in range(2, seq):
        ids[..., i] = (ids[..., i - 1] + ids[..., i - 2]) % config.vocab_size
    return [(batch,) for batch in ids]


def test_float32(on_cpu):
    pytest.importorskip("torch")
    ours, theirs = curves(CONFIG, texts(CONFIG, 8, 16, 5), 20, jnp.float32, "cpu")
    assert theirs[-1] < 0.95 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=FLOAT32)


@pytest.mark.skipif(not ON_GPU, reason="300 steps take a GPU")
def test_bfloat16_on_a_gpu():
    pytest.importorskip("torch")
    ours, theirs = curves(LARGER, texts(LARGER, 16, 256, 50), 300, jnp.bfloat16, "cuda")
    np.testing.assert_allclose(ours[:10], theirs[:10], rtol=FIRST)
    means = (losses[:50].reshape(5, 10).mean(1) for losses in (ours, theirs))
    np.testing.assert_allclose(*means, rtol=BFLOAT16)
    assert np.mean(theirs[-50:]) < 0.9 * theirs[0]
    assert np.mean(ours[-50:]) < (1 + BFLOAT16) * np.mean(theirs[-50:])


def test_a_missing_gradient_would_show(on_cpu, monkeypatch):
    """What the bound is worth: one MLP of two that is not trained leaves it."""
    pytest.importorskip("torch")
    cast = training.cast

    def partly(params, dtype):
        layer = params["layers"]["0"]
        layer = {**layer, "mlp": jax.lax.stop_gradient(layer["mlp"])}
        return cast({**params, "layers": {**params["layers"], "0": layer}}, dtype)

    monkeypatch.setattr(training, "cast", partly)
    ours, theirs = curves(CONFIG, texts(CONFIG, 8, 16, 5), 20, jnp.float32, "cpu")
    assert np.max(np.abs(ours / theirs - 1)) > FLOAT32
