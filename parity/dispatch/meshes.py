"""Every operation on a mesh of 8 CPU devices: `python -m parity.dispatch.meshes` prints JSON, a line a case.

A process has the devices that it begins with, so that `test_meshes.py` runs this in one of its own.
"""

import contextlib
import dataclasses
import functools
import json
import math
import re
import tempfile
import traceback
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import weights
from bench.measuring import collectives
from pallas_models import gpt2, minilm, ops, qwen3, trimul
from parity import ROOT
from parity.support import pallas_patches
from parity.support.common import array, normal, random_mask, random_params, relative_error

DEVICES = {"data": 4, "model": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of an operation, its operands spread by `specs`.

    Attributes:
      function: of the arrays; its result is an array.
      floats: how many of the arrays, the first ones, are differentiated.
      result: how the result is spread; None where that is not for the operation to say.
      sums: how many arrays are added up over devices, in forward and gradient together.
      swaps: of how many arrays each device sends every other one a part.
      of_part: the function of what a device has, in a shard_map, where it is another.
    """

    function: Callable[..., jax.Array]
    arrays: tuple[jax.Array, ...]
    floats: int
    specs: tuple[P, ...]
    result: P
    sums: int
    swaps: int = 0
    of_part: Callable[..., jax.Array] | None = None

    @functools.cached_property
    def expected(self) -> tuple[jax.Array, ...]:
        """What one device computes, once for all kinds of mesh and all kernels."""
        return jax.jit(with_gradient(self))(*self.arrays)


def with_gradient(case: Case) -> Callable[..., tuple[jax.Array, ...]]:
    """A program that gives result and gradients, for a cotangent that depends on every element of the result."""

    def program(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        def of_floats(*floats: jax.Array) -> jax.Array:
            return case.function(*floats, *arrays[case.floats :])

        out, pull = jax.vjp(of_floats, *arrays[: case.floats])
        return out, *pull(jnp.cos(out))

    return program


def cases(implementation: str) -> Mapping[str, Case]:
    """Each operation with each axis split that it can split."""
    rng = np.random.default_rng(0)
    kernel: dict[str, Any] = dict(implementation=implementation)
    data, columns, whole = P("data"), P(None, "model"), P()

    def matmul(x, w, bias, residual):
        return ops.matmul(x, w, bias=bias, residual=residual, activation="gelu", **kernel)

    def tied(x, w):
        return ops.matmul(x, w, transpose_w=True, **kernel)

    def batched(x, w):
        return ops.matmul(x, w, **kernel)

    def gated(x, w, bias):
        return ops.gated_matmul(x, w, bias=bias, **kernel)

    def with_norm(x, w, scale, offset, bias, residual):
        return ops.matmul_layer_norm(x, w, scale, offset, bias=bias, residual=residual, **kernel)

    def after_attention(qkv, x, w, w_up, w_down, scale, mask):
        norms = dict(scale_out=scale, offset_out=scale, scale=scale, offset=scale)
        return ops.post_norm_mlp(
            qkv, x, w, w_up, w_down, **norms, attention=dict(num_heads=1, mask=mask), **kernel
        )

    def norm(x, scale, bias, residual):
        y, total = ops.layer_norm(x, scale, bias, residual=residual, return_residual=True, **kernel)
        return y * total

    def softmax(x, mask):
        return ops.softmax(x, where=mask[:, None, :], **kernel)

    def attention(q, k, v, bias, mask):
        out, lse = ops.attention(q, k, v, causal=True, mask=mask, bias=bias, return_lse=True, **kernel)
        lse = jnp.where(lse > -jnp.inf, lse, 0.0)
        return out * lse.swapaxes(1, 2)[..., None]

    def embed(word, position, kind, scale, bias, ids):
        return ops.embed_tokens(ids, word, position, kind, scale, bias, **kernel)

    def rotary(qkv, cos, sin):
        return ops.rotary(qkv, cos, sin, num_heads=2, num_kv_heads=1, **kernel)

    def pool(x, mask):
        return ops.mean_pool(x, mask, **kernel)

    def cross_entropy(x, w, labels):
        return ops.linear_cross_entropy(x, w, labels, **kernel)

    def losses(x, w, bias, labels):
        return ops.linear_cross_entropy(x, w, labels, bias=bias, reduction=None, transpose_w=True, **kernel)

    def triangle(x, *weights, direction="outgoing", **options):
        mean, scale, w_in, out_scale, out_bias, w_gate, w_out = weights
        return ops.triangle_update(
            x, scale, mean, w_in, out_scale, out_bias, w_gate, w_out, direction=direction, **options, **kernel
        )

    # In float32: values beside a boundary of float16 are rounded one way or the other, as a last bit before falls.
    outgoing = functools.partial(triangle, compute_dtype="float32")

    def incoming(x, *weights_and_mask):
        return outgoing(x, *weights_and_mask[:7], direction="incoming", mask=weights_and_mask[7])

    def pairs(function, rows, columns):
        """Pairs that are split by rows, columns or both: each device sends left and right of half of the hidden
        channels and their sums, twice; all of them once more for the gradient, and as much for its cotangents.
        """
        names = [name for name in (rows, columns) if name]
        spec = P(None, rows, columns, None)
        arrays, specs, sums = (normal(rng, 1, 8, 8, 16), *weights_of_pairs), (spec, *[whole] * 7), 7
        if function is incoming:  # the largest factor of the mask scales left and right everywhere
            factors = normal(rng, 1, 8, 8).at[0, 0, 0].set(500.0)
            arrays, specs, sums = (*arrays, factors), (*specs, P(None, rows, columns)), sums + 1
        made = case(function, arrays, specs, spec, sums, 8)
        swaps = 10 * math.prod(DEVICES[name] for name in names)
        of_part = functools.partial(function, rows_over=(rows,)) if function is outgoing else None
        return dataclasses.replace(made, swaps=swaps, of_part=of_part)

    def case(function, arrays, specs, result, sums, floats=None):
        return Case(
            function=function,
            arrays=arrays,
            floats=len(arrays) if floats is None else floats,
            specs=specs,
            result=result,
            sums=sums,
        )

    x, w, bias, residual = (normal(rng, *shape) for shape in ((8, 6), (6, 10), (10,), (8, 10)))
    product = x, w, bias, residual
    q, k, v = normal(rng, 4, 5, 4, 16), *(normal(rng, 4, 7, 2, 16) for _ in range(2))
    scores = normal(rng, 1, 4, 5, 7), random_mask(rng, 4, 7)
    labels = array(rng.integers(0, 10, 8), "int32")
    heads, pair = P(None, None, "model"), P("data", None, None)
    ids = array(rng.integers(0, 12, (4, 5)), "int32")
    tables = (normal(rng, n, 16) for n in (12, 6, 2))
    weights = tuple(normal(rng, *shape) for shape in ((8,), (8,), (8, 4, 16), (16,), (16,), (8, 16), (16, 8)))
    weights_of_pairs = tuple(
        normal(rng, *shape) for shape in ((16,), (16,), (16, 4, 16), (16,), (16,), (16, 16), (16, 16))
    )
    embedding = *tables, *(normal(rng, 16) for _ in range(2)), ids
    rows = x, normal(rng, 6), normal(rng, 6), normal(rng, 8, 6)
    to_norm = *product[:2], normal(rng, 10), normal(rng, 10), bias, residual
    return {
        "matmul rows": case(matmul, product, (data, whole, whole, data), data, 2),
        "matmul columns": case(matmul, product, (whole, columns, P("model"), columns), columns, 1),
        "matmul contraction": case(matmul, product, (columns, P("model"), whole, whole), P(None, None), 1),
        "matmul rows and columns": case(
            matmul, product, (data, columns, P("model"), P("data", "model")), P("data", "model"), 3
        ),
        "matmul rows that 4 does not divide": case(
            matmul,
            (normal(rng, 6, 6), w, bias, normal(rng, 6, 10)),
            (whole, whole, whole, whole),
            P(None, None),
            0,
        ),
        "matmul of the vocabulary": case(tied, (x, normal(rng, 10, 6)), (data, P("model")), P("data", "model"), 2),
        "matmul batched": case(
            batched, (normal(rng, 4, 3, 6), normal(rng, 4, 6, 10)), (pair, pair), P("data", None, None), 0
        ),
        "gated_matmul rows": case(
            gated, (x, normal(rng, 6, 2, 10), normal(rng, 2, 10)), (data, whole, whole), data, 2
        ),
        "gated_matmul columns": case(
            gated, (x, normal(rng, 6, 2, 10), normal(rng, 2, 10)), (whole, heads, columns), columns, 1
        ),
        "matmul_layer_norm rows": case(with_norm, to_norm, (data, whole, whole, whole, whole, data), data, 4),
        "post_norm_mlp batch": case(
            after_attention,
            (
                *(normal(rng, 4, 3, width) for width in (96, 32)),
                *(normal(rng, *shape, scale=0.2) for shape in ((32, 32), (32, 8), (8, 32), (32,))),
                random_mask(rng, 4, 3),
            ),
            (data, data, whole, whole, whole, whole, data),
            P("data", None, None),
            3 + 4,  # the vector stands for four
            6,
        ),
        "norm rows": case(norm, rows, (data, whole, whole, data), data, 2),
        "softmax rows": case(
            softmax, (normal(rng, 4, 3, 6), random_mask(rng, 4, 6)), (data, data), P("data", None, None), 0, 1
        ),
        "attention batch": case(
            attention, (q, k, v, *scores), (data, data, data, whole, data), P("data", None, None, None), 1, 4
        ),
        "attention heads": case(
            attention,
            (q, k, v, *scores),
            (heads, heads, heads, columns, whole),
            P(None, None, "model", None),
            0,
            4,
        ),
        "embed_tokens batch": case(embed, embedding, (*[whole] * 5, data), P("data", None, None), 5, 5),
        "rotary batch and tokens": case(
            rotary,
            (normal(rng, 4, 6, 64), normal(rng, 6, 8), normal(rng, 6, 8)),
            (P("data", "model"), P("model"), P("model")),
            P("data", "model", None),
            0,
            1,
        ),
        "mean_pool batch": case(pool, (normal(rng, 4, 5, 8), random_mask(rng, 4, 5)), (data, data), data, 0, 1),
        "linear_cross_entropy tokens": case(
            losses, (x, normal(rng, 10, 6), bias, labels), (data, whole, whole, data), data, 2, 3
        ),
        "linear_cross_entropy mean": case(cross_entropy, (x, w, labels), (data, whole, data), P(), 2, 2),
        "triangle_update batch": case(
            outgoing,
            (normal(rng, 4, 3, 3, 8), *weights),
            (data, *[whole] * 7),
            P("data", None, None, None),
            7,
        ),
        "triangle_update rows": pairs(outgoing, "data", None),
        "triangle_update columns": pairs(incoming, None, "model"),
        "triangle_update rows and columns": pairs(incoming, "data", "model"),
    }


def model_cases(implementation: str | None) -> dict[str, Case]:
    """Every model with its batch spread, which adds up nothing but gradients."""
    rng = np.random.default_rng(1)
    sizes = dict(vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=16)
    bert, gpt = minilm.MiniLMConfig(**sizes), gpt2.GPT2Config(**sizes)
    qwen = qwen3.Qwen3Config(**sizes, num_kv_heads=1, head_dim=16)
    pair = trimul.TriMulConfig(channels=16, hidden=16)
    ids = array(rng.integers(0, 40, (4, 6)), "int32")
    options: dict[str, Any] = dict(implementation=implementation)

    def case(function, params, data, result, sums=0, specs=None):
        leaves, tree = jax.tree.flatten(params)
        return Case(
            function=lambda *arrays: function(tree.unflatten(arrays[:-1]), arrays[-1]),
            arrays=(*leaves, data),
            floats=len(leaves) if sums and specs is None else 0,
            specs=(*([P()] * len(leaves) if specs is None else specs), P("data")),
            result=result,
            sums=sums,
        )

    def tensor_parallel(model, config, **how):
        """Summed over devices are the words that are looked up and each half of the layer."""
        mesh = jax.sharding.AbstractMesh(tuple(DEVICES.values()), tuple(DEVICES))
        params, grouped = model.group_heads(random_params(config, init=model.init), config, 2)
        specs = [x.spec for x in jax.tree.leaves(model.shardings(grouped, mesh, **how))]

        def logits(params, ids):
            return model.logits(params, ids, config=grouped, **options)

        return case(logits, params, ids, P("data", None, "model"), 3, specs)

    params = random_params(gpt, init=gpt2.init)
    return {
        "minilm": case(
            lambda p, i: minilm.embed(p, i, jnp.ones_like(i), config=bert, **options),
            random_params(bert),
            ids,
            P("data"),
        ),
        "gpt2": case(lambda p, i: gpt2.logits(p, i, config=gpt, **options), params, ids, P("data")),
        # Each parameter once and the embeddings twice, from where they are looked up and from the head; the loss
        # and the number of tokens.
        "gpt2 loss": case(
            lambda p, i: gpt2.loss(p, i, config=gpt, **options), params, ids, P(), len(jax.tree.leaves(params)) + 3
        ),
        "qwen3": case(
            lambda p, i: qwen3.logits(p, i, config=qwen, **options),
            random_params(qwen, init=qwen3.init),
            ids,
            P("data"),
        ),
        "gpt2 tensor parallel": tensor_parallel(gpt2, gpt),
        "qwen3 tensor parallel": tensor_parallel(qwen3, dataclasses.replace(qwen, num_kv_heads=2)),
        "trimul": case(
            lambda p, x: trimul.trimul(p, x, direction="incoming", **options),
            random_params(pair, init=trimul.init),
            normal(rng, 4, 3, 3, 16),
            P("data"),
        ),
    }


def measured(case: Case, reference: Case, kind: str) -> dict[str, Any]:
    """The relative errors of result and gradients, the collectives, and whether the result is spread right."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(tuple(DEVICES.values()), tuple(DEVICES), axis_types=(axis_type,) * len(DEVICES))
    arrays = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(case.arrays, case.specs, strict=True)]
    program = with_gradient(case)
    if kind == "shard_map":
        program = with_gradient(dataclasses.replace(case, function=case.of_part or case.function))
        out_specs = (case.result, *case.specs[: case.floats])
        program = jax.shard_map(program, mesh=mesh, in_specs=case.specs, out_specs=out_specs)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        compiled = jax.jit(program).lower(*arrays).compile()
        out = compiled(*arrays)
    return dict(
        errors=[relative_error(a, b) for a, b in zip(out, reference.expected, strict=True)],
        collectives=collectives.count(compiled.as_text()),
        is_spread=out[0].sharding.is_equivalent_to(NamedSharding(mesh, case.result), out[0].ndim),
    )


def sent(case: Case) -> dict[str, int]:
    """The collectives that are expected."""
    return {kind: n for kind, n in (("all-reduce", case.sums), ("all-to-all", case.swaps)) if n}


# An explicit mesh comes to a shard_map of what a device computes, so that few cases of both are enough.
EXPLICIT = (
    "matmul rows and columns",
    "matmul contraction",
    "matmul batched",
    "matmul_layer_norm rows",
    "norm rows",
    "attention heads",
    "embed_tokens batch",
    "rotary batch and tokens",
    "linear_cross_entropy mean",
    "triangle_update columns",
)
SHARD_MAP = (
    "matmul rows",
    "softmax rows",
    "attention batch",
    "linear_cross_entropy tokens",
    "triangle_update batch",
    "triangle_update rows",
)


def all_cases() -> Mapping[tuple[str, str], tuple[Case, Case]]:
    """By the kind of mesh and the name, with the same call that one device makes without kernels."""
    ops_of, interpreted, plain = cases("interpret"), model_cases("interpret"), model_cases(None)
    references = {**cases("xla"), **plain}
    loss = plain.pop("gpt2 loss")

    def of_part(*arrays: jax.Array) -> jax.Array:
        """As docs/meshes.md has a step."""
        *params, ids = arrays
        return jax.lax.pmean(loss.function(*jax.lax.pcast(params, "data", to="varying"), ids), "data")

    chosen = (
        {("jit", name): case for name, case in ops_of.items()}
        | {("jit", name): interpreted[name] for name in interpreted if name not in ("gpt2", "qwen3", "trimul")}
        | {("explicit", name): ops_of[name] for name in EXPLICIT}
        | {("shard_map", name): ops_of[name] for name in SHARD_MAP}
        | {
            (kind, name): case
            for kind in ("explicit", "shard_map")
            for name, case in plain.items()
            if "tensor" not in name
        }
        # Both gradients of the embeddings are added before they are summed; in a shard_map tokens are not counted.
        | {("explicit", "gpt2 loss"): dataclasses.replace(loss, sums=loss.sums - 1)}
        | {("shard_map", "gpt2 loss"): dataclasses.replace(loss, of_part=of_part, sums=loss.sums - 2)}
    )
    return {key: (case, references[key[1]]) for key, case in chosen.items()}


def loaded() -> dict[str, Any]:
    """A checkpoint read to a mesh, with heads grouped there: each device has its part of what is split."""
    mesh = jax.make_mesh(tuple(DEVICES.values()), tuple(DEVICES), axis_types=(AxisType.Auto,) * len(DEVICES))
    config = gpt2.GPT2Config(
        vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=16
    )
    params = random_params(config, init=gpt2.init)
    shardings = gpt2.shardings(config, mesh, fsdp="data")
    with tempfile.TemporaryDirectory() as folder:
        weights.save(params, folder, config=config)
        found = weights.load_gpt2(folder, sharding=shardings)
    found, grouped = gpt2.group_heads(found, config, 2)
    expected, _ = gpt2.group_heads(params, config, 2)
    leaves = list(zip(*map(jax.tree.leaves, (found, expected, shardings)), strict=True))
    qkv = found["layers"]["0"]["attention"]["qkv"]["kernel"]
    assert grouped.head_groups == 2 and qkv.addressable_shards[0].data.shape == (8, 48)
    return dict(
        errors=[relative_error(a, b) for a, b, _ in leaves],
        collectives={},
        is_spread=all(a.sharding.is_equivalent_to(place, a.ndim) for a, _, place in leaves),
    )


def few_heads(num_kv_heads: int) -> dict[str, Any]:
    """Attention of projections that are spread over more devices than there are heads: those are gathered."""
    # The last axis: a part of it is what JAX cannot name.
    mesh = jax.make_mesh((2, 4), ("model", "data"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(3)
    arrays = [normal(rng, 2, 5, heads * 16) for heads in (4, num_kv_heads, num_kv_heads)]

    def attend(implementation: str, *projections: jax.Array) -> jax.Array:
        heads = (x.reshape(*x.shape[:2], -1, 16) for x in projections)
        return ops.attention(*heads, implementation=implementation)

    expected = jax.jit(attend, static_argnums=0)("xla", *arrays)
    out = jax.jit(attend, static_argnums=0)(
        "interpret", *jax.device_put(arrays, NamedSharding(mesh, P(None, None, "data")))
    )
    return dict(errors=[relative_error(out, expected)], collectives={}, is_spread=True)


def ring(*, causal: bool, implementation: str) -> dict[str, Any]:
    """Attention whose sequence is spread over 4 devices and whose heads over 2, against all of it in float64."""
    mesh = jax.make_mesh(tuple(DEVICES.values()), tuple(DEVICES), axis_types=(AxisType.Auto,) * len(DEVICES))
    rng, seq = np.random.default_rng(2), 56  # of no other axis
    order = ops.zigzag_order(seq, DEVICES["data"]) if causal else np.arange(seq)
    floats = [rng.standard_normal((2, seq, heads, 16)) for heads in (4, 2, 2, 4)]  # q, k, v, dout
    mask, ids = np.asarray(random_mask(rng, 2, seq)), np.sort(rng.integers(0, 3, (2, seq)), 1).astype(np.int32)
    spec, of_tokens = P(None, "data", "model"), P(None, "data")

    def full(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        seen = (ids[:, None, :, None] == ids[:, None, None]) & (mask != 0)[:, None, None]
        seen &= np.tri(seq, dtype=bool) | (not causal)
        weights = jnp.exp(jnp.where(seen, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 4, -np.inf))
        total = jnp.maximum(weights.sum(-1, keepdims=True), 1e-300)
        return jnp.einsum("bhqk,bkhd->bqhd", weights / total, v)

    def spread(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, ids: jax.Array) -> jax.Array:
        options: dict[str, Any] = dict(axis_name="data", causal=causal, implementation=implementation)
        return ops.ring_attention(q, k, v, mask=mask, segment_ids=ids, **options)

    mapped = jax.shard_map(spread, mesh=mesh, in_specs=(spec,) * 3 + (of_tokens,) * 2, out_specs=spec)

    def program(q, k, v, dout, mask, ids):
        out, pull = jax.vjp(lambda *qkv: mapped(*qkv, mask, ids), q, k, v)
        return out, *pull(dout)

    arrays = [
        jax.device_put(x[:, order], NamedSharding(mesh, s))
        for x, s in [*((x.astype(np.float32), spec) for x in floats), (mask, of_tokens), (ids, of_tokens)]
    ]
    lowered = jax.jit(program).lower(*arrays)
    compiled = lowered.compile()
    out = [np.asarray(x)[:, np.argsort(order)] for x in compiled(*arrays)]
    with jax.enable_x64(True):
        expected, pull = jax.vjp(full, *floats[:3])
        expected = [expected, *pull(floats[3])]
        errors = [relative_error(a, b) for a, b in zip(out, expected, strict=True)]
    sizes = re.findall(r"\b(\d+)\b", " ".join(re.findall(r"\w\d+\[([\d,]+)\]", compiled.as_text())))
    # What both passes send is the same, and XLA may send it once on a CPU.
    sent = {"collective-permute": lowered.as_text().count("stablehlo.collective_permute")}
    found = collectives.count(compiled.as_text()) | sent
    return dict(errors=errors, collectives=found, is_spread=str(seq) not in sizes)


def example(code: str) -> dict[str, Any]:
    """A program of docs/meshes.md, with a small Qwen3 for a large one: whether what it computes is finite."""
    names: dict[str, Any] = {}
    config = qwen3.Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        num_layers=1,
        num_heads=8,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=128,
    )

    def load(_: str, sharding: Any) -> Any:
        return jax.device_put(qwen3.init(jax.random.key(0), config), sharding)

    with mock.patch.multiple(weights, load_qwen3_config=lambda _: config, load_qwen3=load):
        exec(code, names)
    results = ("logits", "gradients", "params", "out")
    arrays = jax.tree.leaves([names[name] for name in results if name in names])
    assert arrays and len(arrays[0].devices()) == jax.device_count()
    finite = all(bool(jnp.isfinite(x.astype(jnp.float32)).all()) for x in arrays)
    return dict(errors=[0.0 if finite else np.inf], collectives={}, is_spread=True)


def main() -> None:
    """Runs every case; what one raises is its result."""
    pallas_patches.share_contexts()
    pallas_patches.interpret_quickly()
    pallas_patches.collect_rarely()
    runs: dict[str, tuple[dict[str, int], Callable[[], dict[str, Any]]]] = {
        f"{kind}, {name}": (sent(case), functools.partial(measured, case, reference, kind))
        for (kind, name), (case, reference) in all_cases().items()
    }
    runs["loaded"] = {}, loaded
    for heads in (1, 2):
        runs[f"attention, {heads} heads of keys"] = {}, functools.partial(few_heads, heads)
    # Keys, values, mask and ids in each pass, and the gradients of two of them, to each of the other devices.
    passed = {"collective-permute": 3 * (4 + 4 + 2)}
    runs["ring, causal"] = passed, functools.partial(ring, causal=True, implementation="interpret")
    runs["ring"] = passed, functools.partial(ring, causal=False, implementation="xla")
    docs = (ROOT / "docs" / "meshes.md").read_text("utf-8")
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", docs, re.DOTALL)):
        runs[f"example {number}"] = {}, functools.partial(example, code)
    for name, (expected, run) in runs.items():
        try:
            result = run()
        except Exception:  # the other cases shall run
            result = dict(error=traceback.format_exc())
        print(json.dumps(dict(case=name, expected=expected) | result), flush=True)


if __name__ == "__main__":
    main()
