"""Workloads and contenders, and what turns a contender's JAX function into calls that can be timed.

A benchmark imports them from `bench.measuring.harness`, which has an example.
"""

import concurrent.futures
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from bench.measuring import timing
from bench.measuring.results import Accuracy, Entry, Family
from pallas_models._processes import cores

DTYPES = {"fp32": jnp.float32, "fp16": jnp.float16, "bf16": jnp.bfloat16}

# Upper bounds on the relative error of one operation: several times what rounding its result costs.
LIMITS = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}
NOT_FINITE = 1e9  # stands for the error of an output with NaN or infinities, so that files stay plain JSON

COLD_BYTES = 192 << 20  # of all input sets together: more than an L2 cache holds
MAX_SETS = 64

COMPILED_AT_ONCE = 2  # programs for which XLA times algorithms while it compiles

WAYS = ("eager", "graph", "compile", "compile-graph")  # of running a torch function


@dataclasses.dataclass(frozen=True)
class Measure:
    """How far outputs are from a reference: its name, and the function of (output, reference), both of JAX."""

    name: str
    of: Callable[[Any, Any], float]


@jax.jit
def _norms(out: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    return jnp.linalg.norm(out - expected), jnp.linalg.norm(expected)


def relative_error(out: Any, expected: Any) -> float:
    """||out - expected|| / ||expected||, computed in float32 on the device; `NOT_FINITE` if it is not finite."""
    if out.shape != expected.shape:
        raise ValueError(f"the output has shape {out.shape}, the reference {expected.shape}")
    distance, norm = map(float, _norms(out, expected))
    value = distance / norm if norm else distance
    return value if math.isfinite(value) else NOT_FINITE


def cosine_distance(output: Any, reference: Any) -> float:
    """The largest 1 - cosine of a row of `output` with `reference`'s; 2, the largest there is, for NaN."""
    output, reference = np.asarray(output).astype(np.float64), np.asarray(reference).astype(np.float64)
    if output.shape != reference.shape:
        raise ValueError(f"the output has shape {output.shape}, the reference {reference.shape}")
    norms = np.linalg.norm(output, axis=-1) * np.linalg.norm(reference, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        distances = 1 - np.sum(output * reference, axis=-1) / norms
    return float(np.max(np.where(np.isfinite(distances), np.maximum(distances, 0.0), 2.0)))


RELATIVE = Measure("relative error", relative_error)
COSINE = Measure("1 - cosine", cosine_distance)


@dataclasses.dataclass(frozen=True)
class Contender:
    """A program that computes a workload.

    Attributes:
      name: unique in the workload. Of family torch: the entries are called NAME-eager, NAME-graph and so on.
      family: ours: the default of this library, of which the best counts; ladder: another variant of ours, shown
        but never counted; xla; torch; peer: another library.
      load: imports what is needed and returns the function: of JAX arrays, which is compiled, or, if `torch`, of
        torch tensors. An ImportError means that the contender is skipped for want of the package.
      torch: whether it is a function of torch tensors; always so in family torch.
      params: arguments before the inputs of a JAX function, the same in every call, such as weights.
      prepare: turns an input set, a tuple, into what the function takes; not timed.
      ways: how a torch function is run; the best counts. Leave out "compile" where it changes nothing.
      launches: how many kernels a call has at the least. If fewer are seen, the profiler did not see them all.
      gpu: whether it needs a CUDA GPU, as kernels do.
      skip: why it is skipped, if it is.
      differentiable: whether it has gradients, by its weights too; else it is left out where they are measured.
      around: turns a torch function, compiled or not, into the function that is called.
      compared: how many of its outputs are compared with the reference; None for all that this has.
    """

    name: str
    family: Family
    load: Callable[[], Callable[..., Any]]
    _: dataclasses.KW_ONLY
    torch: bool = False
    params: tuple[Any, ...] = ()
    prepare: Callable[..., tuple[Any, ...]] | None = None
    ways: Sequence[str] = WAYS
    launches: int = 1
    gpu: bool = False
    skip: str = ""
    differentiable: bool = True
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    compared: int | None = None

    @property
    def in_torch(self) -> bool:
        """Whether it is a function of torch tensors."""
        return self.torch or self.family == "torch"

    def prepared(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """An input set as the function takes it."""
        return inputs if self.prepare is None else self.prepare(*inputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradient:
    """The backward pass of a workload.

    Attributes:
      inputs: how many of the inputs have gradients, the first ones.
      exact: the workload's reference as a function of JAX, where that is none or has no gradient.
      flop, bytes: of the backward pass alone, counted as in `Workload`.
      limit: the relative error above which gradients are wrong; None for twice the workload's.
    """

    inputs: int | None = None
    exact: Callable[..., Any] | None = None
    flop: float | None = None
    bytes: float | None = None
    limit: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What every contender of a case computes, and the inputs to compute it on.

    Attributes:
      inputs: makes a random input set, a tuple of arrays, from a seed; with jax.random (`normal`) on the device.
      reference: function of an input set that gives the right output in float32 or float64, an array or a tuple.
        What `jax.jit` returns is compiled ahead, as the contenders are. Of a contender that returns more than the
        reference only the first outputs are compared.
      contenders: the programs that are compared.
      flop: floating-point operations of one call; None where they are not counted.
      products: dtype of the matrix products that flop counts, if it is not the dtype of the case.
      bytes: what one call must read and write at the least; None where it is not counted.
      measure, limit: how outputs are compared, and the error above which they are wrong; None for the dtype's
        in LIMITS.
      sets: how many input sets the calls rotate through; None for so many that inputs come from memory, not from
        the L2 cache. Give a small number where in real use the cache holds them.
      gradient: its backward pass; None where that is not measured.
    """

    inputs: Callable[[int], tuple[Any, ...]]
    reference: Callable[..., Any]
    contenders: Sequence[Contender]
    flop: float | None = None
    products: str | None = None
    bytes: float | None = None
    measure: Measure = RELATIVE
    limit: float | None = None
    sets: int | None = None
    gradient: Gradient | None = None

    def input_sets(self) -> list[tuple[jax.Array, ...]]:
        """The input sets, on the device."""
        first = jax.device_put(self.inputs(0))
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        number = self.sets or min(max(math.ceil(COLD_BYTES / max(size, 1)), 2), MAX_SETS)
        return [first, *(jax.device_put(self.inputs(seed)) for seed in range(1, number))]


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(seed: Any, dtype: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return tuple(
        jax.random.normal(k, s, jnp.float32).astype(DTYPES[dtype]) for k, s in zip(keys, shapes, strict=True)
    )


def normal(seed: int, dtype: str, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Arrays of normal random numbers, made on the device and rounded to `dtype`: fp32, fp16 or bf16."""
    return _normal(seed, dtype, shapes)


def absent(error: ImportError) -> str:
    """What is missing, where an import failed."""
    return f"{error.name} is not installed" if error.name and "No module" in str(error) else str(error)


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """A contender that has been loaded and compiled, or the reason why that failed; becomes an `Entry`.

    Attributes:
      name, family: as in the entry.
      candidate: how it is called.
      output: gives its output for an input set, as JAX arrays.
      compared: how many outputs are compared.
      compile_s, peak_bytes: figures of the entry.
      skipped: why it is not run.
      error: what it raised.
      accuracy: of its outputs.
    """

    name: str
    family: Family
    candidate: timing.Candidate | None = None
    output: Callable[[int], Any] | None = None
    compared: int | None = None
    compile_s: float | None = None
    peak_bytes: float | None = None
    skipped: str = ""
    error: Exception | None = None
    accuracy: Accuracy | None = None

    def check(self, references: dict[int, Any], measure: Measure, limit: float) -> None:
        """Compares outputs with the references, by number of the input set."""
        if self.output is None:
            return
        try:
            value = 0.0
            for i, expected in references.items():
                leaves = jax.tree.leaves(expected)[: self.compared]
                found = jax.tree.leaves(self.output(i))[: len(leaves)]
                pairs = zip(found, leaves, strict=True)
                value = max(value, *(measure.of(leaf, right) for leaf, right in pairs))
        except Exception as error:  # reported as this candidate's result
            self.error = timing.without_frames(error)
        else:
            self.accuracy = Accuracy(measure=measure.name, value=value, limit=limit)

    def stop(self, error: Exception) -> None:
        """Takes note of a call's error.

        A missing package is no failure, nor is a call that a peer does not serve or for which memory is short.
        """
        if isinstance(error, ImportError):
            self.skipped = absent(error)
        elif isinstance(error, (NotImplementedError, MemoryError)) and self.family != "ours":
            self.skipped = str(error)
        else:
            self.error = timing.without_frames(error)

    @property
    def ready(self) -> bool:
        """Whether it can be called and is right."""
        right = self.accuracy is not None and self.accuracy.value <= self.accuracy.limit
        return right and self.error is None

    def entry(self, outcome: timing.Measurement | Exception | None) -> Entry:
        """The entry in the result file, given what timing it gave."""
        error = outcome if isinstance(outcome, Exception) else self.error
        entry = Entry(
            name=self.name,
            family=self.family,
            status="ok",
            accuracy=self.accuracy,
            compile_s=self.compile_s,
            peak_bytes=self.peak_bytes,
        )
        if self.skipped:
            return dataclasses.replace(entry, status="skipped", message=self.skipped)
        if error is not None:
            first_line = next(iter(str(error).splitlines()), "")
            message = f"{type(error).__name__}: {first_line}"[:300]
            return dataclasses.replace(entry, status="failed", message=message)
        if isinstance(outcome, timing.Measurement):
            return entry.timed(outcome)
        if self.accuracy is None:
            raise ValueError(f"{self.name} has no output, no error and no reason to be skipped")
        found = "not finite" if self.accuracy.value == NOT_FINITE else f"{self.accuracy.value:.1e}"
        message = f"{self.accuracy.measure} is {found}, limit {self.accuracy.limit:.0e}"
        return dataclasses.replace(entry, status="wrong", message=message)


def set_bytes(inputs: Any) -> int:
    """Bytes of an input set."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(inputs))


class JaxPrograms:
    """The programs of the JAX contenders and references of all workloads, compiled ahead, several at a time.

    Kernels and references go first, as many at a time as there are cores. XLA's programs follow, few at a time:
    XLA times algorithms to choose among them, and a busy host would delay the launches that it times.
    """

    def __init__(self, workloads: Sequence[Workload], *, gpu: bool):
        self.gpu = gpu
        self.programs: dict[tuple[int, str], concurrent.futures.Future[Any]] = {}
        self.references: dict[int, concurrent.futures.Future[Any]] = {}
        with concurrent.futures.ThreadPoolExecutor(cores()) as pool:
            for workload in workloads:
                self._submit(pool, workload, kernels=True)
                if hasattr(workload.reference, "lower"):
                    self.references[id(workload)] = pool.submit(self._compile_reference, workload)
        with concurrent.futures.ThreadPoolExecutor(COMPILED_AT_ONCE if gpu else cores()) as pool:
            for workload in workloads:
                self._submit(pool, workload, kernels=False)

    def _submit(self, pool: concurrent.futures.Executor, workload: Workload, *, kernels: bool) -> None:
        for contender in workload.contenders:
            if not (contender.in_torch or self._reason(contender)) and contender.gpu == kernels:
                submitted = pool.submit(self._compile, workload, contender)
                self.programs[id(workload), contender.name] = submitted

    def _reason(self, contender: Contender) -> str:
        return contender.skip or ("it needs a CUDA GPU" if contender.gpu and not self.gpu else "")

    @staticmethod
    def _compile(workload: Workload, contender: Contender) -> tuple[Any, float]:
        function = contender.load()
        example = jax.eval_shape(lambda: contender.prepared(workload.inputs(0)))
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*contender.params, *example).compile()
        return compiled, time.perf_counter() - start

    def _compile_reference(self, workload: Workload) -> Any:
        example = jax.eval_shape(lambda: workload.inputs(0))
        options = {"xla_gpu_autotune_level": 0} if self.gpu else None  # it is not timed
        return cast(Any, workload.reference).lower(*example).compile(options)

    def reference(self, workload: Workload, inputs: tuple[Any, ...]) -> Any:
        """The right output for an input set."""
        ahead = self.references.get(id(workload))
        return (ahead.result() if ahead else workload.reference)(*inputs)

    def attempt(self, workload: Workload, contender: Contender, sets: Sequence[tuple[Any, ...]]) -> Attempt:
        """A contender, ready to be called on the input sets."""
        attempt = Attempt(
            name=contender.name,
            family=contender.family,
            compared=contender.compared,
            skipped=self._reason(contender),
        )
        if attempt.skipped:
            return attempt
        try:
            program, attempt.compile_s = self.programs[id(workload), contender.name].result()
            inputs = [jax.block_until_ready(contender.prepared(given)) for given in sets]
            memory = program.memory_analysis() if self.gpu else None
        except Exception as error:  # reported as this candidate's result
            attempt.stop(error)
        else:

            def call(i: int) -> Any:
                return program(*contender.params, *inputs[i % len(inputs)])

            if memory is not None:
                work = memory.output_size_in_bytes + memory.temp_size_in_bytes - memory.alias_size_in_bytes
                attempt.peak_bytes = float(set_bytes(inputs[0]) + work)
            attempt.candidate = timing.Candidate(call=call, wait=jax.block_until_ready)
            attempt.output = call
        return attempt
