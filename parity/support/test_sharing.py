"""Processes of the suite that share a GPU: their parts of its memory, and what they say where it runs out."""

import os
import signal
import subprocess
import sys
import types

import jax
import pytest
from jax._src import lru_cache

from parity import ROOT
from parity.support import pallas_patches, sharing
from parity.support.common import once
from parity.support.sharing import GB


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """A machine with an H200 and a smaller GPU, as nvidia-smi tells it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(
        '#!/bin/sh\n[ "$3" = --id=1 ] || echo 90000, 143771\n[ "$3" = --id=0 ] || echo 1024, 24576\n'
    )
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # of them the suite may use some alone


@pytest.mark.parametrize("visible, memory", [(None, (1024, 24576)), ("", (1024, 24576)), ("0", (90000, 143771))])
def test_memory_of_the_smallest_gpu(gpu, monkeypatch, visible, memory):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sharing.gpu_memory() == tuple(2**20 * size for size in memory)


def test_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sharing.gpu_memory() is None


@pytest.mark.parametrize("cores", [1, 2, 16, 64])
@pytest.mark.parametrize("memory", [1, 8, 24, 40, 80, 141])
def test_shares_fit_the_gpu(cores, memory):
    memory *= GB
    count = sharing.workers(cores, memory)
    assert 1 <= count <= cores
    arrays = sharing.fraction(count, memory, memory) / sharing.JAX_PART * memory
    if memory > sharing.OVERHEAD + sharing.LEAST:
        assert count * (arrays + sharing.OVERHEAD) <= memory * 1.001
        assert arrays >= sharing.LEAST * 0.999 or count == 1
    assert count == cores or (count + 1) * (sharing.OVERHEAD + sharing.LEAST) > memory  # no fewer than fit


def test_a_worker_takes_its_part(gpu, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "PYTEST_XDIST_WORKER_COUNT": "4"})
    os.environ.update(sharing.limits())
    assert float(os.environ[sharing.FRACTION]) == sharing.fraction(4, 24 * GB, 24 * GB)
    assert sharing.share() == pytest.approx(5 * GB, rel=1e-3)
    sharing.needs(4.9 * GB)
    with pytest.raises(sharing.NeedsMemory, match="it needs 6 GB") as found:
        sharing.needs(6 * GB)
    assert sharing.ran_out(found.value) and found.value.num_bytes == 6 * GB
    assert sharing.limits() == {}  # what is set stays


@pytest.mark.parametrize(
    "visible, worker, expected",
    [(None, "gw5", "1"), ("3,5,6,7", "gw5", "5"), ("3", "gw5", "3"), (None, None, None)],
)
def test_processes_are_spread_over_gpus(monkeypatch, visible, worker, expected):
    given = {
        "CUDA_VISIBLE_DEVICES": visible,
        "PYTEST_XDIST_WORKER": worker,
        sharing.GPUS: "4",
        sharing.FRACTION: "0.1",
    }
    monkeypatch.setattr(os, "environ", {name: value for name, value in given.items() if value})
    assert sharing.limits() == ({"CUDA_VISIBLE_DEVICES": expected} if expected else {})


def test_a_process_alone_has_the_whole(gpu, monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    assert sharing.limits() == {} and sharing.share() is None
    sharing.needs(99 * GB)


@pytest.mark.parametrize("allocator, allowed", [(None, 0.25 - 0.125), (sharing.GIVES_BACK, 0.25)])
def test_pytorch_may_take_what_jax_has_not_kept(monkeypatch, allocator, allowed):
    set_to = list[float]()
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True,
        empty_cache=lambda: None,
        get_device_properties=lambda _: types.SimpleNamespace(total_memory=80 * GB),
        set_per_process_memory_fraction=set_to.append,
    )
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    kept = {} if allocator else {"pool_bytes": 10 * GB}  # that allocator has no such number
    monkeypatch.setattr(jax, "devices", lambda: [types.SimpleNamespace(memory_stats=lambda: kept)])
    monkeypatch.setenv(sharing.FRACTION, str(0.25 * sharing.JAX_PART))
    if allocator:
        monkeypatch.setenv(sharing.ALLOCATOR, allocator)
    else:
        monkeypatch.delenv(sharing.ALLOCATOR, raising=False)
    sharing.hold_torch()
    assert set_to == [pytest.approx(allowed)]


@pytest.mark.parametrize(
    "message, is_memory",
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 bytes.", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: cuModuleLoadData", True),
        ("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 262144, available: 232448", False),
        ("relative error 3.00e-02 is over 1e-03", False),
    ],
)
def test_which_errors_are_of_memory(message, is_memory):
    assert (sharing.ran_out(RuntimeError(f"first\n {message}")) is not None) == is_memory
    outer = AssertionError("outer")
    outer.__cause__ = RuntimeError(message)
    assert sharing.ran_out(outer) == (message if is_memory else None)


@pytest.mark.parametrize("second, expected", [("CUDA out of memory.", "out of memory"), ("relative error", None)])
def test_failures_of_several_examples_are_of_memory_if_all_are(second, expected):
    errors = [RuntimeError("RESOURCE_EXHAUSTED: out of memory"), RuntimeError(second)]
    found = sharing.ran_out(ExceptionGroup("Hypothesis found 2 distinct failures.", errors))
    assert found == (expected and f"RESOURCE_EXHAUSTED: {expected}")


TESTS = """
import os, signal
from parity.support.sharing import *

def test_too_large():
    raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 bytes.")

def test_wrong():
    raise AssertionError("wrong")

def test_killed():
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("limited", [True, False])
def test_what_a_run_says(gpu, tmp_path, limited):
    (tmp_path / "conftest.py").write_text(
        "from parity.support.sharing import name_failures as pytest_configure\n"
        "from parity.support.sharing import pytest_runtest_makereport, pytest_testnodedown\n"
    )
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "500"}
    environment.pop(sharing.FRACTION, None)
    environment.pop("PYTEST_XDIST_WORKER", None)
    if limited:
        environment[sharing.FRACTION] = "0.1"
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "-rs", "--junitxml=out.xml", "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert ("1 skipped" in done.stdout) == limited
    assert ("2 failed" if limited else "3 failed") in done.stdout
    assert "FAILED test_it.py::test_wrong (call): AssertionError: wrong" in done.stdout.split("= FAILURES =")[0]
    share = f"{0.1 / sharing.JAX_PART * 24:.1f} GB"
    line = f"needs more than its {share} of the GPU: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99"
    assert (line in done.stdout) == limited
    xml = (tmp_path / "out.xml").read_text()
    assert ('name="needs_memory" value="test_it.py::test_too_large"' in xml) == limited
    assert "ended by SIGKILL, as Linux ends a process where memory has run out" in done.stdout
    assert "1.0 of 24.0 GB of the GPU" in done.stdout


def test_how_a_process_ended(gpu):
    assert sharing.death(-signal.SIGABRT).startswith("ended by SIGABRT; in use now: 1.0 of 24.0 GB of the GPU")
    assert sharing.death(3).startswith("ended with exit code 3")


def test_workers_share_what_one_has_made(tmp_path, monkeypatch):
    made: list[str] = []

    def asked(worker: str, run: str) -> str:
        folder = tmp_path / run / worker
        folder.mkdir(parents=True, exist_ok=True)
        factory = types.SimpleNamespace(getbasetemp=lambda: folder)
        return once("it", lambda: made.append(worker) or f"by {worker}", factory)

    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert [asked("gw0", "first"), asked("gw1", "first"), asked("gw1", "second")] == ["by gw0", "by gw0", "by gw1"]
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    assert asked("gw2", "first") == "by gw2" and made == ["gw0", "gw1", "gw2"]


def test_programs_are_kept_whole(tmp_path, monkeypatch):
    """What another process finds is never a part: it finds nothing before all is written."""
    monkeypatch.setattr(lru_cache.LRUCache, "put", lru_cache.LRUCache.put)
    pallas_patches.keep_whole_programs()
    cache, found = lru_cache.LRUCache(str(tmp_path), max_size=-1), []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: found.append(cache.get("key")) or replace(*paths))
    cache.put("key", b"program")
    cache.put("key", b"another")
    assert found == [None] and cache.get("key") == b"program"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process shares with nobody")
def test_workers_share_what_they_compile():
    assert jax.config.jax_compilation_cache_dir == os.environ[sharing.COMPILED]
    assert jax.config.jax_enable_compilation_cache and os.path.isdir(os.environ[sharing.COMPILED])
