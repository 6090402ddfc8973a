"""Training steps of whole models, as users of this library, of jax.numpy and of torch write them.

All take float32 parameters, compute in bfloat16 and update with AdamW of the same settings: torch by autocast and
its fused AdamW, JAX by casts and optax, with parameters and state of the optimiser donated.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bench.cases import gpt2 as block
from bench.models import minilm_models
from pallas_models import gpt2, minilm, training
from pallas_models.minilm import MiniLMConfig

ADAMW: dict[str, float] = dict(b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
RATES = {"gpt2": 1e-3, "minilm": 2e-5}  # of learning
SCALE = 20.0  # of cosines in the contrastive loss

Batch = tuple[np.ndarray, ...]
Loss = Callable[..., jax.Array]  # of (parameters, *batch)


@dataclasses.dataclass(kw_only=True)
class Trainer:
    """A model under training.

    Attributes:
      step: `step(i)` queues a step on batch `i` (modulo their number) and returns its loss, of before the step.
      wait: `wait(loss)` returns once the step is done.
      peak_bytes: gives the device memory of a step: parameters, optimiser, activations; None without a GPU.
      compile_s: seconds that compilation took; None where nothing is compiled ahead.
    """

    step: Callable[[int], Any]
    wait: Callable[[Any], Any]
    peak_bytes: Callable[[], float | None]
    compile_s: float | None = None


def in_jax(loss: Loss, params: Any, batches: Sequence[Batch], rate: float, *, gpu: bool) -> Trainer:
    """Trains by a loss of JAX arrays, from a copy of `params`."""
    optimizer = optax.adamw(rate, **ADAMW)

    def update(state: Any, *batch: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    state = (jax.tree.map(jnp.array, params), optimizer.init(params))
    given = jax.device_put(list(batches))
    start = time.perf_counter()
    program = jax.jit(update, donate_argnums=0).lower(state, *given[0]).compile()
    compile_s = time.perf_counter() - start

    def step(i: int) -> jax.Array:
        nonlocal state
        state, value = program(state, *given[i % len(given)])
        return value

    def peak_bytes() -> float | None:
        memory = program.memory_analysis() if gpu else None
        if memory is None:
            return None
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return float(memory.argument_size_in_bytes + results + memory.temp_size_in_bytes)

    return Trainer(step=step, wait=jax.block_until_ready, peak_bytes=peak_bytes, compile_s=compile_s)


def in_torch(
    loss: Callable[..., Any],
    parameters: Sequence[Any],
    batches: Sequence[Batch],
    rate: float,
    *,
    compiled: bool,
    autocast: bool = True,
) -> Trainer:
    """Trains by a loss of torch tensors, which reads `parameters`, leaves that take gradients."""
    import torch

    device, gpu = parameters[0].device, parameters[0].is_cuda
    optimizer = torch.optim.AdamW(
        parameters,
        lr=rate,
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
        fused=gpu,
    )
    given = [tuple(torch.from_numpy(leaf).to(device).long() for leaf in batch) for batch in batches]
    function = torch.compile(loss, dynamic=False) if compiled else loss

    def differentiate(i: int) -> Any:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            value = function(*given[i % len(given)])
        value.backward()
        return value

    def step(i: int) -> Any:
        optimizer.zero_grad(set_to_none=True)
        value = differentiate(i)
        optimizer.step()
        return value.detach()

    if not gpu:
        return Trainer(step=step, wait=lambda _: None, peak_bytes=lambda: None)

    def wait(_: Any) -> None:
        torch.cuda.synchronize()

    def peak_bytes() -> float:
        wait(step(0))
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated()
        wait(step(1))
        # Besides: parameters, gradients, which the step before left, and two moments of each.
        own = 4 * sum(leaf.nbytes for leaf in parameters) + sum(leaf.nbytes for batch in given for leaf in batch)
        return float(torch.cuda.max_memory_allocated() - others + own)

    start = time.perf_counter()
    wait(differentiate(0))
    compile_s = time.perf_counter() - start if compiled else None
    return Trainer(step=step, wait=wait, peak_bytes=peak_bytes, compile_s=compile_s)


# GPT-2


def gpt2_config(num_layers: int = 12) -> gpt2.GPT2Config:
    """GPT-2 small with a vocabulary that is a multiple of 128, as it is trained."""
    return gpt2.GPT2Config(vocab_size=50304, num_layers=num_layers)


def text(config: gpt2.GPT2Config, batch: int, seq: int, seed: int) -> Batch:
    """Random ids (batch, seq), few of which are frequent, as in text."""
    rng = np.random.default_rng(seed)
    return ((config.vocab_size * rng.random((batch, seq)) ** 6).astype(np.int32),)


def gpt2_ours(config: gpt2.GPT2Config, dtype: Any, remat: training.Remat = "none") -> Loss:
    """The loss of this library."""
    return lambda params, ids: gpt2.loss(training.cast(params, dtype), ids, config=config, remat=remat)


def gpt2_plain(
    config: gpt2.GPT2Config, dtype: Any, *, attention: Literal["xla", "cudnn"], one_by_one: bool = False
) -> Loss:
    """The loss as a user of jax.numpy writes it; one sequence after another where that saves memory.

    Stacked layers, which compile faster and run slower, are scanned.
    """
    precision = "highest" if dtype == jnp.float32 else None

    def of(params: Any, ids: jax.Array) -> jax.Array:
        tables, word = params["embeddings"], params["embeddings"]["word"]["embedding"]
        x = (word[ids] + tables["position"]["embedding"][: ids.shape[1]]).astype(dtype)

        def layer(x: jax.Array, params: Any) -> tuple[jax.Array, None]:
            leaves = jax.tree.leaves(training.cast(params, dtype))
            return block.plain(x, *leaves, attention=attention, precision=precision), None

        if training.is_stacked(params):
            x, _ = jax.lax.scan(layer, x, params["layers"])
        else:
            for i in range(config.num_layers):
                x, _ = layer(x, params["layers"][str(i)])
        y = x.astype(jnp.float32)
        y -= y.mean(-1, keepdims=True)
        y *= jax.lax.rsqrt(jnp.mean(jnp.square(y), -1, keepdims=True) + config.epsilon)
        y = (y * params["norm"]["scale"] + params["norm"]["bias"]).astype(dtype)
        logits = jnp.matmul(y, word.T.astype(dtype), precision=precision).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
        return losses.mean()

    if not one_by_one:
        return of
    return lambda params, ids: jax.lax.map(jax.checkpoint(lambda row: of(params, row[None])), ids).mean()


def gpt2_torch(config: gpt2.GPT2Config, params: Any, device: str) -> tuple[Callable[..., Any], list[Any]]:
    """The loss of torch tensors, and the parameters that it reads."""
    import torch
    from torch.nn import functional

    leaves, tree = jax.tree.flatten(params)
    tensors = [torch.from_numpy(np.array(leaf)).to(device).requires_grad_() for leaf in leaves]

    def loss(ids: Any) -> Any:
        p = jax.tree.unflatten(tree, tensors)

        def norm(x: Any, of: Any) -> Any:
            return functional.layer_norm(x, x.shape[-1:], of["scale"], of["bias"], config.epsilon)

        def linear(x: Any, of: Any) -> Any:
            return functional.linear(x, of["kernel"].t(), of["bias"])

        word = p["embeddings"]["word"]["embedding"]
        x = functional.embedding(ids, word) + p["embeddings"]["position"]["embedding"][: ids.shape[1]]
        for i in range(config.num_layers):
            layer = p["layers"][str(i)]
            heads = linear(norm(x, layer["attention_norm"]), layer["attention"]["qkv"])
            q, k, v = heads.unflatten(-1, (3, config.num_heads, -1)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(y.transpose(1, 2).flatten(2), layer["attention"]["out"])
            y = functional.gelu(linear(norm(x, layer["mlp_norm"]), layer["mlp"]["up"]), approximate="tanh")
            x = x + linear(y, layer["mlp"]["down"])
        logits = functional.linear(norm(x, p["norm"]), word)[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    return loss, tensors


# MiniLM


def pairs(config: MiniLMConfig, batch: int, seq: int, seed: int) -> Batch:
    """Random ids and masks of anchors and positives, which share an eighth of their tokens.

    A sentence is between half and all of the length.
    """
    rng = np.random.default_rng(seed)
    first, other = rng.integers(0, config.vocab_size, (2, batch, seq), dtype=np.int32)
    second = np.where(rng.random((batch, seq)) < 0.125, first, other)
    lengths = rng.integers((seq + 1) // 2, seq + 1, (2, batch, 1))
    masks = (np.arange(seq) < lengths).astype(np.int32)
    return first, masks[0], second, masks[1]


def minilm_ours(config: MiniLMConfig, dtype: Any) -> Loss:
    """The loss of this library."""

    def loss(params: Any, *batch: jax.Array) -> jax.Array:
        params = training.cast(params, dtype)
        return minilm.contrastive_loss(params, batch[:2], batch[2:], scale=SCALE, config=config)

    return loss


def minilm_plain(
    checkpoint: minilm_models.Checkpoint,
    dtype: str,
    *,
    attention: Literal["einsum", "cudnn"],
    rounded: str | None = None,
) -> tuple[Loss, Any]:
    """The loss as a user of jax.numpy writes it, and its float32 parameters.

    Args:
      checkpoint: weights to begin with.
      dtype: of products.
      attention: how it is written.
      rounded: dtype that the loss rounds parameters to before it reads them; `dtype` if None.
    """
    _, embed = minilm_models.plain_jax(checkpoint, dtype, attention=attention)
    params, _ = minilm_models.plain_jax(checkpoint, "fp32")
    target, read = minilm_models.DTYPES[dtype], minilm_models.DTYPES[rounded or dtype]

    def loss(params: Any, *batch: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda leaf: leaf.astype(read).astype(target), params)
        first, second = (embed(params, *tokens).astype(jnp.float32) for tokens in (batch[:2], batch[2:]))
        scores = SCALE * jnp.matmul(first, second.T, precision="highest")
        return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores))).mean()

    return loss, params


def minilm_torch(checkpoint: minilm_models.Checkpoint, device: str) -> tuple[Callable[..., Any], list[Any]]:
    """The loss of torch tensors, and the parameters that it reads."""
    import torch

    model = minilm_models.torch_bert(checkpoint, device)
    embed = functools.partial(minilm_models.torch_embed, model)

    def loss(*batch: Any) -> Any:
        first, second = embed(*batch[:2]), embed(*batch[2:])
        with torch.autocast(device, enabled=False):
            scores = SCALE * first @ second.T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=device))

    return loss, list(model.parameters())
