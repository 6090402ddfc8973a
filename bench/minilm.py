"""The MiniLM forward pass, token ids to embeddings: ours against XLA and torch."""

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import environment, minilm_models, results, tables, timing
from bench.minilm_models import DTYPES, Checkpoint
from bench.results import Accuracy, Case, Entry, Family
from pallas_models import minilm

HELP = "MiniLM forward pass: ours, XLA and torch side by side"
NAME = "minilm"

SHAPES = ((1, 16), (1, 128), (64, 16), (64, 128), (256, 32), (512, 16), (256, 128), (32, 512))
CPU_SHAPES = ((1, 16), (1, 128))
INPUT_SETS = 4  # rotated from call to call

# Upper bounds on 1 - cosine, for random token ids and weights rounded to the dtype. Measured over a few batches:
# 1e-7, 2e-6 and 7e-5; the largest of the rows of a large batch is a few times that.
LIMITS = {"fp32": 1e-5, "fp16": 2e-5, "bf16": 3e-4}

Shape = tuple[int, int]


def parse_shapes(text: str) -> list[Shape]:
    """Parses `1x16,64x128`: batch times sequence length, comma separated.

    Raises:
      argparse.ArgumentTypeError: something in it is not a shape.
    """
    shapes = []
    for part in text.split(","):
        batch, by, seq = part.strip().partition("x")
        if not (by and batch.isdecimal() and seq.isdecimal() and int(batch) and int(seq)):
            known = ",".join(f"{b}x{s}" for b, s in SHAPES)
            raise argparse.ArgumentTypeError(
                f"{part!r} is no shape; expected BATCHxLENGTH, such as those of {known}"
            )
        shapes.append((int(batch), int(seq)))
    return shapes


def parse_dtypes(text: str) -> list[str]:
    """Parses `fp16`, `fp16,bf16` or `all`.

    Raises:
      argparse.ArgumentTypeError: an unknown dtype.
    """
    names = list(DTYPES) if text == "all" else [part.strip() for part in text.split(",")]
    if unknown := [name for name in names if name not in DTYPES]:
        raise argparse.ArgumentTypeError(
            f"unknown dtype {', '.join(unknown)}; expected all or some of {list(DTYPES)}"
        )
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench minilm`."""
    parser.add_argument("--show-results", action="store_true", help="print the tables, not only the file's name")
    parser.add_argument("--output", type=Path, default=results.DEFAULT_FOLDER, help="folder of the result files")
    parser.add_argument("--dtype", type=parse_dtypes, default=["fp16"], help="fp32, fp16, bf16 or all")
    parser.add_argument("--shapes", type=parse_shapes, help="e.g. 1x16,64x128: batch x length")
    parser.add_argument("--weights", help="checkpoint folder, or tensor file with config.json beside it")
    parser.add_argument(
        "--masks", choices=("full", "ragged"), default="full", help="sentences of full or of random length"
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--compile-mode",
        choices=("default", "max-autotune-no-cudagraphs"),
        default="default",
        help="of torch.compile; it is run with and without a CUDA graph around it either way",
    )
    parser.add_argument(
        "--compile-budget",
        type=float,
        default=100.0,
        metavar="S",
        help="no torch.compile is begun after S seconds",
    )


@dataclasses.dataclass(kw_only=True)
class Attempt:
    """A candidate on its way to an entry: what it takes to call it, or why it cannot be called."""

    name: str
    family: Family
    candidate: timing.Candidate | None = None
    output: Callable[[int], np.ndarray] | None = None  # of an input set, on the host
    compile_s: float | None = None
    skipped: str = ""
    error: Exception | None = None
    accuracy: Accuracy | None = None

    def check(self, references: list[np.ndarray], limit: float) -> None:
        """Compares the outputs on every input set with the references."""
        if self.output is None:
            return
        try:
            value = max(error_of(self.output(i), reference) for i, reference in enumerate(references))
        except Exception as error:  # reported as this candidate's result
            self.error = error
        else:
            self.accuracy = Accuracy(measure="1 - cosine", value=value, limit=limit)

    @property
    def ready(self) -> bool:
        """Whether it can be called and is right."""
        right = self.accuracy is not None and self.accuracy.value <= self.accuracy.limit
        return right and self.error is None

    def entry(self, outcome: timing.Measurement | Exception | None) -> Entry:
        """The entry in the result file, given what timing it gave."""
        error = outcome if isinstance(outcome, Exception) else self.error
        entry = Entry(
            name=self.name, family=self.family, status="ok", accuracy=self.accuracy, compile_s=self.compile_s
        )
        if self.skipped:
            return dataclasses.replace(entry, status="skipped", message=self.skipped)
        if error is not None:
            first_line = next(iter(str(error).splitlines()), "")
            message = f"{type(error).__name__}: {first_line}"[:300]
            return dataclasses.replace(entry, status="failed", message=message)
        if isinstance(outcome, timing.Measurement):
            kernels = [results.Kernel(name=name, us=us) for name, us in outcome.kernels]
            return dataclasses.replace(entry, device=outcome.device, wall=outcome.wall, kernels=kernels)
        if self.accuracy is None:
            raise ValueError(f"{self.name} has no output, no error and no reason to be skipped")
        message = f"{self.accuracy.measure} is {self.accuracy.value:.1e}, limit {self.accuracy.limit:.0e}"
        return dataclasses.replace(entry, status="wrong", message=message)


def error_of(output: np.ndarray, reference: np.ndarray) -> float:
    """The largest 1 - cosine of a row of `output` with that of `reference`; 2, the largest there is, for NaN."""
    output, reference = np.asarray(output, np.float64), np.asarray(reference, np.float64)
    if output.shape != reference.shape:
        raise ValueError(f"the output has shape {output.shape}, the reference {reference.shape}")
    norms = np.linalg.norm(output, axis=-1) * np.linalg.norm(reference, axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        distances = 1 - np.sum(output * reference, axis=-1) / norms
    return float(np.max(np.where(np.isfinite(distances), np.maximum(distances, 0.0), 2.0)))


def draw_inputs(shape: Shape, vocab_size: int, masks: str, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draws the input sets: ids and mask, int32 (B, S); ragged lengths are uniform in [S / 4, S], one being S."""
    batch, seq = shape
    rng = np.random.default_rng(seed)
    sets = []
    for _ in range(INPUT_SETS):
        lengths = np.full(batch, seq)
        if masks == "ragged":
            lengths[1:] = rng.integers(max(1, seq // 4), seq + 1, batch - 1)
        mask = (np.arange(seq) < lengths[:, None]).astype(np.int32)
        sets.append((rng.integers(1, vocab_size, shape, dtype=np.int32) * mask, mask))
    return sets


class JaxModels:
    """The JAX candidates: parameters once per dtype, and every program compiled ahead, several at a time."""

    def __init__(self, checkpoint: Checkpoint, dtypes: list[str], shapes: list[Shape], *, gpu: bool):
        self.functions: dict[tuple[str, str], tuple[Family, Any, Callable[..., jax.Array]]] = {}
        self.skipped: dict[tuple[str, str], tuple[Family, str]] = {}
        for dtype in dtypes:
            params = checkpoint.params(dtype)
            embed = functools.partial(minilm.embed, config=checkpoint.config)
            if gpu:
                ours = functools.partial(embed, implementation="triton")
                self.functions["pallas", dtype] = "ours", params, ours
            plain_params, plain = minilm_models.plain_jax(checkpoint, dtype)
            self.functions["xla-plain", dtype] = "xla", plain_params, plain
            xla_ops = functools.partial(embed, implementation="xla")
            self.functions["xla-ops", dtype] = "xla", params, xla_ops
            if not gpu or dtype == "fp32":
                self.skipped["xla-cudnn", dtype] = "xla", "cuDNN attention takes fp16 and bf16 on a GPU"
            else:
                _, cudnn = minilm_models.plain_jax(checkpoint, dtype, attention="cudnn")
                self.functions["xla-cudnn", dtype] = "xla", plain_params, cudnn
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            self.programs = {
                (name, dtype, shape): pool.submit(self._compile, name, dtype, shape)
                for shape in shapes
                for name, dtype in self.functions
            }

    def _compile(self, name: str, dtype: str, shape: Shape) -> tuple[Any, float]:
        start = time.perf_counter()
        _, params, function = self.functions[name, dtype]
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
        compiled = jax.jit(function).lower(params, tokens, tokens).compile()
        return compiled, time.perf_counter() - start

    def attempts(self, dtype: str, shape: Shape, sets: list[tuple[np.ndarray, np.ndarray]]) -> list[Attempt]:
        """The candidates for one case."""
        inputs = jax.device_put(sets)
        found = []
        for (name, of), (family, params, _) in self.functions.items():
            if of != dtype:
                continue
            attempt = Attempt(name=name, family=family)
            try:
                program, attempt.compile_s = self.programs[name, dtype, shape].result()
            except Exception as error:  # reported as this candidate's result
                attempt.error = error
            else:

                def call(i: int, program: Any = program, params: Any = params) -> jax.Array:
                    return program(params, *inputs[i % len(inputs)])

                attempt.candidate = timing.Candidate(call=call, wait=jax.block_until_ready)
                attempt.output = lambda i, call=call: np.asarray(call(i))
            found.append(attempt)
        for (name, of), (family, why) in self.skipped.items():
            if of == dtype:
                found.append(Attempt(name=name, family=family, skipped=why))
        return found


class TorchModels:
    """The torch candidates: eager, under a CUDA graph, compiled, and compiled under a CUDA graph."""

    NAMES = ("torch-eager", "torch-graph", "torch-compile", "torch-compile-graph")

    def __init__(self, checkpoint: Checkpoint, dtypes: list[str], args: argparse.Namespace, *, gpu: bool):
        self.checkpoint, self.args, self.gpu = checkpoint, args, gpu
        self.device = "cuda" if gpu else "cpu"
        self.missing = minilm_models.torch_missing()
        self.compile_s = 0.0  # spent so far
        if self.missing:
            print(f"torch is left out: {self.missing}")
            return
        import torch

        if gpu and not torch.cuda.is_available():
            self.missing = f"torch {torch.__version__} finds no CUDA device"
            print(f"torch is left out: {self.missing}")
            return
        if hasattr(torch._dynamo.config, "recompile_limit"):
            torch._dynamo.config.recompile_limit = 64  # one program a shape and dtype, more than its default of 8
        self.models = {dtype: minilm_models.torch_model(checkpoint, dtype, self.device) for dtype in dtypes}
        reference = self.models.get("fp32") or minilm_models.torch_model(checkpoint, "fp32", self.device)
        self.reference = lambda sets: [reference(*pair).cpu().numpy() for pair in self._inputs(sets)]

    def _inputs(self, sets: list[tuple[np.ndarray, np.ndarray]]) -> list[tuple[Any, Any]]:
        import torch

        return [tuple(torch.from_numpy(x).to(self.device, torch.int64) for x in pair) for pair in sets]

    def attempts(self, dtype: str, sets: list[tuple[np.ndarray, np.ndarray]]) -> list[Attempt]:
        """The candidates for one case; compiles those that need it."""
        if self.missing:
            return [Attempt(name=name, family="torch", skipped=self.missing) for name in self.NAMES]
        inputs, model = self._inputs(sets), self.models[dtype]
        return [self._attempt(name, functions, inputs) for name, functions in self._prepare(model, inputs).items()]

    def _prepare(self, model: Callable[..., Any], inputs: list[tuple[Any, Any]]) -> dict[str, Any]:
        """For every candidate its function and its seconds of compilation, or a reason to skip it, or an error."""
        prepared: dict[str, Any] = {"torch-eager": (model, None)}
        if not self.gpu:
            return prepared | dict.fromkeys(self.NAMES[1:], "CUDA graphs and torch.compile are measured on a GPU")
        try:
            prepared["torch-graph"] = capture(model, inputs[0]), None
        except Exception as error:  # reported as this candidate's result
            prepared["torch-graph"] = error
        if self.args.no_compile:
            return prepared | dict.fromkeys(self.NAMES[2:], "--no-compile")
        if self.compile_s > self.args.compile_budget:
            spent = f"--compile-budget: torch.compile had taken {self.compile_s:.0f} s"
            return prepared | dict.fromkeys(self.NAMES[2:], spent)
        start = time.perf_counter()
        try:
            import torch

            compiled = torch.compile(model, dynamic=False, mode=self.args.compile_mode)
            compiled(*inputs[0])
            torch.cuda.synchronize()
            prepared["torch-compile"] = compiled, time.perf_counter() - start
        except Exception as error:  # reported as this candidate's result
            prepared |= dict.fromkeys(self.NAMES[2:], error)
        else:
            try:
                prepared["torch-compile-graph"] = capture(compiled, inputs[0]), time.perf_counter() - start
            except Exception as error:  # reported as this candidate's result
                prepared["torch-compile-graph"] = error
        self.compile_s += time.perf_counter() - start
        return prepared

    def _attempt(self, name: str, prepared: Any, inputs: list[tuple[Any, Any]]) -> Attempt:
        attempt = Attempt(name=name, family="torch")
        if isinstance(prepared, str):
            attempt.skipped = prepared
        elif isinstance(prepared, Exception):
            attempt.error = prepared
        else:
            function, attempt.compile_s = prepared
            attempt.candidate = timing.Candidate(
                call=lambda i: function(*inputs[i % len(inputs)]),
                wait=_synchronize if self.gpu else lambda _: None,
                events=_cuda_events if self.gpu else None,
                # The four linear maps of a layer, and no fewer, are kernels of their own in torch.
                launches_at_least=4 * self.checkpoint.config.num_layers,
            )
            attempt.output = lambda i: function(*inputs[i]).cpu().numpy()
        return attempt


def capture(function: Callable[..., Any], inputs: tuple[Any, Any]) -> Callable[..., Any]:
    """Captures a torch function in a CUDA graph; a call copies its arguments in and replays the graph."""
    import torch

    static = [x.clone() for x in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # what is done once, on first use, must not be captured
        for _ in range(3):
            function(*static)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: JAX's threads share the process and may call CUDA meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = function(*static)

    def call(*inputs: Any) -> Any:
        for buffer, x in zip(static, inputs, strict=True):
            buffer.copy_(x)
        graph.replay()
        return output

    return call


def _synchronize(_: Any) -> None:
    import torch

    torch.cuda.synchronize()


def _cuda_events(queue: Callable[[], Any]) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    queue()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end)


def jax_reference(checkpoint: Checkpoint, sets: list[tuple[np.ndarray, np.ndarray]]) -> list[np.ndarray]:
    """The embeddings in float32 by plain JAX: the reference where there is no torch."""
    params, embed = minilm_models.plain_jax(checkpoint, "fp32")
    embed = jax.jit(embed)
    return [np.asarray(embed(params, ids, mask)) for ids, mask in sets]


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit code, 1 if ours failed or was wrong."""
    started = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - started:4.0f} s] {text}", flush=True)

    checkpoint = minilm_models.load_checkpoint(args.weights)
    longest = checkpoint.config.max_positions
    if too_long := [f"{b}x{s}" for b, s in args.shapes or () if s > longest]:
        print(f"{', '.join(too_long)}: longer than the model's {longest} positions")
        return 2
    gpu = environment.has_gpu()
    shapes = args.shapes or list(SHAPES if gpu else CPU_SHAPES)
    if not gpu:
        print("No CUDA GPU found: the XLA implementations and torch are timed on the CPU, wall time only.")
    budget = timing.QUICK if args.quick or not gpu else timing.Budget()
    complete = gpu and not args.quick and args.shapes is None and args.masks == "full" and not args.no_compile
    settings = {"weights": checkpoint.origin, "masks": args.masks}
    if not args.no_compile and gpu:
        settings["torch.compile"] = args.compile_mode
    result = results.Result(
        benchmark=NAME,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        partial=True,
        environment=environment.describe(),
        ceilings={},
        settings=settings,
        cases=[],
    )
    say(f"{result.environment['device']}, weights: {checkpoint.origin}; compiling {len(shapes)} shapes for JAX")
    jax_models = JaxModels(checkpoint, args.dtype, shapes, gpu=gpu)
    torch_models = TorchModels(checkpoint, args.dtype, args, gpu=gpu)
    if gpu:
        say("measuring the device's ceilings")
        result.ceilings.update(environment.measure_ceilings(budget))
    for dtype in args.dtype:
        for shape in shapes:
            sets = draw_inputs(shape, checkpoint.config.vocab_size, args.masks)
            references = jax_reference(checkpoint, sets) if torch_models.missing else torch_models.reference(sets)
            attempts = [*jax_models.attempts(dtype, shape, sets), *torch_models.attempts(dtype, sets)]
            for attempt in attempts:
                attempt.check(references, LIMITS[dtype])
            ready = {a.name: a.candidate for a in attempts if a.ready and a.candidate is not None}
            outcomes = timing.measure(ready, budget, on_device=gpu)
            case = Case(
                label=f"{shape[0]}x{shape[1]} {dtype}",
                dtype=dtype,
                shape={"batch": shape[0], "seq": shape[1]},
                flop=minilm_models.flop(checkpoint.config, *shape),
                entries=[attempt.entry(outcomes.get(attempt.name)) for attempt in attempts],
                bytes=minilm_models.least_bytes(
                    checkpoint.config, shape[0], shape[1], np.dtype(DTYPES[dtype]).itemsize
                ),
            )
            result.cases.append(case)
            results.save(result, args.output)  # kept, should the run be interrupted
            say(f"{case.label}: {summary(case, tables.device if gpu else tables.wall)}")
    draft = results.path_of(result, args.output)
    if complete:
        result = dataclasses.replace(result, partial=False)
        results.save(result, args.output)
        draft.unlink()
    if args.show_results:
        print(
            "\n" + tables.comparison(result) + "\n\n" + tables.entries(result) + "\n\n" + tables.conditions(result)
        )
    for line in tables.problems(result):
        print(line)
    say(f"results: {results.path_of(result, args.output)}")
    ours = [entry for case in result.cases for entry in case.entries if entry.family == "ours"]
    return int(any(entry.status != "ok" for entry in ours))


def summary(case: Case, clock: tables.Clock) -> str:
    """A line with the best of each family."""
    parts = []
    for family in tables.FAMILIES:
        if pair := tables.best(case, family, clock):
            parts.append(f"{pair[0].name} {tables.format_us(pair[1])} us")
    return ", ".join(parts) or "nothing could be timed"
