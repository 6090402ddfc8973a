"""What a result depends on: the device, the versions, and the rates that the device reaches."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from bench.measuring import timing

PACKAGES = ("jax", "jaxlib", "torch", "triton", "transformers", "numpy")
CHANGED = "+changes"  # after a commit: files differ from it


def _output(*command: str) -> str:
    """Standard output of a command; empty if it cannot be run or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=Path(__file__).parent
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def has_gpu() -> bool:
    """Whether JAX finds a CUDA device."""
    import jax

    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def device() -> str:
    """The kind of the first CUDA device, or CPU."""
    import jax

    return str(jax.devices("cuda")[0].device_kind) if has_gpu() else "CPU"


def commit() -> str:
    """The commit of the checkout, with `CHANGED` if files differ; $BENCH_COMMIT where there is no git."""
    given = os.environ.get("BENCH_COMMIT", "").strip()
    revision = given or _output("git", "rev-parse", "--short=12", "HEAD")
    if revision and not given and _output("git", "status", "--porcelain", "--untracked-files=no"):
        revision += CHANGED
    return revision or "unknown"


def describe() -> dict[str, str]:
    """The environment of a run."""
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    found = {"device": device(), "driver": driver[0] if driver else "none"}
    found |= {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    found["cores"] = str(len(os.sched_getaffinity(0)))
    if others := os.environ.get("BENCH_BESIDE"):
        found["beside"] = f"benchmarks, one on each of the other GPUs used ({others})"
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    if "torch" in found and found["torch"] != "absent":
        import torch

        found["torch"] = torch.__version__  # with its CUDA version
    return found | {"commit": commit()}


def measure_ceilings(budget: timing.Budget) -> dict[str, float]:
    """Measures the rates that kernels are compared with.

    Returns:
      copy_tb_per_s: bytes read and written by an elementwise float32 kernel over 1 GiB, a second.
      matmul_bf16_tflop_per_s: a bfloat16 matrix product of 8192 x 8192 x 8192, 2 * 8192**3 flop.
      Either is left out if it cannot be measured.
    """
    import jax
    import jax.numpy as jnp

    size, elements = 8192, 1 << 28
    keys = jax.random.split(jax.random.key(0), 3)
    x, y = (jax.random.normal(key, (size, size), jnp.bfloat16) for key in keys[:2])
    long = jax.random.normal(keys[2], (elements,), jnp.float32)
    product, negative = jax.jit(jnp.matmul), jax.jit(jnp.negative)
    measured = timing.measure(
        {
            "matmul_bf16_tflop_per_s": timing.Candidate(call=lambda _: product(x, y), wait=jax.block_until_ready),
            "copy_tb_per_s": timing.Candidate(call=lambda _: negative(long), wait=jax.block_until_ready),
        },
        budget,
    )
    work = {"matmul_bf16_tflop_per_s": 2 * size**3, "copy_tb_per_s": 2 * 4 * elements}  # flop, bytes
    ceilings = {}
    for name, outcome in measured.items():
        if isinstance(outcome, Exception):
            print(f"{name}: could not be measured ({outcome})")
        elif outcome.device is not None:
            ceilings[name] = work[name] / outcome.device.median_us / 1e6  # per microsecond to tera per second
    return ceilings
