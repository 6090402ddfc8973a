"""The models on 1, 2, 4, ... devices: time, efficiency, collectives, memory of each.

The batch is split over the devices under plain `jax.jit`, or the parameters by tensor parallelism. Efficiency is
the time on one device over n times that on n devices. Time is wall time, of many queued calls on GPUs.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.measuring import collectives, environment, timing
from bench.reporting import tables
from pallas_models import files, gpt2, minilm, qwen3

HELP = "the models on 1, 2, 4, ... devices: time, efficiency, collectives, memory"
AXIS = "devices"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """`function(params, data)` on a mesh.

    Attributes:
      params: makes the parameters of a mesh, where they are on it.
      data: an array whose first axis is the batch.
      split: whether the batch is split.
    """

    function: Callable[..., jax.Array]
    params: Callable[[jax.sharding.Mesh], Any]
    data: jax.Array
    split: bool = True


def workloads(small: bool) -> dict[str, Callable[[int], Workload]]:
    """By name what makes the workload of so many devices; small ones are for a CPU."""
    key, dtype = jax.random.key(0), jnp.bfloat16
    tiny: dict[str, Any] = dict(hidden_size=64, num_layers=1, num_heads=4, intermediate_size=128) if small else {}
    bert = minilm.MiniLMConfig(**tiny)
    block = gpt2.GPT2Config(**tiny)
    layer = qwen3.Qwen3Config(**tiny, **(dict(num_kv_heads=4, head_dim=16) if small else {}))

    def everywhere(params: Any) -> Callable[[jax.sharding.Mesh], Any]:
        return lambda mesh: jax.device_put(params, NamedSharding(mesh, P()))

    def vectors(batch: int, seq: int, width: int) -> jax.Array:
        return jax.random.normal(key, (8, 16, width) if small else (batch, seq, width), dtype)

    def of_minilm(devices: int) -> Workload:
        ids = jax.random.randint(key, (8, 16) if small else (2048, 128), 0, bert.vocab_size)
        return Workload(
            function=lambda p, ids: minilm.embed(p, ids, jnp.ones_like(ids), config=bert),
            params=everywhere(minilm.init(key, bert, dtype=jnp.float16)),
            data=ids,
        )

    def of_block(devices: int) -> Workload:
        return Workload(
            function=functools.partial(gpt2.block, num_heads=block.num_heads),
            params=everywhere(gpt2.init_block(key, block, dtype=dtype)),
            data=vectors(64, 1024, block.hidden_size),
        )

    def of_layer(devices: int) -> Workload:
        return Workload(
            function=functools.partial(qwen3.layer, config=layer),
            params=everywhere(qwen3.init_layer(key, layer, dtype=dtype)),
            data=vectors(16, 2048, layer.hidden_size),
        )

    def of_tensors(devices: int) -> Workload:
        params, grouped = qwen3.group_heads(qwen3.init_layer(key, layer, dtype=dtype), layer, devices)
        one = dataclasses.replace(layer, num_layers=1, vocab_size=devices)

        def place(mesh: jax.sharding.Mesh) -> Any:
            return jax.device_put(params, qwen3.shardings(one, mesh, tensor=AXIS)["layers"]["0"])

        data = vectors(8, 2048, layer.hidden_size)
        return Workload(
            function=functools.partial(qwen3.layer, config=grouped), params=place, data=data, split=False
        )

    return {
        "minilm": of_minilm,
        "gpt2 block": of_block,
        "qwen3 layer": of_layer,
        "qwen3 layer, tensor parallel": of_tensors,
    }


def measure(workload: Workload, devices: int, budget: timing.Budget) -> dict[str, Any]:
    """Microseconds, collectives, and MiB of operands, results and temporaries on each of so many devices."""
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    data = jax.device_put(workload.data, NamedSharding(mesh, P(AXIS) if workload.split else P()))
    params = workload.params(mesh)
    compiled = jax.jit(workload.function).lower(params, data).compile()
    on_gpu = environment.has_gpu()

    def call(_: int) -> jax.Array:
        out = compiled(params, data)
        return out if on_gpu else out.block_until_ready()  # queued programs of a CPU may wait for each other

    found = timing.measure({"": timing.Candidate(call=call, wait=jax.block_until_ready)}, budget, on_device=False)[
        ""
    ]
    if isinstance(found, Exception):
        raise found
    memory = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    return dict(us=found.wall.median_us, collectives=collectives.count(compiled.as_text()), mebibytes=size / 2**20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench scaling`."""
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    parser.add_argument("--quick", action="store_true", help="fewer samples")


def run(args: argparse.Namespace) -> int:
    """Measures and prints a table; returns the exit code."""
    budget = timing.QUICK if args.quick else timing.STANDARD
    counts = [2**i for i in range(jax.device_count().bit_length())]
    figures: dict[str, dict[int, dict[str, Any]]] = {}
    rows = []
    for name, make in workloads(small=not environment.has_gpu()).items():
        figures[name] = {}
        for devices in counts:
            found = measure(make(devices), devices, budget)
            figures[name][devices] = found
            speedup = figures[name][1]["us"] / found["us"]
            sent = ", ".join(f"{n} {kind}" for kind, n in found["collectives"].items()) or "none"
            cells = (
                f"{found['us']:.0f}",
                f"{speedup:.2f}",
                f"{speedup / devices:.0%}",
                sent,
                f"{found['mebibytes']:.0f}",
            )
            rows.append((name, str(devices), *cells))
    print(
        tables.markdown(("model", "devices", "us", "speed-up", "efficiency", "collectives", "MiB a device"), rows)
    )
    if args.output is not None:
        files.write(args.output, json.dumps(dict(environment=environment.describe(), figures=figures), indent=2))
    return 0
