"""Arrays that are spread over devices: under jit, in a shard_map as it is by default, and on explicit meshes."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

from pallas_models import ops
from parity.common import kernel_calls
from parity.tolerances import CHAIN, DEEP


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """What `parity.meshes` found, which needs 8 devices from its start."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=8 {os.environ.get('XLA_FLAGS', '')}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, "-m", "parity.meshes"]
    folder = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


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
        record["case"]: record["collectives"]
        for record in records
        if record["collectives"] != ({"all-reduce": record["sums"]} if record["sums"] else {})
    }
    assert not unexpected


def lowered_for_gpus(kind: AxisType, function: Callable[..., jax.Array], *specs: P) -> str:
    """The program of a function of arrays of (512, 512) for 4 GPUs of which there is none here."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = AbstractMesh((4,), ("d",), (kind,), abstract_device=device)
    with use_abstract_mesh(mesh):
        arrays = [
            jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for spec in specs
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
