"""Where the suite runs: compiled kernels at real shapes on CUDA, interpreted ones at small shapes elsewhere."""

import gc
import importlib.metadata
import os
import tempfile

from parity.support import sharing

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and other workers need memory too
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's: there is a worker for each core
# Programs say from which lines of source they come only where this asks for it: lowering had to look them up.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# The interpreter of Mosaic GPU blocks a thread of XLA's for each warpgroup that waits; there are as many as cores.
os.environ.setdefault("PJRT_NPROC", "32")
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know the first flag
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{quick} {os.environ.get('XLA_FLAGS', '')}"

# XLA's own kernels are only compared with: it need not compile and time dozens of them for a product, or search
# tiles for all that it could fuse with a softmax, a quarter of the time of a model in plain XLA. Several threads
# that compile for one worker would only be in the way of the others.
os.environ["XLA_FLAGS"] = (
    f"--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false --xla_gpu_force_compilation_parallelism=1 "
    f"--xla_disable_hlo_passes=triton-softmax-rewriter {os.environ.get('XLA_FLAGS', '')}"
)
os.environ.update(sharing.limits())

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from parity.support import grid, order, pallas_patches
from parity.support.common import IMPLEMENTATIONS, KERNEL, ON_GPU
from parity.support.tolerances import OP

# Interpreted programs run once, on little data: compiling them well takes five times as long as quickly, here and
# in the processes that tests start.
if not ON_GPU and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    jax.config.update("jax_disable_most_optimizations", True)

pytest_runtest_makereport = sharing.pytest_runtest_makereport
pytest_testnodedown = sharing.pytest_testnodedown

if kept := os.environ.get(sharing.COMPILED):
    jax.config.update("jax_compilation_cache_dir", kept)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    pallas_patches.keep_whole_programs()
    if not ON_GPU:  # whose programs are large, and kept for the next run
        pallas_patches.compress_nothing()
elif not jax.config.jax_compilation_cache_dir:
    jax.config.update("jax_enable_compilation_cache", False)  # each program would get its key for nothing

# The same examples in every run; shapes compile anew, so few of them, and no deadline.
hypothesis.settings.register_profile("parity", deadline=None, derandomize=True, database=None, max_examples=8)
hypothesis.settings.load_profile("parity")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unpatched", action="store_true", help="without the suite's changes to JAX and Pallas")
    parser.addoption("--whole-grids", action="store_true", help="with every combination of a test's parameters")


def pytest_configure(config: pytest.Config) -> None:
    sharing.name_failures(config)
    if not config.getoption("--unpatched"):
        pallas_patches.apply(on_gpu=ON_GPU)
    if config.getoption("numprocesses", None) and sharing.COMPILED not in os.environ:  # workers have it from here
        programs = tempfile.TemporaryDirectory(prefix="programs")
        os.environ[sharing.COMPILED] = programs.name
        config.add_cleanup(programs.cleanup)


def pytest_report_header(config: pytest.Config) -> str:
    patched = "without patches" if config.getoption("--unpatched") else "with the patches of pallas_patches.py"
    shapes = "real" if ON_GPU else "small"
    return f"parity: kernels run as implementation={KERNEL!r}, {shapes} shapes, {patched}"


@pytest.hookimpl(trylast=True)  # of what -k selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--whole-grids"):
        items[:], left_out = grid.thinned(items, at_least=2 if ON_GPU else 1)
        config.hook.pytest_deselected(items=left_out)
    slow, slowest = (order.SLOW_ON_GPU, order.SLOWEST_ON_GPU) if ON_GPU else (order.SLOW_ON_CPU, ())
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    items[:] = order.slow_first(
        items, lambda item: item.nodeid.startswith(slow), lambda item: item.nodeid.startswith(slowest), workers
    )


def pytest_collection_finish() -> None:
    pallas_patches.collect_rarely()


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest looks for garbage ten times at its end


_compiled = 0


def _count(event: str, seconds: float, **_: Any) -> None:
    global _compiled
    _compiled += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """Drops compiled programs, many at a time: all of the suite's take more than 5 GB a worker."""
    global _compiled
    yield
    if _compiled > (400 if ON_GPU else 1000):
        _compiled = 0
        pallas_patches.forget()


@pytest.fixture(autouse=True)
def share() -> None:
    """PyTorch keeps to its share of the GPU's memory, as JAX does."""
    if ON_GPU:
        sharing.hold_torch()


@pytest.fixture(scope="module")
def without_jax_cache() -> Iterator[None]:
    """JAX's own cache of compiled programs is off, also where the suite has one."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it keeps to the setting that it found first
    yield
    jax.config.update("jax_enable_compilation_cache", enabled)
    compilation_cache.reset_cache()


@pytest.fixture
def on_cpu() -> Iterator[None]:
    """Arrays of JAX are on the CPU: for tests that have torch there, or that say that there is no GPU."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> str | None:
    """The plain-XLA reference, the kernel and on Hopper the choice of two: all are held against torch."""
    return request.param


@pytest.fixture(params=list(OP))
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tolerance(dtype: str) -> float:
    """Relative error that one op may have in `dtype`."""
    return OP[dtype]


@pytest.fixture(scope="session")
def on_gpu() -> bool:
    return ON_GPU


@pytest.fixture(scope="session")
def reference() -> ModuleType:
    """The torch references; tests that ask for them are skipped where torch is absent."""
    pytest.importorskip("torch", reason="torch is not installed: the references are written in it")
    from parity.ops import reference

    return reference


@pytest.fixture(scope="session")
def torch_trimul() -> ModuleType:
    """The triangle multiplicative updates of several models, in torch."""
    pytest.importorskip("torch", reason="torch is not installed: the references are written in it")
    from parity.ops import reference_trimul

    return reference_trimul


@pytest.fixture(scope="session")
def bert() -> ModuleType:
    """BERT in torch."""
    pytest.importorskip("torch", reason="torch is not installed: the references are written in it")
    from parity.models import bert

    return bert


@pytest.fixture(scope="session")
def decoders() -> ModuleType:
    """GPT-2 and Qwen3 in torch."""
    pytest.importorskip("torch", reason="torch is not installed: the references are written in it")
    from parity.models import decoders

    return decoders


@pytest.fixture(scope="session")
def torch_pairformer() -> ModuleType:
    """AlphaFold's pair stack in torch."""
    pytest.importorskip("torch", reason="torch is not installed: the references are written in it")
    from parity.models import pairformer

    return pairformer
