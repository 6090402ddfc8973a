"""Kernels compiled for GPUs that are not here: what ptxas says of each, for `python -m parity compiled`.

A process of `python -m parity.support.compiling GENERATION FILE` compiles the programs of one GPU, one by one, and
adds lines of JSON to a file, when each begins and when it is done. LLVM ends the process at an instruction that
the GPU lacks: the next process goes on after that program. JAX's CUDA plugin has the compilers; ptxas comes with
it.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from pallas_models.target import GPUS, Target, lowering_for
from parity.cases import OPS, Call, Case, Without
from parity.support.lowered import texts
from parity.support.support_matrix import gradient

# One GPU of each generation, by the architecture that ptxas compiles for.
GENERATIONS = {
    "sm_80": GPUS["A100"],
    "sm_86": GPUS["A10"],
    "sm_89": GPUS["L4"],
    "sm_90": GPUS["H200"],
    "sm_100": GPUS["B200"],
    "sm_120": GPUS["RTX PRO 6000"],
}
# What a call is asked to be made of: "mosaic" has Triton's kernels for what Mosaic does not serve.
IMPLEMENTATIONS = {"triton": "triton", "mosaic": ("mosaic", "triton")}
DTYPES = ("bfloat16", "float32")
WAYS = ("forward", "gradient")

# Stands in for ptxas on the path of a process: Mosaic takes no options for it.
_PTXAS = """#!/bin/sh
"{ptxas}" -v "$@" 2>"$0.$$"
code=$?
cat "$0.$$" >>"$0.log"
cat "$0.$$" >&2
rm "$0.$$"
exit $code
"""


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a kernel takes: registers of a thread, bytes that a thread spills, bytes of shared memory of a CTA."""

    kernel: str
    backend: str
    registers: int
    spills: int
    shared_memory: int


@dataclasses.dataclass(frozen=True)
class Program:
    """A call of an op, or its gradient, by what names it in results."""

    op: str
    call: str
    dtype: str
    way: str
    implementation: str

    @property
    def name(self) -> str:
        return "/".join(dataclasses.astuple(self))

    def function(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function, and its arrays."""
        calls = {name: make for name, _, make in _calls(OPS[self.op], self.implementation)}
        function, arrays = calls[self.call](self.dtype)
        return (gradient(function, arrays) if self.way == "gradient" else function), arrays


def programs() -> Iterator[Program]:
    """Every op at one or two sizes of real use, and at a small one; in float32 the gradient, with all kernels."""
    for case, implementation in itertools.product(OPS.values(), IMPLEMENTATIONS):
        for call, dtypes, _ in _calls(case, implementation):
            for dtype, way in itertools.product(dtypes, WAYS):
                if (dtype, way) != ("float32", "forward"):
                    yield Program(case.name, call, dtype, way, implementation)


def _calls(case: Case, implementation: str) -> Iterator[tuple[str, tuple[str, ...], Callable[[str], Any]]]:
    """The calls of an op: their dtypes, and functions of the dtype that give a function of arrays, and these."""
    if not isinstance(case.large, Without):
        # Mosaic's kernels with products are for half precision.
        dtypes = DTYPES[:1] if implementation == "mosaic" and case.products != "none" else DTYPES
        for name, arguments in itertools.islice(case.large.items(), 2):
            yield (
                name,
                dtypes if arguments is next(iter(case.large.values())) else DTYPES[:1],
                functools.partial(_large, case, arguments, IMPLEMENTATIONS[implementation]),
            )
    small = case.hopper_calls if implementation == "mosaic" else case.calls
    for call in () if isinstance(small, Without) else small[:1]:
        yield f"small-{call.name}", DTYPES[:1], functools.partial(_small, call, implementation)


def _large(
    case: Case, arguments: Callable[[str], dict[str, Any]], named: Any, dtype: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    given = arguments(dtype)
    arrays = {name: x for name, x in given.items() if hasattr(x, "shape")}
    static = {name: x for name, x in given.items() if name not in arrays} | dict(implementation=named)
    return lambda *xs: case.op(**dict(zip(arrays, xs, strict=True)), **static), tuple(arrays.values())


def _small(call: Call, named: Any, dtype: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return call(named), call.arrays(dtype, 16)


def target_config(gpu: Target) -> str:
    """A GPU as XLA has it described where it is not here."""
    major, minor = gpu.capability
    feature = "ACCELERATED_FEATURES" if major >= 9 else "NONE"
    per_core = gpu.shared_memory + 1024
    return f"""gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_block_optin: {gpu.shared_memory} shared_memory_per_core: {per_core}
      threads_per_core_limit: {2048 if minor == 0 and major < 12 else 1536} core_count: {gpu.num_cores}
      fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
      memory_bandwidth: 1000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.5 device_memory_size: 25769803776
      cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
      dnn_version: "9.10.0" name: "{gpu.name}" }}
    platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
    device_description_str: "{gpu.name}"
    """


def ptxas() -> Path | None:
    """The ptxas that came with JAX's CUDA plugin; None where that is not installed."""
    try:
        import jax_plugins.xla_cuda13  # noqa: F401
        import nvidia.cu13
    except ImportError:
        return None
    path = Path(next(iter(nvidia.cu13.__path__))) / "bin" / "ptxas"
    return path if path.exists() else None


class Lowering:
    """Lowers programs for one GPU, in a process that has none."""

    def __init__(self, gpu: Target) -> None:
        from jax.experimental import topologies
        from jax.experimental.mosaic.gpu import utils

        self.gpu = gpu
        utils._infer_arch = lambda: gpu.capability  # without a GPU it has 9.0
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="1x1x1", topology="1x1x1", target_config=target_config(gpu)
        )
        self.sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])

    def lower(self, function: Callable[..., Any], arrays: tuple[Any, ...]) -> Any:
        """A program for the GPU, lowered, which may be compiled.

        Raises:
          NotImplementedError: no kernel serves the call.
        """
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), arrays)
        with lowering_for(self.gpu):
            return jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",))


class Compiler(Lowering):
    """Compiles programs for one GPU, in a process that has none."""

    def __init__(self, gpu: Target, folder: Path) -> None:
        found = ptxas()
        assert found is not None, "the CUDA plugin of JAX and its ptxas are not installed: pip install jax[cuda13]"
        self.folder, self.ptxas = folder, found
        self.stand_in = folder / "ptxas"
        self.stand_in.write_text(_PTXAS.format(ptxas=found), encoding="utf-8")
        self.stand_in.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
        super().__init__(gpu)
        self.programs: dict[str, list[Resources]] = {}
        self.seen: dict[str, Resources] = {}  # kernels of Mosaic, which are compiled once in a process

    def compile(self, function: Callable[..., Any], arrays: tuple[Any, ...]) -> list[Resources]:
        """The kernels of this library in a program.

        Raises:
          NotImplementedError: no kernel serves the call.
          Exception: a compiler refuses the program.
        """
        lowered = self.lower(function, arrays)
        text = lowered.as_text()
        if text not in self.programs:
            self.programs[text] = self._compile(lowered)
        return self.programs[text]

    def _compile(self, lowered: Any) -> list[Resources]:
        log = self.stand_in.with_suffix(".log")
        log.write_text("", encoding="utf-8")
        with tempfile.TemporaryDirectory(dir=self.folder) as dumped:
            lowered.compile(compiler_options={"xla_dump_to": dumped, "xla_dump_emitter_re": "ptx"})
            kernels = texts(lowered.compiler_ir())[1]
            of_mosaic = self._of_mosaic(kernels, log.read_text("utf-8"))
            return [*self._of_triton(kernels, Path(dumped)), *of_mosaic]

    def _of_triton(self, kernels: list[str], dumped: Path) -> list[Resources]:
        ours = {name[1] for kernel in kernels if (name := re.search(r'^name: "(\w+)"$', kernel, re.MULTILINE))}
        thunks = "".join(path.read_text("utf-8") for path in dumped.glob("*thunk_sequence.txt"))
        sizes = {name: int(size) for name, size in _CUSTOM_KERNEL.findall(thunks) if _plain(name) in ours}
        found = []
        for path in dumped.glob("*.ptx"):
            said = subprocess.run(
                [self.ptxas, "-v", f"-arch={_ARCH.findall(path.read_text('utf-8'))[0]}", "-o", os.devnull, path],
                capture_output=True,
                text=True,
                check=True,
            ).stderr
            for name, registers, spills, static in entries(said):
                if name in sizes:
                    found.append(Resources(_plain(name), "triton", registers, spills, static + sizes[name]))
        assert len(sizes) == len(found), f"{sizes} are the kernels, {found} were dumped"
        return found

    def _of_mosaic(self, kernels: list[str], log: str) -> Iterator[Resources]:
        said = list(entries(log))
        for kernel in kernels:
            entry = re.search(r'sym_name = "(\w+_mosaic_gpu)"', kernel)
            if entry is None:
                continue
            digest = hashlib.sha256(kernel.encode()).hexdigest()
            if digest not in self.seen:
                (name,) = entry.groups()
                of_name = [x for x in said if x[0] == f"{name}_kernel"]
                assert of_name, f"ptxas compiled {said}, not {name}"
                registers, spills, static = (max(x[i] for x in of_name) for i in (1, 2, 3))
                self.seen[digest] = Resources(
                    name.removesuffix("_mosaic_gpu"), "mosaic", registers, spills, static + dynamic(kernel)
                )
            yield self.seen[digest]


_CUSTOM_KERNEL = re.compile(r"kCustomKernel .*\] (\w+) grid: .*shared_memory: (\d+) bytes")
_ARCH = re.compile(r"^\.target (\w+)", re.MULTILINE)
_ENTRY = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    r"([^\n]*)",
    re.DOTALL,
)


def _plain(name: str) -> str:
    """The name of a kernel without the number that XLA gives one of several."""
    return re.sub(r"_+\d+$", "", name)


def entries(said: str) -> Iterator[tuple[str, int, int, int]]:
    """What ptxas says of each kernel: its name, registers, bytes spilled and static shared memory."""
    for name, stores, loads, registers, rest in _ENTRY.findall(said):
        static = re.search(r"(\d+) bytes smem", rest)
        yield name, int(registers), int(stores) + int(loads), int(static[1]) if static else 0


def dynamic(kernel: str) -> int:
    """Bytes of shared memory that a kernel of Mosaic is launched with, from its module."""
    launch = re.search(r'gpu\.launch"\(([^)]*)\)', kernel)
    assert launch, "the kernel is not launched"
    size = launch[1].split(", ")[-1]
    constant = re.search(rf"{size} = \S*constant\"\(\) [<]?{{value = (\d+) ", kernel)
    assert constant, f"{launch[0]}: {size} is no constant"
    return int(constant[1])


def run(gpu: Target, results: Path, only: str) -> None:
    """Compiles what the results do not have, and adds it there."""
    done = set(read(results))
    with tempfile.TemporaryDirectory() as folder, results.open("a", encoding="utf-8", buffering=1) as file:
        compiler = Compiler(gpu, Path(folder))
        for program in programs():
            if program.name in done or not re.search(only, program.name):
                continue
            print(json.dumps({"program": program.name}), file=file)
            print(json.dumps({"program": program.name} | _outcome(compiler, program)), file=file)


def _outcome(compiler: Compiler, program: Program) -> dict[str, Any]:
    try:
        return {"kernels": [dataclasses.asdict(x) for x in compiler.compile(*program.function())]}
    except NotImplementedError as error:
        return {"refused": str(error)}
    except Exception as error:  # of whichever compiler
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def read(results: Path) -> dict[str, dict[str, Any]]:
    """What was found of each program; of one that ended its process, nothing but the name."""
    if not results.exists():
        return {}
    lines = [json.loads(line) for line in results.read_text("utf-8").splitlines()]
    return {line["program"]: line for line in lines}


if __name__ == "__main__":
    run(GENERATIONS[sys.argv[1]], Path(sys.argv[2]), *sys.argv[3:] or [""])
