"""The programs of this library that benchmarks time, to be lowered: `parity.support.lowered`.

What embeds sentences is in `parity.support.lowered` itself.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from bench.__main__ import BENCHMARKS, module_of
from bench.cases import scaling, startup, train
from bench.measuring import gradients
from bench.measuring.harness import DTYPES, OURS, Benchmark, Workload, shape_text
from bench.models import startup_programs, train_programs
from pallas_models import gpt2, minilm
from parity.support.common import HOPPER

MESHES = 1, 2  # numbers of devices

Timed = tuple[str, Any, tuple[Any, ...]]  # a name, a function, its arguments without values


def harnessed() -> Iterator[Benchmark]:
    """The benchmarks whose workloads need nothing but a shape."""
    modules = (module_of(name) for name in BENCHMARKS)
    found = (getattr(module, "BENCHMARK", None) for module in modules)
    yield from (benchmark for benchmark in found if benchmark is not None and benchmark.workload is not None)


def programs() -> Iterator[Timed]:
    """All of ours on a GPU: forward, and with the gradient where that is measured."""
    for benchmark in harnessed():
        for dtype, shape in itertools.product(benchmark.dtypes, benchmark.shapes):
            assert benchmark.workload is not None
            forward = benchmark.workload(dtype, shape)
            for workload, mode in ((forward, ""), *both(forward, dtype)):
                name = f"{benchmark.name}/{shape_text(shape)}{mode} {dtype}"
                yield from of_ours(name, workload)
    yield from training_steps()
    for of in startup.PROGRAMS:
        dtype = DTYPES[of.dtype].__name__
        yield f"startup/{of.label}", *startup_programs.program(of.model, dtype, of.sizes)
    for count in MESHES:
        yield from on_devices(count)


def both(workload: Workload, dtype: str) -> Iterator[tuple[Workload, str]]:
    """The workload with its backward pass, if it has one."""
    if workload.gradient is not None:
        yield gradients.of(workload, dtype, "both"), "+both"


def of_ours(name: str, workload: Workload) -> Iterator[Timed]:
    """What the contenders of this library run."""
    for contender in workload.contenders:
        if contender.family in OURS and not contender.skip:
            inputs = jax.eval_shape(lambda: contender.prepared(workload.inputs(0)))  # noqa: B023 called at once
            yield f"{name}/{contender.name}", contender.load(), (*contender.params, *inputs)


def training_steps() -> Iterator[Timed]:
    """Losses and gradients of GPT-2 and MiniLM."""
    gpt, bert = train_programs.gpt2_config(), minilm.MiniLMConfig()
    losses = {
        "gpt2": (train_programs.gpt2_ours(gpt, jnp.bfloat16), gpt2.init, gpt, train_programs.text),
        "minilm": (train_programs.minilm_ours(bert, jnp.bfloat16), minilm.init, bert, train_programs.pairs),
    }
    for model, (loss, init, config, batch) in losses.items():
        params = jax.eval_shape(lambda: init(jax.random.key(0), config))  # noqa: B023 called at once
        for shape in train.SHAPES[model]:
            name = f"train/{model} {shape_text(shape)}"
            yield name, jax.value_and_grad(loss), (params, *batch(config, *shape, 0))


def on_devices(count: int) -> Iterator[Timed]:
    """The models on devices that are not there; those that need them there to be lowered are left out."""
    gpu = AbstractDevice(device_kind=HOPPER[0], num_cores=HOPPER[1], platform="gpu")
    mesh = AbstractMesh((count,), (scaling.AXIS,), axis_types=(AxisType.Auto,), abstract_device=gpu)
    for name, make in scaling.workloads(small=False).items():
        workload = make(mesh)
        function = jax.jit(workload.contenders["pallas"], in_shardings=workload.spread)
        yield f"scaling/{name} on {count}", function, jax.eval_shape(workload.operands)
