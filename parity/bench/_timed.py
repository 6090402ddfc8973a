"""`python -m parity timed FOLDER`: what benchmarks time of this library, and what users call, lowered anywhere.

Results of benchmarks need not be measured again because a module that they time has one function more. Lower the
library of their commit by this program, and then today's:

    python -m parity timed ../before                                        # in a copy with that commit's library
    python -m parity timed build/after --compare build/before --confirm COMMIT

If nothing differs, the results of COMMIT count as results of today's code (`bench.measuring.results.confirm`).
Programs are as `parity.support.lowered` writes them: its own that name no implementation, MiniLM's among them, and
those of benchmarks.
"""

import itertools
import re
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from bench.__main__ import BENCHMARKS, module_of
from bench.cases import scaling, startup, train
from bench.measuring import gradients, results
from bench.measuring.harness import DTYPES, OURS, Benchmark, Workload, shape_text
from bench.models import startup_programs, train_programs
from pallas_models import gpt2, minilm
from parity.support import lowered
from parity.support.common import HOPPER
from parity.support.lowered import Program

MESHES = 1, 2  # numbers of devices


def harnessed() -> Iterator[Benchmark]:
    """The benchmarks whose workloads need nothing but a shape."""
    modules = (module_of(name) for name in BENCHMARKS)
    found = (getattr(module, "BENCHMARK", None) for module in modules)
    yield from (benchmark for benchmark in found if benchmark is not None and benchmark.workload is not None)


def programs() -> Iterator[Program]:
    """What users call without naming an implementation, and what benchmarks time."""
    named = re.compile("/(mosaic|triton)(/gradient)?$")
    yield from (program for program in lowered.programs() if not named.search(program.name))
    yield from of_benchmarks()


def of_benchmarks() -> Iterator[Program]:
    """All of ours on a GPU: forward, and with the gradient where that is measured."""
    for benchmark in harnessed():
        for dtype, shape in itertools.product(benchmark.dtypes, benchmark.shapes):
            assert benchmark.workload is not None
            forward = benchmark.workload(dtype, shape)
            for workload, mode in ((forward, ""), *both(forward, dtype)):
                name = f"bench/{benchmark.name}/{shape_text(shape)}{mode} {dtype}"
                yield from of_ours(name, workload)
    yield from training_steps()
    for of in startup.PROGRAMS:
        dtype = DTYPES[of.dtype].__name__
        yield Program(f"bench/startup/{of.label}", *startup_programs.program(of.model, dtype, of.sizes))
    for count in MESHES:
        yield from on_devices(count)


def both(workload: Workload, dtype: str) -> Iterator[tuple[Workload, str]]:
    """The workload with its backward pass, if it has one."""
    if workload.gradient is not None:
        yield gradients.of(workload, dtype, "both"), "+both"


def of_ours(name: str, workload: Workload) -> Iterator[Program]:
    """What the contenders of this library run."""
    for contender in workload.contenders:
        if contender.family in OURS and not contender.skip:
            inputs = jax.eval_shape(lambda: contender.prepared(workload.inputs(0)))  # noqa: B023 called at once
            yield Program(f"{name}/{contender.name}", contender.load(), (*contender.params, *inputs))


def training_steps() -> Iterator[Program]:
    """Losses and gradients of GPT-2 and MiniLM."""
    gpt, bert = train_programs.gpt2_config(), minilm.MiniLMConfig()
    losses = {
        "gpt2": (train_programs.gpt2_ours(gpt, jnp.bfloat16), gpt2.init, gpt, train_programs.text),
        "minilm": (train_programs.minilm_ours(bert, jnp.bfloat16), minilm.init, bert, train_programs.pairs),
    }
    for model, (loss, init, config, batch) in losses.items():
        params = jax.eval_shape(lambda: init(jax.random.key(0), config))  # noqa: B023 called at once
        for shape in train.SHAPES[model]:
            name = f"bench/train/{model} {shape_text(shape)}"
            yield Program(name, jax.value_and_grad(loss), (params, *batch(config, *shape, 0)))


def on_devices(count: int) -> Iterator[Program]:
    """The models on devices that are not there; those that need them there to be lowered are left out."""
    gpu = AbstractDevice(device_kind=HOPPER[0], num_cores=HOPPER[1], platform="gpu")
    mesh = AbstractMesh((count,), (scaling.AXIS,), axis_types=(AxisType.Auto,), abstract_device=gpu)
    for name, make in scaling.workloads(small=False).items():
        workload = make(mesh)
        function = jax.jit(workload.contenders["pallas"], in_shardings=workload.spread)
        yield Program(f"bench/scaling/{name} on {count}", function, jax.eval_shape(workload.operands))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = lowered.parser_of("timed", "Lower what benchmarks time, compare it, and confirm results.")
    parser.add_argument("--confirm", metavar="COMMIT", help="results of that commit count as of today's code")
    args = parser.parse_args(arguments)
    if args.confirm and (args.only or args.compare is None):
        parser.error("--confirm takes all programs of the commit in --compare")
    found = lowered.chosen(args, programs())
    lines = lowered.compared(args, found)
    if args.confirm and any(str(value).startswith("ModuleNotFoundError: ") for value in found.values()):
        print("not confirmed: without JAX's CUDA plugin kernels of Mosaic are not lowered")
        return 1
    if args.confirm and not lines:
        print(*results.confirm(results.DEFAULT_FOLDER, args.confirm), sep="\n")
    return int(bool(lines))
