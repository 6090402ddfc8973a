"""The programs that the startup benchmark runs in processes of their own.

`python -m bench.models.startup_programs NAME OPTIONS` calls the function NAME with the arguments in OPTIONS, an
object in JSON, and prints its result as JSON on the last line. Each function imports the modules that it needs,
because imports are measured too.
"""

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SENTENCE = "A man is playing a guitar."
SECONDS = 0.5  # that a call is repeated, at least


def program(model: str, dtype: str, sizes: Sequence[int]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of a model, and its arguments, which have shapes but no values."""
    import functools

    import jax
    import jax.numpy as jnp

    from pallas_models import gpt2, minilm, qwen3, trimul

    target = jnp.dtype(dtype)
    x = jax.ShapeDtypeStruct(tuple(sizes), target)

    def params(init: Callable[..., Any], config: Any) -> Any:
        matrices = jnp.float16 if model == "trimul" else target  # trimul's are float16 whatever x is
        return jax.eval_shape(functools.partial(init, config=config, dtype=matrices), jax.random.key(0))

    function: Callable[..., Any]
    config: Any
    args: tuple[Any, ...]
    if model == "minilm":
        ids, config = jax.ShapeDtypeStruct(tuple(sizes), jnp.int32), minilm.MiniLMConfig()
        function = functools.partial(minilm.embed, config=config)
        args = params(minilm.init, config), ids, ids
    elif model == "gpt2":
        config = gpt2.GPT2Config()
        x = jax.ShapeDtypeStruct((*sizes, config.hidden_size), target)
        function = functools.partial(gpt2.block, num_heads=config.num_heads)
        args = params(gpt2.init_block, config), x
    elif model == "qwen3":
        config = qwen3.Qwen3Config()
        x = jax.ShapeDtypeStruct((*sizes, config.hidden_size), target)
        function = functools.partial(qwen3.layer, config=config)
        args = params(qwen3.init_layer, config), x
    elif model == "trimul":
        mask = jax.ShapeDtypeStruct(x.shape[:3], jnp.float32)
        function = functools.partial(trimul.trimul, direction="outgoing")
        args = params(trimul.init, trimul.TriMulConfig(channels=x.shape[-1])), x, mask
    else:
        raise ValueError(f"{model=}; expected minilm, gpt2, qwen3 or trimul")
    return function, args


def compile_program(model: str, dtype: str, sizes: Sequence[int], implementation: str | None) -> dict[str, float]:
    """Seconds of tracing, lowering and compiling one program."""
    import functools

    import jax

    function, args = program(model, dtype, sizes)
    jitted = jax.jit(functools.partial(function, implementation=implementation))
    start = time.perf_counter()
    traced = jitted.trace(*args)
    at_lower = time.perf_counter()
    lowered = traced.lower()
    at_compile = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    return {"trace_s": at_lower - start, "lower_s": at_compile - at_lower, "compile_s": end - at_compile}


class Parts:
    """Where the seconds of `Encoder.encode` go: of the main thread, and when else something was there."""

    def __init__(self) -> None:
        from pallas_models.sentence import packing, pipeline, programs, tokenizing

        self._found: dict[str, float] = {}
        self._begun = time.perf_counter()
        self._adds(pipeline, "_tokenized", "tokens_awaited_s")
        self._adds(packing, "pack", "packing_s")
        self._adds(programs.Programs, "_lower", "lowering_s")
        self._adds(programs.Programs, "__call__", "batches_started_s")  # with the time that it waits for a program
        self._last(tokenizing, "_start", "processes_up_at_s")
        self._last(tokenizing.Processes, "__call__", "tokenized_at_s")
        self._last(programs.Programs, "_compile", "compiled_at_s")
        self._last(pipeline, "_collect", "collected_at_s")

    def begin(self) -> None:
        self._found.clear()
        self._begun = time.perf_counter()

    def end(self, prefix: str) -> dict[str, float]:
        return {f"{prefix}_{name}": seconds for name, seconds in self._found.items()}

    def _adds(self, owner: Any, name: str, figure: str) -> None:
        """Adds up the seconds of a function, of one that yields those until each of its values is there."""
        function = getattr(owner, name)

        def clocked(call: Callable[..., Any], *args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            self._found[figure] = self._found.get(figure, 0.0) + time.perf_counter() - start
            return result

        def timed(*args: Any) -> Any:
            result = clocked(function, *args)
            return iter(lambda: clocked(next, result, None), None) if hasattr(result, "send") else result

        setattr(owner, name, timed)

    def _last(self, owner: Any, name: str, figure: str) -> None:
        """Notes when the last call of a function was done."""
        function = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self._found[figure] = time.perf_counter() - self._begun
            return result

        setattr(owner, name, timed)


def encode(
    sentences: str, weights: str | None, dtype: str, cache: str | None, started: float, count: int | None = None
) -> dict[str, float]:
    """Seconds of a user's first minute: from the start of the process to the embeddings of a corpus.

    Args:
      sentences: a JSON file with a list of them.
      count: how many sentences to embed: those over and over. None for all of them, once.
      weights: what `Encoder.from_pretrained` takes; None for its default.
      dtype: of the encoder.
      cache: folder of the persistent compilation cache; None for none.
      started: `time.time()` when the process was started.
    """
    import inspect

    import jax

    from pallas_models.minilm import Encoder

    imported = time.time()
    options: dict[str, Any] = {"dtype": dtype}
    if "compilation_cache" in inspect.signature(Encoder.from_pretrained).parameters:
        options["compilation_cache"] = cache
    elif cache:  # the same by JAX's own settings
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    encoder = Encoder.from_pretrained(*([] if weights is None else [weights]), **options)
    loaded = time.time()
    with open(sentences, encoding="utf-8") as file:
        texts = json.load(file)
    texts = list(itertools.islice(itertools.cycle(texts), count or len(texts)))
    parts = Parts()
    before = time.time()
    parts.begin()
    encoder.encode(texts)
    first = time.time()
    found = parts.end("first")
    parts.begin()
    encoder.encode(texts)
    second = time.time()
    return {
        "import_s": imported - started,
        "load_s": loaded - imported,
        "first_encode_s": first - before,
        "second_encode_s": second - first,
        **found,
        **parts.end("second"),
        "total_s": first - started,
    }


def embed(batch: int, seq: int, dtype: str, gpu: bool) -> dict[str, Any]:
    """Microseconds a call of the MiniLM forward pass: queued, and with a wait after each.

    Returns:
      The figures of "pallas" and "xla" with the parameters as arguments and "bound", part of the program, of
      "one-kernel", a program that adds 1 to the mask, most of whose time is the host's, and of "torch-graph", or
      for torch's the reason why there are none.
    """
    import functools

    import jax

    from bench.cases import minilm as benchmark
    from bench.measuring import timing, torch_programs
    from bench.models import minilm_models
    from pallas_models import minilm

    checkpoint = minilm_models.load_checkpoint(None)
    params = checkpoint.params(dtype)
    shape, vocabulary = (batch, seq), checkpoint.config.vocab_size
    sets = jax.device_put([benchmark.random_inputs(shape, vocabulary, "full", seed) for seed in range(4)])
    ours = functools.partial(minilm.embed, config=checkpoint.config)
    by_xla = functools.partial(ours, implementation="xla")
    jitted = {"pallas": jax.jit(ours), "xla": jax.jit(by_xla)}
    # As a torch module holds its parameters, so do these programs.
    bound = {"pallas-bound": functools.partial(ours, params), "xla-bound": functools.partial(by_xla, params)}
    functions = {name: functools.partial(function, params) for name, function in jitted.items()}
    functions |= {name: jax.jit(function) for name, function in bound.items()}
    functions["one-kernel"] = jax.jit(lambda ids, mask: mask + 1)

    def queue(function: Callable[..., Any], i: int) -> Any:
        return function(*sets[i % len(sets)])

    candidates = {
        name: timing.Candidate(call=functools.partial(queue, function), wait=jax.block_until_ready)
        for name, function in functions.items()
    }
    found: dict[str, Any] = {}
    if missing := minilm_models.torch_missing() or ("" if gpu else "CUDA graphs need a GPU"):
        found["torch-graph"] = missing
    else:
        import torch

        model = minilm_models.torch_model(checkpoint, dtype, "cuda")
        inputs = [tuple(torch.from_dlpack(x).long() for x in given) for given in jax.block_until_ready(sets)]
        graphs = torch_programs.capture(model, inputs, beside=0)
        candidates["torch-graph"] = timing.Candidate(
            call=lambda i: graphs[i % len(graphs)](), wait=torch_programs.synchronize
        )

    def wait_for(candidate: timing.Candidate, i: int) -> None:
        candidate.wait(candidate.call(i))

    outcomes = timing.measure(candidates, timing.STANDARD, on_device=False)
    for name, outcome in outcomes.items():
        if isinstance(outcome, Exception):
            raise outcome
        each = microseconds(functools.partial(wait_for, candidates[name]))
        found[name] = {"queued_us": outcome.wall.median_us, "synchronised_us": each}
    return found


def sentence(weights: str | None, dtype: str) -> dict[str, float]:
    """Microseconds of `Encoder.encode` of one short sentence."""
    from pallas_models.minilm import Encoder

    encoder = Encoder.from_pretrained(*([] if weights is None else [weights]), dtype=dtype)
    return {"synchronised_us": microseconds(lambda _: encoder.encode(SENTENCE))}


def eager(size: int) -> dict[str, dict[str, float]]:
    """Microseconds of `ops.matmul` and of `jnp.matmul`, not jitted, of two square float32 matrices."""
    import functools

    import jax
    import jax.numpy as jnp

    from pallas_models import ops

    x, w = jax.random.normal(jax.random.key(0), (2, size, size))
    functions: dict[str, Callable[..., Any]] = {"pallas": ops.matmul, "xla": jnp.matmul}

    def wait_for(function: Callable[..., Any], i: int) -> None:
        jax.block_until_ready(function(x, w))

    return {
        name: {"synchronised_us": microseconds(functools.partial(wait_for, function))}
        for name, function in functions.items()
    }


def microseconds(call: Callable[[int], Any]) -> float:
    """The median time of a call that waits for its result, after a few to warm up."""
    for i in range(5):
        call(i)
    samples: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(samples) < 10 or time.perf_counter() < end:
        start = time.perf_counter()
        call(len(samples))
        samples.append(time.perf_counter() - start)
    return 1e6 * sorted(samples)[len(samples) // 2]


PROGRAMS = {program.__name__: program for program in (compile_program, encode, embed, sentence, eager)}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))))
