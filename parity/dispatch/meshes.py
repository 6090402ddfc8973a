"""Every operation on a mesh of 8 CPU devices: `python -m parity.dispatch.meshes` prints JSON, a line a case.

A process has the devices that it begins with, so that `test_meshes.py` runs this in one of its own.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import weights
from pallas_models import gpt2, minilm, ops, qwen3, trimul
from pallas_models.kernels.schedules import trimul_backward
from pallas_models.kernels.schedules.trimul import ROW_TILE
from pallas_models.ops import trimul as trimul_op
from parity import ROOT
from parity.cases import OPS, Spread, Without
from parity.support import pallas_patches
from parity.support.common import array, float64, normal, random_mask, random_params, relative_error

DEVICES = {"data": 4, "model": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function whose arrays are spread by `specs`.

    Attributes:
      function: a function of the arrays, whose result is an array.
      floats: how many of the arrays, the first ones, are differentiated.
      result: how the result is spread.
      sums: how many arrays are added up over devices, in forward and gradient together.
      swaps: of how many arrays each device sends every other one a part.
      of_part: the function of a device's part, in a `shard_map`, if it is another.
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
        """The results on one device, computed once for all kinds of mesh and all kernels."""
        return jax.jit(with_gradient(self))(*self.arrays)


def with_gradient(program: Program) -> Callable[..., tuple[jax.Array, ...]]:
    """A function that gives result and gradients, for a cotangent that depends on every element of the result."""

    def function(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        def of_floats(*floats: jax.Array) -> jax.Array:
            return program.function(*floats, *arrays[program.floats :])

        out, pull = jax.vjp(of_floats, *arrays[: program.floats])
        return out, *pull(jnp.cos(out))

    return function


def spread_calls() -> Mapping[str, Spread]:
    """The spread calls of every op, from its case file, by the names of op and call."""
    return {
        f"{case.name} {spread.call.name}": spread
        for case in OPS.values()
        if not isinstance(case.spread, Without)
        for spread in case.spread(np.random.default_rng(0))
    }


def program_of(spread: Spread, implementation: str) -> Program:
    """The call in an implementation."""
    call = spread.call
    return Program(
        function=call(implementation),
        arrays=call.arrays(),
        floats=call.floats,
        specs=spread.specs,
        result=spread.result,
        sums=spread.sums,
        swaps=spread.swaps,
        of_part=call(implementation, **spread.of_part) if spread.of_part else None,
    )


def model_programs(implementation: str | None) -> dict[str, Program]:
    """Every model with its batch spread, which adds up nothing but gradients."""
    rng = np.random.default_rng(1)
    sizes = dict(vocab_size=40, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=16)
    bert, gpt = minilm.MiniLMConfig(**sizes), gpt2.GPT2Config(**sizes)
    qwen = qwen3.Qwen3Config(**sizes, num_kv_heads=1, head_dim=16)
    pair = trimul.TriMulConfig(channels=16, hidden=16)
    ids = array(rng.integers(0, 40, (4, 6)), "int32")
    options: dict[str, Any] = dict(implementation=implementation)

    def program(function, params, data, result, sums=0, specs=None):
        leaves, tree = jax.tree.flatten(params)
        return Program(
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

        return program(logits, params, ids, P("data", None, "model"), 3, specs)

    params = random_params(gpt, init=gpt2.init)
    return {
        "minilm": program(
            lambda p, i: minilm.embed(p, i, jnp.ones_like(i), config=bert, **options),
            random_params(bert),
            ids,
            P("data"),
        ),
        "gpt2": program(lambda p, i: gpt2.logits(p, i, config=gpt, **options), params, ids, P("data")),
        # Each parameter once and the embeddings twice, from where they are looked up and from the head; the loss
        # and the number of tokens.
        "gpt2 loss": program(
            lambda p, i: gpt2.loss(p, i, config=gpt, **options), params, ids, P(), len(jax.tree.leaves(params)) + 3
        ),
        "qwen3": program(
            lambda p, i: qwen3.logits(p, i, config=qwen, **options),
            random_params(qwen, init=qwen3.init),
            ids,
            P("data"),
        ),
        "gpt2 tensor parallel": tensor_parallel(gpt2, gpt),
        "qwen3 tensor parallel": tensor_parallel(qwen3, dataclasses.replace(qwen, num_kv_heads=2)),
        "trimul": program(
            lambda p, x: trimul.trimul(p, x, direction="incoming", **options),
            random_params(pair, init=trimul.init),
            normal(rng, 4, 3, 3, 16),
            P("data"),
        ),
    }


def spread_over(mesh: jax.sharding.Mesh, program: Program) -> list[jax.Array]:
    """The arrays as the program has them; NumPy cuts them, as JAX compiles a program for each shape to do so."""
    return [
        jax.device_put(np.asarray(x), NamedSharding(mesh, s))
        for x, s in zip(program.arrays, program.specs, strict=True)
    ]


def measured(program: Program, reference: Program, kind: str) -> dict[str, Any]:
    """The relative errors of result and gradients, the collectives, and whether the result is spread right."""
    axis_type = AxisType.Explicit if kind == "explicit" else AxisType.Auto
    mesh = jax.make_mesh(tuple(DEVICES.values()), tuple(DEVICES), axis_types=(axis_type,) * len(DEVICES))
    arrays = spread_over(mesh, program)
    function = with_gradient(program)
    if kind == "shard_map":
        function = with_gradient(dataclasses.replace(program, function=program.of_part or program.function))
        out_specs = (program.result, *program.specs[: program.floats])
        function = jax.shard_map(function, mesh=mesh, in_specs=program.specs, out_specs=out_specs)
    with jax.set_mesh(mesh) if kind == "explicit" else contextlib.nullcontext():
        compiled = jax.jit(function).lower(*arrays).compile()
        out = compiled(*arrays)
    return dict(
        errors=[relative_error(a, b) for a, b in zip(out, reference.expected, strict=True)],
        collectives=collectives(compiled.as_text()),
        is_spread=out[0].sharding.is_equivalent_to(NamedSharding(mesh, program.result), out[0].ndim),
    )


def collectives(text: str) -> dict[str, int]:
    """How many arrays the collectives of a compiled program take, by the kind of collective."""
    found: collections.Counter[str] = collections.Counter()
    kinds = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    for kind, operands in re.findall(rf"\b({kinds})(?:-start)?\(([^)]*)\)", text):
        found[kind] += operands.count("%")
    return dict(found)


def sent(program: Program) -> dict[str, int]:
    """The collectives that are expected."""
    return {kind: n for kind, n in (("all-reduce", program.sums), ("all-to-all", program.swaps)) if n}


def all_programs() -> Mapping[tuple[str, str], tuple[Program, Program]]:
    """By the kind of mesh and the name, with the same call that one device makes without kernels.

    A call on an explicit mesh is a `shard_map` of a device's part, so that few calls run on both.
    """
    of_ops, interpreted, plain = spread_calls(), model_programs("interpret"), model_programs(None)
    references = {name: program_of(spread, "xla") for name, spread in of_ops.items()} | plain
    loss = plain.pop("gpt2 loss")

    def of_part(*arrays: jax.Array) -> jax.Array:
        """As docs/meshes.md has a step."""
        *params, ids = arrays
        return jax.lax.pmean(loss.function(*jax.lax.pcast(params, "data", to="varying"), ids), "data")

    chosen = (
        {
            (kind, name): program_of(spread, "interpret")
            for name, spread in of_ops.items()
            for kind in ("jit", *spread.kinds)
        }
        | {("jit", name): interpreted[name] for name in interpreted if name not in ("gpt2", "qwen3", "trimul")}
        | {
            (kind, name): program
            for kind in ("explicit", "shard_map")
            for name, program in plain.items()
            if "tensor" not in name
        }
        # Both gradients of the embeddings are added before they are summed; in a shard_map tokens are not counted.
        | {("explicit", "gpt2 loss"): dataclasses.replace(loss, sums=loss.sums - 1)}
        | {("shard_map", "gpt2 loss"): dataclasses.replace(loss, of_part=of_part, sums=loss.sums - 2)}
    )
    return {key: (program, references[key[1]]) for key, program in chosen.items()}


def loaded() -> dict[str, Any]:
    """A checkpoint read to a mesh, with heads grouped there: each device has its part of each."""
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


@contextlib.contextmanager
def keeping_tiles() -> Iterator[None]:
    """The triangle update keeps whole tiles for its gradient, as it does on Hopper GPUs.

    The interpreter of Mosaic's kernels does not run where XLA partitions a program.
    """
    op, kernels, options = trimul_op._OP, trimul_backward._triton(None), trimul_backward.keeping_tiles
    backward = tuple(dataclasses.replace(b, options=options) if b.keeps else b for b in op.backward)
    kernels = dataclasses.replace(kernels, forward=dataclasses.replace(kernels.forward, tile=ROW_TILE))
    with (
        mock.patch.object(trimul_op, "_OP", dataclasses.replace(op, backward=backward)),
        mock.patch.object(trimul_backward, "_triton", lambda _: kernels),
    ):
        yield


def in_tiles(name: str, reference: Program) -> dict[str, Any]:
    """A call of the triangle update that keeps whole tiles."""
    with keeping_tiles():
        return measured(program_of(spread_calls()[name], "interpret"), reference, "jit")


def forward_in_tiles() -> dict[str, Any]:
    """A program of the forward pass alone, whose devices share pairs: whether what it keeps is whole tiles."""
    program = program_of(spread_calls()["triangle_update rows"], "interpret")
    mesh = jax.make_mesh(tuple(DEVICES.values()), tuple(DEVICES), axis_types=(AxisType.Auto,) * len(DEVICES))
    arrays = spread_over(mesh, program)
    with keeping_tiles():
        compiled = jax.jit(functools.partial(jax.vjp, program.function)).lower(*arrays).compile()
    kept = [x for x in jax.tree.leaves(compiled(*arrays)) if x.shape[1:] in ((8, 16, 64), (8, 32, 64))]
    errors = [float(jnp.max(jnp.abs(x))) for x in kept]
    return dict(errors=errors, collectives=collectives(compiled.as_text()), is_spread=len(kept) == 3)


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


def loop() -> dict[str, Any]:
    """A product with the Hessian of a loop of kernels, each device with a part of the rows."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(4)
    arrays = normal(rng, 8, 32), normal(rng, 32)

    def loss(implementation: str | None, x: jax.Array, scale: jax.Array) -> jax.Array:
        step = lambda x, _: (ops.rms_norm(x, scale, implementation=implementation), None)  # noqa: E731
        return jnp.sum(jnp.sin(jax.lax.scan(step, x, None, length=3)[0]))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    def spread(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jax.lax.psum(loss("interpret", x, scale), "data")

    def product(f: Callable[..., jax.Array]) -> Any:
        return jax.jit(lambda *arrays: jax.jvp(jax.grad(f, (0, 1)), arrays, arrays)[1])(*arrays)

    pairs = zip(product(spread), product(functools.partial(loss, "xla")), strict=True)
    return dict(errors=[relative_error(out, expected) for out, expected in pairs], collectives={}, is_spread=True)


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
    found = collectives(compiled.as_text()) | sent
    return dict(errors=errors, collectives=found, is_spread=str(seq) not in sizes)


def example(code: str) -> dict[str, Any]:
    """A program of docs/meshes.md, with a small Qwen3 for a large one: whether its results are finite."""
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
    finite = all(np.isfinite(float64(x)).all() for x in arrays)  # for which JAX would compile three programs
    return dict(errors=[0.0 if finite else np.inf], collectives={}, is_spread=True)


def main() -> None:
    """Runs every case; what one raises is its result."""
    pallas_patches.apply(on_gpu=False)
    pallas_patches.collect_rarely()
    programs = all_programs()
    runs: dict[str, tuple[dict[str, int], Callable[[], dict[str, Any]]]] = {
        f"{kind}, {name}": (sent(program), functools.partial(measured, program, reference, kind))
        for (kind, name), (program, reference) in programs.items()
    }
    runs["loaded"] = {}, loaded
    for name in ("rows", "rows and columns"):
        name = f"triangle_update {name}"
        tiled = functools.partial(in_tiles, name, programs["jit", name][1])
        runs[f"jit, {name}, in tiles"] = runs[f"jit, {name}"][0], tiled
    runs["forward pass in tiles"] = {"all-to-all": 16}, forward_in_tiles  # left, right and sums, in two groups
    for heads in (1, 2):
        runs[f"attention, {heads} heads of keys"] = {}, functools.partial(few_heads, heads)
    runs["loop, again"] = {}, loop
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
