"""Triangle attention: ours against XLA, cuDNN by way of JAX, torch, tokamax and cuEquivariance.

It is between the pairs of rows or, with +ending, of columns. Every case has a bias, whose gradient is measured,
too, and a mask: of ones, or with +holes of zeros and ones. Others take rows as a batch: columns are transposed
before and after, as the models that call them do.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bench.measuring import tunable
from bench.measuring.harness import Benchmark, Contender, Gradient, Shape, Workload, itemsize, normal
from bench.measuring.tunable import Call, Tunable
from pallas_models import ops
from pallas_models.tuning import HEURISTIC

HELP = "triangle attention: ours, XLA, cuDNN, torch, tokamax, cuEquivariance"
SHOWN = "1x1024x4x32 bf16"  # the case in README.md

HALF_ONLY = "it takes fp16 and bf16"
CUBED = "it would hold a bias for each row, N x N x N"


@functools.partial(jax.jit, static_argnums=(1, 2))
def _mask(seed: Any, shape: tuple[int, ...], holes: bool) -> jax.Array:
    return jax.random.bernoulli(jax.random.key(seed), 0.8 if holes else 1.0, shape).astype(jnp.int32)


def lines(x: Any, ending: bool) -> Any:
    """Pairs with the lines that attend first, in JAX and in torch."""
    return x.swapaxes(1, 2) if ending else x


def by_rows(attend: Callable[..., Any], *, ending: bool) -> Callable[..., Any]:
    """A function of rows, bias (B, H, N, N) of query and key, and mask, for pairs of either direction."""

    def f(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        q, k, v, mask = (lines(x, ending) for x in (q, k, v, mask))
        return lines(attend(q, k, v, bias.swapaxes(-1, -2) if ending else bias, mask), ending)

    return f


def as_batch(
    implementation: Literal["xla", "cudnn"], *, dtype: str, holes: bool, ending: bool
) -> Callable[..., Any]:
    """JAX's own attention with rows as its batch; where the mask is of ones it is left out, as cuDNN wants it."""
    options: dict[str, Any] = dict(implementation=implementation)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
        def square(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
            kept = dict(mask=mask[:, None, None] != 0) if holes else {}
            with jax.default_matmul_precision("highest" if dtype == "fp32" else "default"):
                return jax.nn.dot_product_attention(q, k, v, bias=bias[None], **options, **kept)

        squares = [square(*operands) for operands in zip(q, k, v, bias, mask, strict=True)]
        return jnp.stack(squares) if len(squares) > 1 else squares[0][None]

    return by_rows(attend, ending=ending)


def in_torch(*, holes: bool, ending: bool) -> Callable[..., Any]:
    """torch's scaled_dot_product_attention with rows as its batch."""
    import torch
    from torch.nn import functional

    def attend(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        scores = bias[:, None]
        if holes:
            scores = scores.masked_fill(mask[:, :, None, None] == 0, -torch.inf)
        heads_first = (x.transpose(2, 3) for x in (q, k, v))
        return functional.scaled_dot_product_attention(*heads_first, attn_mask=scores).transpose(2, 3)

    return by_rows(attend, ending=ending)


def tokamax(*, ending: bool) -> Callable[..., Any]:
    """tokamax's, in its default configuration, with rows as its batch."""
    from tokamax import dot_product_attention  # type: ignore[import-not-found]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
        given = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return dot_product_attention(*given, bias=bias, mask=mask[0, :, None, None] != 0).reshape(q.shape)

    return by_rows(attend, ending=ending)


def cuequivariance_jax(*, ending: bool) -> Callable[..., Any]:
    """cuEquivariance's kernels for JAX."""
    import cuequivariance_ops_jax  # type: ignore[import-not-found]  # noqa: F401 (without it plain JAX would run)
    from cuequivariance_jax import triangle_attention  # type: ignore[import-not-found]

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
        heads_first = (x.swapaxes(2, 3) for x in (q, k, v))
        kept = mask[:, :, None, None] != 0
        out, *_ = triangle_attention(*heads_first, bias=bias[:, None], mask=kept, scale=q.shape[-1] ** -0.5)
        return out.swapaxes(2, 3)

    return by_rows(attend, ending=ending)


def cuequivariance_torch(*, ending: bool) -> Callable[..., Any]:
    """cuEquivariance's kernels for torch."""
    from cuequivariance_torch import triangle_attention  # type: ignore[import-not-found]

    def attend(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        heads_first = (x.transpose(2, 3) for x in (q, k, v))
        return triangle_attention(*heads_first, bias[:, None], mask=mask[:, :, None, None] != 0).transpose(2, 3)

    return by_rows(attend, ending=ending)


def workload(dtype: str, shape: Shape) -> Workload:
    """Triangle attention of q (batch, n, n, heads, head_dim)."""
    batch, n, heads, head_dim = map(int, shape[:4])
    ending, holes = "ending" in shape, "holes" in shape
    pairs, bias = (batch, n, n, heads, head_dim), (batch, heads, n, n)
    direction: Literal["starting", "ending"] = "ending" if ending else "starting"

    def ours(**options: Any) -> Callable[..., Any]:
        return lambda q, k, v, bias, mask: ops.triangle_attention(
            q, k, v, bias=bias, mask=mask, direction=direction, **options
        )

    def rows_as_batch(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
        out = ops.attention(*(x[0] for x in (q, k, v)), bias=bias, mask=mask[0])
        return out[None]

    plain = ours(implementation="xla")

    def exact(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
        q, k, v, bias = (x.astype(jnp.float32) for x in (q, k, v, bias))
        return plain(q, k, v, bias, mask)

    half = "" if dtype in ("fp16", "bf16") else HALF_ONLY
    single = "" if batch == 1 else "it is called for a batch of one"
    scores = float(batch * heads * n**3)
    moved = float(4 * batch * n * n * heads * head_dim * itemsize(dtype))
    return Workload(
        inputs=lambda seed: (*normal(seed, dtype, *[pairs] * 3, bias), _mask(seed, (batch, n, n), holes)),
        reference=jax.jit(exact),
        contenders=[
            Contender("pallas", "ours", ours, gpu=True),
            Contender("triton", "ladder", lambda: ours(implementation="triton"), gpu=True),
            Contender("heuristic", "ladder", lambda: ours(implementation="triton", config=HEURISTIC), gpu=True),
            Contender(
                "attention",
                "ladder",
                lambda: by_rows(rows_as_batch, ending=ending),
                gpu=True,
                skip=single,
            ),
            *(
                Contender(
                    name,
                    "xla",
                    functools.partial(as_batch, backend, dtype=dtype, holes=holes, ending=ending),
                    gpu=backend == "cudnn",
                    skip="" if backend == "xla" else half or (CUBED if holes else ""),
                )
                for name, backend in (("xla", "xla"), ("xla-cudnn", "cudnn"))
            ),
            Contender("torch", "torch", functools.partial(in_torch, holes=holes, ending=ending)),
            Contender("tokamax", "peer", functools.partial(tokamax, ending=ending), gpu=True, skip=single),
            Contender("cuequivariance", "peer", functools.partial(cuequivariance_jax, ending=ending), gpu=True),
            Contender(
                "cuequivariance-torch",
                "peer",
                functools.partial(cuequivariance_torch, ending=ending),
                torch=True,
                ways=("eager", "graph"),  # compiled, it calls the same kernel
                gpu=True,
            ),
        ],
        flop=4.0 * scores * head_dim,
        bytes=moved,
        gradient=Gradient(inputs=4, exact=exact, flop=10.0 * scores * head_dim, bytes=2 * moved),
    )


BENCHMARK = Benchmark(
    name="triangle-attention",
    axes=("batch", "n", "heads", "head_dim"),
    flags=("ending", "holes"),
    shapes=(
        (1, 256, 4, 32),
        (1, 512, 4, 32),
        (1, 768, 4, 32),
        (1, 1024, 4, 32),
        (1, 512, 4, 32, "ending"),
        (1, 1024, 4, 32, "ending"),
        (1, 515, 4, 32),
        (1, 1030, 4, 32, "holes"),
        (1, 512, 8, 16),
        (1, 384, 4, 64),
    ),
    quick_shapes=((1, 256, 4, 32), (1, 512, 4, 32, "ending"), (1, 515, 4, 32)),
    cpu_shapes=((1, 24, 2, 16), (2, 17, 2, 16, "ending", "holes")),
    dtypes=("bf16",),
    workload=workload,
)
add_arguments, run = BENCHMARK.add_arguments, BENCHMARK.run


def tuned(dtype: str, b: int, n: int, h: int, d: int, *, direction: Literal["starting", "ending"]) -> Call:
    """Triangle attention with a bias, to tune its blocks."""
    *arrays, bias = tunable.operands(dtype, *[(b, n, n, h, d)] * 3, (b, h, n, n))
    return ops.triangle_attention, arrays, {"bias": bias, "direction": direction}


TUNABLES = {
    f"triangle_attention_{direction}": Tunable(
        axes="BxNxHxD",
        shapes=((1, 256, 4, 32), (1, 512, 4, 32), (1, 768, 4, 32), (1, 1024, 4, 32)),
        call=functools.partial(tuned, direction=direction),
        nearby=(1, 0.875),
    )
    for direction in ("starting", "ending")
}
