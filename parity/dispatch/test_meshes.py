"""Arrays that are spread over devices: under jit, in a shard_map as it is by default, and on explicit meshes."""

import dataclasses
import functools
import json
import math
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from pallas_models import gpt2, ops, qwen3
from pallas_models.dispatch.sharding import Total
from pallas_models.kernels.forms.matmul import Form
from pallas_models.kernels.forms.trimul import Form as TrimulForm
from pallas_models.kernels.schedules import trimul
from pallas_models.ops.matmul import _contracted as contracted
from parity import ROOT
from parity.support.common import (
    MOSAIC_CALL,
    ON_GPU,
    ON_HOPPER,
    TRITON_CALL,
    assert_close,
    assert_equal,
    gpu,
    kernel_calls,
    normal,
    once,
    random_params,
)
from parity.support.tolerances import CHAIN, DEEP, OP
from weights import export

needs_addresses = pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 stores to no other GPU")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `parity.dispatch.meshes` found, which needs 8 devices from its start."""
    if ON_GPU:
        pytest.skip("computes on 8 devices of the CPU, as the suite on a CPU does")
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}",
        "JAX_PLATFORMS": "cpu",
    }

    def run() -> str:
        command = [sys.executable, "-m", "parity.dispatch.meshes"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return [json.loads(line) for line in once("meshes", run, tmp_path_factory).splitlines()]


def test_every_case_runs(records):
    assert not [record for record in records if "error" in record]
    assert len(records) > 40


def test_values_are_those_of_one_device(records):
    """Sums of gradients over a batch are added up in another order, models' through all of their operations."""
    bounds = {record["case"]: DEEP if "gpt2 loss" in record["case"] else CHAIN for record in records}
    assert not [record for record in records if max(record["errors"]) > bounds[record["case"]]]


def test_results_are_spread_as_the_operands(records):
    assert not [record["case"] for record in records if not record["is_spread"]]


def test_nothing_is_sent_but_each_sum_once(records):
    """No operand is gathered, and of what is added up over devices, weights' gradients mostly, each is so once."""
    unexpected = {
        record["case"]: record["collectives"] for record in records if record["collectives"] != record["expected"]
    }
    assert not unexpected


def lowered_for_gpus(
    kind: AxisType, function: Callable[..., Any], *specs: P, shapes: Sequence[tuple[int, ...]] = ((512, 512),) * 2
) -> str:
    """The program of a function of arrays for 4 GPUs of which there is none here."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((4,), ("d",), (kind,), abstract_device=device)
    with use_abstract_mesh(mesh):
        arrays = [
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        return jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["triton", "mosaic"])
def test_the_kernel_is_for_the_part_of_a_device(name):
    matmul = functools.partial(ops.matmul, implementation=name)
    explicit = lowered_for_gpus(AxisType.Explicit, matmul, P("d", None), P(None, None))
    spread = jax.shard_map(matmul, in_specs=(P("d"), P()), out_specs=P("d"))
    manual = lowered_for_gpus(AxisType.Auto, spread, P("d", None), P(None, None))
    for text in (explicit, manual):
        assert kernel_calls(text) == 1
        assert "(tensor<128x512xbf16>, tensor<512x512xbf16>)" in text


def test_no_gpu_has_all_pairs():
    """Not the pair representation, nor as much of anything that update and gradient make of it."""
    n, c = 1024, 64
    shapes = ((1, n, n, c), (c,), (c,), (c, 4, c), (c,), (c,), (c, c), (c, c))

    def update(*arrays: jax.Array) -> Any:
        return jax.vjp(functools.partial(ops.triangle_update, direction="incoming"), *arrays)

    def program(*arrays: jax.Array) -> Any:
        out, pull = update(*arrays)
        return out, *pull(out)

    specs = P(None, "d", None, None), *(P(*[None] * len(shape)) for shape in shapes[1:])
    text = lowered_for_gpus(AxisType.Explicit, program, *specs, shapes=shapes)
    # Bounds, two groups of channels, projected and multiplied, and their output.
    assert kernel_calls(text) == 6
    assert text.count("stablehlo.all_to_all") == 4 + 6
    bodies = re.findall(r"sdy.manual_computation.*?sdy.return", text, re.DOTALL)
    made = [
        math.prod(map(int, shape.split("x")[:-1]))
        for body in bodies
        for shape in re.findall(r"-> tensor<([\dx]+x)\w+>", body.split("\n", 1)[1])
    ]
    assert len(bodies) >= 1 and n * n * c // 4 <= max(made) <= n * n * c


@needs_addresses
def test_kernels_store_pairs_where_they_are_needed():
    """With the addresses of other GPUs, projections and products need no collective after them."""
    n, c = 2048, 128
    shapes = ((1, n, n, c), (c,), (c,), (c, 4, c), (c,), (c,), (c, c), (c, c))
    target = dataclasses.replace(gpu(), has_peers=True)
    bfloat16 = jnp.dtype("bfloat16")

    def update(x, norm_scale, norm_bias, w_in, out_norm_scale, out_norm_bias, w_gate, w_out):
        form = TrimulForm(
            x=x,
            mask=None,
            norm_scale=norm_scale,
            norm_bias=norm_bias,
            w_in=w_in,
            b_in=None,
            out_norm_scale=out_norm_scale,
            out_norm_bias=out_norm_bias,
            w_gate=w_gate,
            b_gate=None,
            w_out=w_out,
            b_out=None,
            direction="incoming",
            gate_after=False,
            epsilon=1e-5,
            compute_dtype=bfloat16,
            precision=jax.lax.Precision.HIGHEST,
            out_dtype=bfloat16,
            rows_over=("d",),
        )
        return trimul.mosaic(form, config=None, target=target, interpret=False)

    specs = P(None, "d"), *[P()] * (len(shapes) - 1)
    part = jax.shard_map(update, in_specs=specs, out_specs=specs[0], check_vma=False)
    padded = [P(*spec, *[None] * (len(shape) - len(spec))) for spec, shape in zip(specs, shapes, strict=True)]
    text = lowered_for_gpus(AxisType.Auto, part, *padded, shapes=shapes)
    # Bounds, projections and products, and their output.
    assert kernel_calls(text) == 4 and "all_to_all" not in text


@needs_addresses
def test_kernels_store_parts_where_they_are_added_up():
    def part(x, w, residual, total):
        options = dict(precision=jax.lax.Precision.HIGHEST, out_dtype=jnp.dtype("bfloat16"))
        form = Form(x=x, w=w, residual=residual, **options)
        return contracted(lambda form: jnp.dot(form.x, form.w), total, form)

    shapes, specs = ((8192, 256), (256, 4096), (8192, 4096)), (P(None, "d"), P("d", None), P(None, None))
    for has_peers, kernels, sums in ((True, 2, 0), (False, 0, 1)):
        total = Total(over=("d",), target=dataclasses.replace(gpu(), has_peers=has_peers))
        f = jax.shard_map(functools.partial(part, total=total), in_specs=specs, out_specs=P(), check_vma=False)
        text = lowered_for_gpus(AxisType.Auto, f, *specs, shapes=shapes)
        assert (kernel_calls(text), text.count("all_reduce")) == (kernels, sums)


@pytest.mark.skipif(not ON_HOPPER or jax.device_count() < 2, reason="needs several Hopper GPUs")
def test_sums_that_kernels_store_on_all_gpus():
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    m, k, n = 8192, 512 * mesh.size, 4096
    shapes, specs = ((m, k), (k, n), (m, n)), (P(None, "d"), P("d"), P())
    spread = tuple(NamedSharding(mesh, spec) for spec in specs)
    x, w, residual = map(jax.device_put, (normal(rng, *shape, dtype="bfloat16") for shape in shapes), spread)
    f = jax.jit(lambda x, w, residual: ops.matmul(x, w, residual=residual)).lower(x, w, residual).compile()
    assert "all-reduce" not in f.as_text()
    expected = ops.matmul(*jax.device_get((x, w)), residual=jax.device_get(residual), implementation="xla")
    for _ in range(2):
        assert_close(f(x, w, residual), expected, OP["bfloat16"])


def test_a_ring_runs_the_kernels_of_attention():
    """One for its own keys and one for those that come round, lowered once; of the gradient two for each."""

    def gradient(x: jax.Array) -> jax.Array:
        q = x.reshape(1, -1, 4, 128)
        return jax.grad(lambda q: jnp.sum(ops.ring_attention(q, q, q, axis_name="d", causal=True) ** 2))(q)

    mapped = jax.shard_map(gradient, in_specs=P("d"), out_specs=P(None, "d"))
    text = lowered_for_gpus(AxisType.Auto, mapped, P("d", None), shapes=((512, 512),))
    assert kernel_calls(text) == (1 + 3) * (1 + 2)
    assert sum(text.count(f"@{call}") for call in (TRITON_CALL, MOSAIC_CALL)) == 2 * (1 + 2)


def test_a_ring_refuses():
    q = jnp.zeros((1, 3, 2, 16))
    ids = np.zeros((1, 3), np.int64)
    with pytest.raises(ValueError, match="q has 3 tokens and k has 3 on a device"):
        ops.ring_attention(q, q, q, axis_name="d", causal=True)
    with pytest.raises(TypeError, match="segment_ids has dtype int64; expected integers of up to 32 bits"):
        ops.ring_attention(q, q, q, axis_name="d", segment_ids=ids)
    with pytest.raises(ValueError, match="length=12 is not a multiple of 2 \\* num_devices=4"):
        ops.zigzag_order(12, 4)
    assert ops.zigzag_order(12, 3).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]


def test_each_device_has_its_share_of_qwen3():
    """Of the parameters, over 4 x 2 devices, all but the norms are split."""
    config = dataclasses.replace(qwen3.CONFIGS["Qwen3-8B"], num_layers=2)
    mesh = AbstractMesh((4, 2), ("data", "model"))
    shapes = jax.tree.leaves(jax.eval_shape(lambda: qwen3.init(jax.random.key(0), config, dtype=jnp.bfloat16)))

    def share(**how: Any) -> float:
        places = jax.tree.leaves(qwen3.shardings(config, mesh, **how))
        parts = [math.prod(place.shard_shape(x.shape)) for place, x in zip(places, shapes, strict=True)]
        return sum(parts) / sum(x.size for x in shapes)

    assert share(tensor=None) == 1.0
    assert share() == pytest.approx(1 / 2, abs=1e-3)
    assert share(tensor=None, fsdp="data") == pytest.approx(1 / 4, abs=1e-3)
    assert share(fsdp="data") == pytest.approx(1 / 8, abs=1e-3)
    with pytest.raises(ValueError, match=r"fsdp='rows' is no axis of the mesh; expected .*'data', 'model'"):
        qwen3.shardings(config, mesh, fsdp="rows")


def test_grouped_heads_are_taken_back(tmp_path):
    config = gpt2.GPT2Config(
        vocab_size=40, hidden_size=64, num_layers=1, num_heads=4, intermediate_size=48, max_positions=16
    )
    params = random_params(config, init=gpt2.init)
    grouped, grouped_config = gpt2.group_heads(params, config, 4)
    # Queries, keys and values of head 1, one after another.
    given, found = (p["layers"]["0"]["attention"]["qkv"]["kernel"] for p in (params, grouped))
    assert_equal(found[:, 48:96], jnp.concatenate([given[:, i * 64 + 16 : i * 64 + 32] for i in range(3)], axis=1))
    back, _ = gpt2.group_heads(gpt2.group_heads(grouped, grouped_config, 2)[0], gpt2_groups(config, 2), 1)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert_equal(a, b)
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of head_groups=3"):
        gpt2.group_heads(params, config, 3)
    with pytest.raises(TypeError, match="config is a GroupedGPT2Config; expected one of"):
        export(grouped, tmp_path, config=grouped_config)


def gpt2_groups(config: gpt2.GPT2Config, groups: int) -> gpt2.GroupedGPT2Config:
    return gpt2.GroupedGPT2Config(**dataclasses.asdict(config), head_groups=groups)


def test_two_processes_take_a_step():
    """The program of the docs as it stands: each process has half of the batch, both find the loss of all."""
    (program,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "meshes.md").read_text("utf-8"), re.DOTALL)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, f"localhost:{port}", "2", str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for i in range(2)
    ]
    said = []
    try:
        for process in processes:
            out, error = process.communicate(timeout=400)  # of 16 that compile on one machine
            assert process.returncode == 0, error
            said.append(re.search(r"process (\d) of 2: loss ([\d.]+)", out).groups())
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    config = gpt2.GPT2Config(num_layers=1, hidden_size=128, num_heads=2, intermediate_size=512, vocab_size=512)
    ids = [np.random.default_rng(i).integers(0, 512, (2, 16)) for i in range(2)]
    loss = jax.jit(lambda ids: gpt2.loss(gpt2.init(jax.random.key(0), config), ids, config=config))
    expected = loss(jnp.asarray(np.concatenate(ids)))
    assert [number for number, _ in said] == ["0", "1"] and said[0][1] == said[1][1]
    assert float(said[0][1]) == pytest.approx(float(expected), rel=CHAIN)


LEAVING_CORES = """
import jax, jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh
from pallas_models import target
from pallas_models.dispatch.records import Kernel, Op
from pallas_models.dispatch.run import run
from pallas_models.dispatch.sharding import Sharding
from pallas_models.kernels.forms.softmax import Form

asked, called, inside = [], [], []

def refuses(form, gpu):
    asked.append((form.x.shape, gpu))

def call(form, *, config, target, interpret):
    called.append((form.x.shape, target))
    inside.append(current())
    return 2 * form.x

current = target.current
kernel = Kernel(backend="triton", architectures=target.AMPERE_ON, call=call, config=None, refuses=refuses)
rows = Sharding(equation="m N, W N -> m N")
double = Op(name="double", reference=lambda form: 2 * form.x, kernels=(kernel,), sharding=rows)

gpu = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
abstract = AbstractMesh((2,), ("d",), (AxisType.Auto,), abstract_device=gpu)

@jax.jit
def f(x):
    with target.leave_cores(8, abstract):
        form = Form(x=x, where=None, scale=1.0, repeat=1, algorithm=None)
        return run(double, form, implementation="interpret")

mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, PartitionSpec("d")))
assert (f(x) == 2).all()
assert {shape for shape, _ in called} >= {(4, 4)}, called  # the part of a device
assert {shape for shape, _ in asked} >= {shape for shape, _ in called}
gpus = {gpu for _, gpu in asked + called} | set(inside)
assert len(gpus) == 1 and gpus.pop().num_cores == 124, gpus
"""


def test_choice_and_kernel_of_a_part_have_the_target_of_the_call():
    """Where XLA partitions a program it is known no more, as the multiprocessors that were left are not."""
    flags = f"--xla_force_host_platform_device_count=2 {os.environ.get('XLA_FLAGS', '')}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", LEAVING_CORES], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
