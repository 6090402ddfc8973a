"""The models on 1, 2, 4, ... devices: time, speed-up over one, collectives, memory of each.

The batch is split over the devices, the parameters by tensor parallelism, the sequence in a ring, or rows of
pairs. A result counts if it equals the result of one device. Time is wall time, of many queued calls on GPUs: the
devices work side by side.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.cases import qwen3 as qwen3_layer
from bench.measuring import collectives, environment, results, timing
from bench.measuring.contenders import LIMITS, RELATIVE
from bench.measuring.harness import Progress
from bench.measuring.results import Accuracy, Case, Entry, Family, Result
from bench.models import train_programs
from bench.reporting import tables
from pallas_models import gpt2, minilm, ops, qwen3, target, training, trimul

HELP = "the models on 1, 2, 4, ... devices: time, speed-up, collectives, memory"
NAME = "scaling"
SHOWN = "qwen3 tensor-parallel 8x2048 bf16 on 2"  # the case in README.md
AXIS = "devices"
FAMILIES: dict[str, Family] = {"pallas": "ours", "halves": "ours", "xla": "xla"}
COMPILED_AT_ONCE = 9
SENDERS = 8  # multiprocessors that are left to sums, which take 7 of symmetric buffers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Programs of the same operands on a mesh.

    Attributes:
      dtype: fp16 or bf16.
      contenders: functions of the operands, by name.
      options: of the compiler, by the names of those that have some.
      operands: makes them, in a program.
      spread: how they are spread: a prefix of their tree.
      compared: takes, from a contender's result, the array that is compared with one device's array.
      queue_s: as in `timing.Budget`. Devices begin and end a queue at different times: on 4 GPUs calls of 3.9 and
        30.6 ms took 4.2 and 32.4 in queues of three.
    """

    dtype: str
    contenders: dict[str, Callable[..., Any]]
    options: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    operands: Callable[[], tuple[Any, ...]]
    spread: tuple[Any, ...]
    compared: Callable[[Any], jax.Array] = lambda out: jax.tree.leaves(out)[0]
    queue_s: float = 0.05


def workloads(small: bool) -> dict[str, Callable[[Mesh], Workload]]:
    """By name what makes the workload for a mesh; small ones are for a CPU.

    Layers are Qwen3-8B's, steps train GPT-2 124M with AdamW, a ring is causal attention of one sequence.
    """
    key, dtype = jax.random.key(0), jnp.bfloat16
    tiny: dict[str, Any] = dict(hidden_size=64, num_layers=1, num_heads=4, intermediate_size=128) if small else {}
    bert = minilm.MiniLMConfig(**tiny)
    gpt = gpt2.GPT2Config(**tiny) if small else train_programs.gpt2_config()
    heads: dict[str, Any] = dict(num_kv_heads=4, head_dim=16) if small else {}
    qwen = qwen3.Qwen3Config(**tiny, **heads)
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation="xla" if small else "cudnn"
    )

    def batch(*sizes: int) -> tuple[int, ...]:
        return (8, 16) if small else sizes

    def vectors(sizes: tuple[int, ...], width: int) -> jax.Array:
        return jax.random.normal(key, (*sizes, width), dtype)

    def ids(sizes: tuple[int, ...], vocab_size: int) -> jax.Array:
        return jax.random.randint(key, sizes, 0, vocab_size)

    def data_parallel(
        function: Callable[..., Any], operands: Callable[[], Any], dtype: str = "bf16", axis: int = 0
    ) -> Any:
        """What makes the workload of parameters that all devices have, and data split by `axis`."""
        return lambda mesh: Workload(
            dtype=dtype,
            contenders={"pallas": function},
            operands=operands,
            spread=(NamedSharding(mesh, P()), NamedSharding(mesh, P(*[None] * axis, AXIS))),
        )

    def training_step(mesh: Mesh) -> Workload:
        """As docs/meshes.md has it: every gradient is summed over devices once."""
        optimizer = optax.adamw(1e-3, **train_programs.ADAMW)

        def loss(params: Any, ids: jax.Array) -> jax.Array:
            params = jax.lax.pcast(training.cast(params, dtype), AXIS, to="varying")
            return jax.lax.pmean(gpt2.loss(params, ids, config=gpt), AXIS)

        differentiate = jax.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P())

        def step(state: Any, ids: jax.Array) -> Any:
            params, moments = state
            value, gradients = differentiate(params, ids)
            updates, moments = optimizer.update(gradients, moments, params)
            return value, (optax.apply_updates(params, updates), moments)

        def operands() -> Any:
            params = gpt2.init(key, gpt)
            return (params, optimizer.init(params)), ids(batch(64, 1024), gpt.vocab_size)

        return dataclasses.replace(data_parallel(step, operands)(mesh), queue_s=0.25)

    def tensor_parallel(mesh: Mesh) -> Workload:
        grouped = qwen3.GroupedQwen3Config(**dataclasses.asdict(qwen), head_groups=mesh.size)
        one = dataclasses.replace(qwen, num_layers=1, vocab_size=mesh.size)

        def operands() -> Any:
            params, _ = qwen3.group_heads(qwen3.init_layer(key, qwen, dtype=dtype), qwen, mesh.size)
            return params, vectors(batch(8, 2048), qwen.hidden_size)

        layer = functools.partial(qwen3.layer, config=grouped)

        def halves(params: Any, x: jax.Array) -> list[jax.Array]:
            """As docs/meshes.md has it: sums of one go beside the kernels of the other."""
            with target.leave_cores(0 if mesh.size == 1 else SENDERS, mesh):
                return [layer(params, jax.lax.optimization_barrier(half)) for half in jnp.split(x, 2)]

        def plain(params: Any, x: jax.Array) -> jax.Array:
            return qwen3_layer.plain(x, *jax.tree.leaves(params), attend=attend, config=grouped)

        return Workload(
            dtype="bf16",
            contenders={"pallas": layer, "halves": halves, "xla": plain},
            options={} if small else {"halves": {"xla_gpu_experimental_enable_nccl_symmetric_buffers": True}},
            operands=operands,
            spread=(qwen3.shardings(one, mesh, tensor=AXIS)["layers"]["0"], NamedSharding(mesh, P())),
            compared=lambda out: jnp.concatenate(jax.tree.leaves(out)),
        )

    def ring(mesh: Mesh, *, backward: bool) -> Workload:
        seq, heads, head_dim = (64, 4, 16) if small else (32768, 16, 128)
        order = ops.zigzag_order(seq, mesh.size)
        spec = P(None, AXIS)
        attention = functools.partial(ops.attention, causal=True)
        if mesh.size > 1:
            attention = jax.shard_map(
                functools.partial(ops.ring_attention, axis_name=AXIS, causal=True),
                mesh=mesh,
                in_specs=(spec,) * 3,
                out_specs=spec,
            )

        def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
            out, pull = jax.vjp(attention, q, k, v)
            return *pull(dout), out

        def operands() -> tuple[jax.Array, ...]:
            keys = jax.random.split(key, 4 if backward else 3)
            return tuple(jax.random.normal(k, (1, seq, heads, head_dim), dtype)[:, order] for k in keys)

        return Workload(
            dtype="bf16",
            contenders={"pallas": gradients if backward else attention},
            operands=operands,
            spread=(NamedSharding(mesh, spec),) * (4 if backward else 3),
            compared=lambda out: jax.tree.leaves(out)[0][:, np.argsort(order)],
        )

    def pairs() -> tuple[Any, jax.Array]:
        channels = 32 if small else 128
        n = 64 if small else 2048
        params = trimul.init(key, trimul.TriMulConfig(channels=channels, hidden=channels), dtype=jnp.float16)
        return params, vectors((1, n, n), channels)

    return {
        "qwen3 tensor-parallel 8x2048": tensor_parallel,
        "ring 1x32768x16x128": functools.partial(ring, backward=False),
        "ring+gradient 1x32768x16x128": functools.partial(ring, backward=True),
        "trimul rows 1x2048x128": data_parallel(
            functools.partial(trimul.trimul, direction="outgoing"), pairs, axis=1
        ),
        "gpt2 step 64x1024": training_step,
        "minilm 2048x128": data_parallel(
            lambda p, ids: minilm.embed(p, ids, jnp.ones_like(ids), config=bert),
            lambda: (minilm.init(key, bert, dtype=jnp.float16), ids(batch(2048, 128), bert.vocab_size)),
            "fp16",
        ),
        "gpt2 block 64x1024": data_parallel(
            functools.partial(gpt2.block, num_heads=gpt.num_heads),
            lambda: (gpt2.init_block(key, gpt, dtype=dtype), vectors(batch(64, 1024), gpt.hidden_size)),
        ),
        "qwen3 layer 16x2048": data_parallel(
            functools.partial(qwen3.layer, config=qwen),
            lambda: (qwen3.init_layer(key, qwen, dtype=dtype), vectors(batch(16, 2048), qwen.hidden_size)),
        ),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A contender compiled for a mesh, and the seconds that took."""

    executable: Any
    seconds: float

    @classmethod
    def of(cls, workload: Workload, name: str) -> "Program":
        """Compiles a contender of a workload, whose operands need not be there."""
        start = time.perf_counter()
        jitted = jax.jit(workload.contenders[name], in_shardings=workload.spread)
        executable = jitted.lower(*jax.eval_shape(workload.operands)).compile(workload.options.get(name))
        return cls(executable=executable, seconds=time.perf_counter() - start)

    def entry(self, name: str) -> Entry:
        """What is known of it without a run."""
        memory = self.executable.memory_analysis()
        size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        sent = collectives.count(self.executable.as_text())
        return Entry(
            name=name,
            family=FAMILIES[name],
            status="ok",
            compile_s=self.seconds,
            metrics={kind: float(number) for kind, number in sent.items()},
            peak_bytes=float(size),
        )


def measured(name: str, by_count: Mapping[int, Workload], budget: timing.Budget) -> Iterator[Case]:
    """Compiles the workloads of a model, by the number of devices, then measures one after another."""
    with concurrent.futures.ThreadPoolExecutor(COMPILED_AT_ONCE) as pool:
        programs = {
            count: {contender: pool.submit(Program.of, workload, contender) for contender in workload.contenders}
            for count, workload in by_count.items()
        }
        makers = {
            count: pool.submit(lambda w: jax.jit(w.operands, out_shardings=w.spread).lower().compile(), workload)
            for count, workload in by_count.items()
        }
    expected: jax.Array | None = None  # what the first contender gives on one device
    for count, workload in by_count.items():
        operands = makers[count].result()()
        entries: dict[str, Entry] = {}
        ready: dict[str, timing.Candidate] = {}
        for contender, compiled in programs[count].items():
            entry = Entry(name=contender, family=FAMILIES[contender], status="ok")
            try:
                program = compiled.result()
                found = workload.compared(program.executable(*operands))
                expected = found if expected is None else expected
                error = RELATIVE.of(found, jax.device_put(expected, found.sharding))
            except Exception as raised:  # reported as this contender's result
                message = f"{type(raised).__name__}: {raised}"[:300]
                entries[contender] = dataclasses.replace(entry, status="failed", message=message)
                continue
            limit = LIMITS[workload.dtype] * 2**0.5  # of two results, each within the limit of the right one
            accuracy = Accuracy(measure=RELATIVE.name, value=error, limit=limit)
            entry = dataclasses.replace(program.entry(contender), accuracy=accuracy)
            if error > limit:
                message = f"{RELATIVE.name} {error:.1e} against one device; the limit is {limit:.1e}"
                entry = dataclasses.replace(entry, status="wrong", message=message)
            else:
                ready[contender] = candidate(functools.partial(program.executable, *operands))
            entries[contender] = entry
        queues = dataclasses.replace(budget, queue_s=workload.queue_s)
        for contender, outcome in timing.measure(ready, queues, on_device=False).items():
            given = (
                dict(status="failed", message=str(outcome)[:300])
                if isinstance(outcome, Exception)
                else dict(wall=outcome.wall)
            )
            entries[contender] = dataclasses.replace(entries[contender], **given)
        yield Case(
            label=f"{name} {workload.dtype} on {count}",
            dtype=workload.dtype,
            shape={AXIS: count},
            flop=None,
            entries=list(entries.values()),
        )


def candidate(run: Callable[[], Any]) -> timing.Candidate:
    """What is timed: many calls queued; on a CPU one at a time, as those queued may wait for each other."""
    call = run if environment.has_gpu() else lambda: jax.block_until_ready(run())
    return timing.Candidate(call=lambda _: call(), wait=jax.block_until_ready)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench scaling`."""
    parser.add_argument("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--show-results", action="store_true", help="print the table, not only the file's name")
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--models", default="", help="parts of the names of some models, such as ring,tensor")


def run(args: argparse.Namespace) -> int:
    """Measures and saves; returns 1 if something of ours failed."""
    say = Progress().say
    gpu = environment.has_gpu()
    counts = [2**i for i in range(jax.device_count().bit_length())]
    meshes = {
        count: jax.make_mesh((count,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
        for count in counts
    }
    found = workloads(small=not gpu)
    models = {name: make for name, make in found.items() if any(part in name for part in args.models.split(","))}
    result = results.begun(NAME, {})
    budget = dataclasses.replace(timing.QUICK if args.quick else timing.STANDARD, wall_samples=7)
    say(f"{environment.device()}; {len(models)} models on {', '.join(map(str, counts))} devices")
    for name, make in models.items():
        for case in measured(name, {count: make(mesh) for count, mesh in meshes.items()}, budget):
            result.cases.append(case)
            results.save(result, args.output)  # kept, should the run be interrupted
            done = f"{len(result.cases)} of {len(models) * len(counts)}"
            say(f"{done}: {case.label}: {tables.summary(case, tables.wall)}")
    if gpu and not (args.quick or args.models):
        result = results.complete(result, args.output)
    if args.show_results:
        print(f"\n{table(result)}\n\n{tables.conditions(result)}")
    for line in tables.failures(result):
        print(line)
    say(f"results: {results.path_of(result, args.output)}")
    return int(any(e.status != "ok" for case in result.cases for e in case.entries if e.family == "ours"))


def headline(result: Result) -> tables.Headline | None:
    """Ours against XLA's own partitioning."""
    found = {
        case.label: (ours[1], xla[1])
        for case in result.cases
        if case.shape[AXIS] > 1
        and (ours := tables.best(case, "ours", tables.wall))
        and (xla := tables.best(case, "xla", tables.wall))
    }
    if not found:
        return None
    ratios = {label: xla.median_us / ours.median_us for label, (ours, xla) in found.items()}
    label = SHOWN if SHOWN in found else next(iter(found))
    ours, xla = (f"{tables.format_us(time)} us" for time in found[label])
    mean = tables.mean(list(ratios.values()))
    return tables.Headline(case=label, ours=ours, baseline=f"XLA, {xla}", ratio=ratios[label], mean=mean)


def table(result: Result) -> str:
    """Time, speed-up, collectives and memory of every contender, a row each."""
    alone: dict[tuple[str, str], float] = {}
    rows = []
    for case in result.cases:
        model, _, devices = case.label.rpartition(" on ")
        for entry in case.entries:
            if entry.wall is None:
                continue
            speedup = alone.setdefault((model, entry.name), entry.wall.median_us) / entry.wall.median_us
            sent = ", ".join(f"{number:.0f} {kind}" for kind, number in entry.metrics.items()) or "nothing"
            memory = "-" if entry.peak_bytes is None else f"{entry.peak_bytes / 1e9:.2f}"
            figures = tables.format_us(entry.wall), f"{speedup:.2f}", sent, memory
            rows.append([model if entry.name == "pallas" else f"{model}, {entry.name}", devices, *figures])
    return tables.markdown(["model", "devices", "us", "times one", "sent", "GB a device"], rows) if rows else ""
