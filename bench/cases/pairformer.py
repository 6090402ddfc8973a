"""A block of AlphaFold 3's Pairformer: ours, XLA, torch, and torch with cuEquivariance's kernels.

Pairs have 128 channels and 4 heads of 32, the single representation 384 and 16 of 24. What is compared and
differentiated is one array, so that nothing is left out: to each pair the single representation of its column is
added, its three groups of 128 channels one on the other. Positions are masked at random, an eighth of them, and so
is the result: models differ in what becomes of padding.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from bench.measuring import timing
from bench.measuring.harness import DTYPES, Benchmark, Contender, Gradient, Shape, Workload, itemsize
from bench.models import decoders, pair_stack
from pallas_models import pairformer

HELP = "block of the Pairformer: ours, XLA, torch, cuEquivariance"
SHOWN = "1x512 bf16"  # the case in README.md

CONFIG = pairformer.PairformerConfig()


def param_shapes() -> Any:
    """The parameters of a block, without their values."""
    return jax.eval_shape(lambda: pairformer.init_block(jax.random.key(0), CONFIG))


def path_of(keys: tuple[Any, ...]) -> tuple[str, ...]:
    """The names of a parameter, of which JAX has the keys."""
    return tuple(key.key for key in keys)


# Adds the same to all keys of a query, so that its gradient is nothing but rounding: no gradient by it is taken.
NO_EFFECT = ("single_attention", "pair_norm", "bias")
PATHS = [path_of(keys) for keys, _ in jax.tree.leaves_with_path(param_shapes())]
PATHS.append(PATHS.pop(PATHS.index(NO_EFFECT)))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def random_inputs(seed: Any, dtype: str, batch: int, n: int) -> tuple[jax.Array, ...]:
    """Pairs, single representation, parameters in the order of `PATHS`, both masks.

    Parameters are as large as real ones.
    """
    shapes = jax.tree.leaves_with_path(param_shapes())
    pair_key, single_key, mask_key, *keys = jax.random.split(jax.random.key(seed), 3 + len(shapes))

    def parameter(key: jax.Array, name: str, shape: jax.ShapeDtypeStruct) -> jax.Array:
        if name != "kernel":
            return 0.05 * jax.random.normal(key, shape.shape) + (name == "scale")
        return (jax.random.normal(key, shape.shape) * shape.shape[0] ** -0.5).astype(DTYPES[dtype])

    named = [(path_of(path), shape) for path, shape in shapes]
    params = {name: parameter(key, name[-1], shape) for key, (name, shape) in zip(keys, named, strict=True)}
    channels, of_single = CONFIG.pair.channels, CONFIG.single_attention.channels
    pair = jax.random.normal(pair_key, (batch, n, n, channels)).astype(DTYPES[dtype])
    single = jax.random.normal(single_key, (batch, n, of_single)).astype(DTYPES[dtype])
    there = jax.random.bernoulli(mask_key, 0.875, (batch, n)).at[:, 0].set(True)
    return pair, single, *(params[path] for path in PATHS), there[:, :, None] & there[:, None], there


def of_params(block: Callable[..., tuple[Any, Any]]) -> Callable[..., Any]:
    """A block as a function of the inputs, with one result."""

    def run(pair: Any, single: Any, *rest: Any) -> Any:
        *leaves, pair_mask, single_mask = rest
        params = traverse_util.unflatten_dict(dict(zip(PATHS, leaves, strict=True)))  # torch.compile follows it
        pair, single = block(params, pair, single, pair_mask, single_mask)
        return (pair + single.reshape(*single.shape[:2], -1, pair.shape[-1]).sum(2)[:, None]) * pair_mask[
            ..., None
        ]

    return run


def in_jax(**options: Any) -> Callable[..., jax.Array]:
    def block(params: Any, pair: Any, single: Any, pair_mask: Any, single_mask: Any) -> Any:
        return pairformer.block(params, pair, single, pair_mask=pair_mask, single_mask=single_mask, **options)

    return of_params(block)


@jax.jit
def reference(*inputs: jax.Array) -> jax.Array:
    wide = [x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in inputs]
    return in_jax(implementation="xla")(*wide)


def in_torch(*, fused: bool) -> Callable[..., Any]:
    import torch

    run = of_params(pair_stack.block(fused=fused))
    without_gradients = torch.no_grad()(run)  # not inference_mode, with which torch.compile fails
    return lambda *inputs: (run if any(x.requires_grad for x in inputs) else without_gradients)(*inputs)


def of_one_dtype(*inputs: Any) -> tuple[Any, ...]:
    """The inputs of torch, where biases and norms have the dtype of the matrices."""
    return tuple(x.to(inputs[0].dtype) if x.is_floating_point() else x.bool() for x in inputs)


def flops(batch: int, n: int) -> tuple[float, float]:
    """Of products with weights, and of products of activations; a gradient has 2.5 times the latter."""
    c, s, hidden = CONFIG.pair.channels, CONFIG.single_attention.channels, CONFIG.pair.triangle_update.hidden
    attention, single = CONFIG.pair.triangle_attention, CONFIG.single_attention
    width = attention.num_heads * attention.head_dim
    pairs, rows = 2.0 * batch * n * n, 2.0 * batch * n
    update = pairs * (c * (4 * hidden + c) + hidden * c)
    of_pairs = 2 * update + 2 * pairs * c * (5 * width + attention.num_heads)
    of_pairs += pairs * c * (3 * CONFIG.pair.transition.hidden + single.num_heads)
    of_single = rows * s * (5 * s + 3 * CONFIG.single_transition.hidden)
    between = 2 * pairs * n * hidden + 2 * pairs * n * 2 * width + pairs * 2 * s
    return of_pairs + of_single, between


def workload(dtype: str, shape: Shape) -> Workload:
    """A block on pairs (batch, n, n, 128) and a single representation (batch, n, 384)."""
    batch, n = map(int, shape)
    products, between = flops(batch, n)
    c, s = CONFIG.pair.channels, CONFIG.single_attention.channels
    return Workload(
        inputs=lambda seed: random_inputs(seed, dtype, batch, n),
        reference=reference,
        contenders=[
            Contender("pallas", "ours", in_jax, gpu=True),
            Contender("xla", "xla", functools.partial(in_jax, implementation="xla")),
            *(
                Contender(
                    name,
                    family,
                    functools.partial(in_torch, fused=fused),
                    torch=True,
                    prepare=of_one_dtype,
                    gpu=fused,
                    launches=20,
                )
                for name, family, fused in (
                    ("torch", "torch", False),
                    ("torch-cuequivariance", "torch", True),
                )
            ),
        ],
        flop=products + between,
        bytes=float(2 * batch * (n * n * c + n * s) * itemsize(dtype)),
        limit=decoders.LIMITS[dtype],
        gradient=Gradient(inputs=1 + len(PATHS), flop=2.0 * products + 2.25 * between),
    )


BENCHMARK = Benchmark(
    name="pairformer",
    axes=("batch", "n"),
    shapes=((1, 256), (1, 512), (1, 768)),
    cpu_shapes=((1, 12),),
    dtypes=("bf16",),
    workload=workload,
    budget=timing.Budget(warmup_s=0.02, queue_s=0.005, wall_samples=8, device_groups=3, device_calls=5),
    compile_budget=120.0,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run
