"""What turns a contender's torch function into calls that can be timed."""

import functools
import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bench.measuring import timing
from bench.measuring.contenders import Attempt, Contender, absent, set_bytes


class TorchPrograms:
    """Runs the torch contenders: eager, in CUDA graphs, compiled, and compiled in CUDA graphs.

    A CUDA graph is made for every input set and reads it where it lies, as for a caller who writes its inputs into
    the graph's own buffers.
    """

    def __init__(self, *, gpu: bool, compile_mode: str, compile_budget: float, no_compile: bool):
        self.gpu, self.compile_mode = gpu, compile_mode
        self.compile_budget, self.no_compile = compile_budget, no_compile
        self.compile_s = 0.0  # spent so far
        self.largest = 0  # bytes that a call of the case takes outside CUDA graphs
        self.missing = self._missing()

    def _missing(self) -> str:
        try:
            import torch
        except ImportError as error:
            return absent(error)
        if self.gpu and not torch.cuda.is_available():
            return f"torch {torch.__version__} finds no CUDA device"
        if hasattr(torch._dynamo.config, "recompile_limit"):
            torch._dynamo.config.recompile_limit = 64  # one program a shape and dtype, more than its default of 8
        if self.gpu:
            torch.cuda.set_per_process_memory_fraction(_share())
        return ""

    def forget(self) -> None:
        """Gives the GPU's memory back that torch keeps of a case which nothing refers to any more."""
        self.largest = 0
        if self.gpu and not self.missing:
            import torch

            gc.collect()  # tensors that an error refers to which refers to itself
            torch.cuda.empty_cache()

    def attempts(self, contender: Contender, sets: Sequence[tuple[Any, ...]]) -> list[Attempt]:
        """A contender, ready to be called on the input sets, in each of its ways."""
        made = {
            way: Attempt(name=f"{contender.name}-{way}", family=contender.family, compared=contender.compared)
            for way in contender.ways
        }
        reason = contender.skip or self.missing
        if reason:
            for attempt in made.values():
                attempt.skipped = reason
            return list(made.values())
        try:
            function, inputs = contender.load(), self._inputs(contender, sets)
        except Exception as error:  # reported as these candidates' result
            for attempt in made.values():
                attempt.stop(error)
            return list(made.values())
        around = contender.around or (lambda function: function)
        compiled: Any = None
        for way, attempt in made.items():
            attempt.skipped = self._reason(way, begun=compiled is not None)
            if attempt.skipped:
                continue
            try:
                if "compile" in way and compiled is None:
                    compiled = self._compiled(function, around, inputs[0])
                chosen, attempt.compile_s = compiled if "compile" in way else (around(function), None)
                if isinstance(chosen, Exception):
                    raise chosen
                if self.gpu and "graph" not in way:
                    attempt.peak_bytes = self._peak_bytes(chosen, inputs[0])
                calls = capture(chosen, inputs, self.largest) if "graph" in way else _calls(chosen, inputs)
            except Exception as error:  # reported as this candidate's result
                attempt.stop(error)
            else:
                self._ready(attempt, calls, contender)
        return list(made.values())

    def _inputs(self, contender: Contender, sets: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        import torch

        jax.block_until_ready(sets)
        return [contender.prepared(tuple(map(torch.from_dlpack, given))) for given in sets]

    def _reason(self, way: str, *, begun: bool) -> str:
        if not self.gpu and way != "eager":
            return "CUDA graphs and torch.compile are measured on a GPU"
        if "compile" in way and self.no_compile:
            return "--no-compile"
        if "compile" in way and not begun and self.compile_s > self.compile_budget:
            return f"--compile-budget: torch.compile had taken {self.compile_s:.0f} s"
        return ""

    def _compiled(
        self,
        function: Callable[..., Any],
        around: Callable[[Callable[..., Any]], Callable[..., Any]],
        inputs: tuple[Any, ...],
    ) -> tuple[Any, float]:
        """`around` the compiled function, or what it raised, and the seconds it took."""
        import torch

        start = time.perf_counter()
        try:
            compiled: Any = around(torch.compile(function, dynamic=False, mode=self.compile_mode))
            compiled(*inputs)
            torch.cuda.synchronize()
        except Exception as error:  # reported as this candidate's result
            compiled = error
        seconds = time.perf_counter() - start
        self.compile_s += seconds
        return compiled, seconds

    def _peak_bytes(self, function: Callable[..., Any], inputs: tuple[Any, ...]) -> float:
        function(*inputs)  # workspaces that stay are made on first use
        peak = _bytes_of(function, inputs)
        self.largest = max(self.largest, peak)
        return float(peak + set_bytes(inputs))

    def _ready(self, attempt: Attempt, calls: list[Callable[[], Any]], contender: Contender) -> None:
        def call(i: int) -> Any:
            return calls[i % len(calls)]()

        def output(i: int) -> Any:
            out = call(i)
            if self.gpu:
                synchronize(out)
            return jax.tree.map(lambda leaf: jax.dlpack.from_dlpack(leaf.detach().contiguous()), out)

        attempt.candidate = timing.Candidate(
            call=call,
            wait=synchronize if self.gpu else lambda _: None,
            events=_cuda_events if self.gpu else None,
            launches_at_least=contender.launches,
        )
        attempt.output = output


def _calls(function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> list[Callable[[], Any]]:
    return [functools.partial(function, *given) for given in inputs]


def _bytes_of(function: Callable[..., Any], inputs: tuple[Any, ...]) -> int:
    """The most memory that a call of a torch function takes, its result included."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function(*inputs)
    return int(torch.cuda.max_memory_allocated() - before)


def capture(
    function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], beside: int
) -> list[Callable[[], Any]]:
    """Captures a torch function in a CUDA graph for every input set; a call replays the graph.

    Args:
      beside: bytes that must be left for other calls.

    Raises:
      MemoryError: the graph would leave less. torch never gives the memory of a capture back that ran out of it.
    """
    import torch

    calls: list[Callable[[], Any]] = []
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # work that is done once, on first use, must not be captured
            needed = 1.2 * _bytes_of(function, inputs[0])  # a graph's pool has larger blocks
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, memory = torch.cuda.mem_get_info()
        left = min(free, _share() * memory - torch.cuda.memory_reserved())
        if needed + beside > left:
            raise MemoryError(
                f"a CUDA graph takes {needed / 1e9:.1f} GB and other calls {beside / 1e9:.1f}, of {left / 1e9:.1f}"
            )
        for given in inputs:  # not with torch.cuda.graph, which collects garbage each time: 0.1 s
            graph = torch.cuda.CUDAGraph()
            # thread_local: JAX's threads share the process and may call CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                output = function(*given)
            finally:
                graph.capture_end()
            calls.append(functools.partial(_replay, graph, output))
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    return calls


def _share() -> float:
    """The part of the GPU's memory that torch may take: what JAX, its programs and both contexts leave."""
    return 0.97 - float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))


def _replay(graph: Any, output: Any) -> Any:
    graph.replay()
    return output


def synchronize(_: Any) -> None:
    """Waits until torch's GPU has done everything."""
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
