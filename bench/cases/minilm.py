"""The MiniLM forward pass, token ids to embeddings: ours against XLA and torch."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from bench.measuring import environment
from bench.measuring.harness import COSINE, Benchmark, Contender, Shape, Workload, itemsize
from bench.measuring.results import Result
from bench.models import minilm_models
from bench.models.minilm_models import Checkpoint
from bench.reporting import tables
from pallas_models import minilm

HELP = "MiniLM forward pass: ours, XLA, torch"
SHOWN = "64x128 fp16"  # the case in README.md

INPUT_SETS = 4  # rotated from call to call; in real use, too, the weights are what fills the cache

STEP_SHAPES = ((1, 128), (64, 128))  # where every step is measured, of which the default is the last

# Upper bounds on 1 - cosine, for random token ids and weights rounded to the dtype. Measured over a few batches:
# 1e-7, 2e-6 and 7e-5; the largest of the rows of a large batch is a few times that.
LIMITS = {"fp32": 1e-5, "fp16": 2e-5, "bf16": 3e-4}


def random_inputs(shape: tuple[int, int], vocab_size: int, masks: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws ids and mask, int32 (B, S); ragged lengths are uniform in [S / 4, S], one being S."""
    batch, seq = shape
    rng = np.random.default_rng(seed)
    lengths = np.full(batch, seq)
    if masks == "ragged":
        lengths[1:] = rng.integers(max(1, seq // 4), seq + 1, batch - 1)
    mask = (np.arange(seq) < lengths[:, None]).astype(np.int32)
    return rng.integers(1, vocab_size, shape, dtype=np.int32) * mask, mask


class Models:
    """The models that are compared, each made once a dtype."""

    def __init__(self, checkpoint: Checkpoint, masks: str, *, gpu: bool):
        self.checkpoint, self.masks, self.gpu = checkpoint, masks, gpu
        self.params = functools.cache(checkpoint.params)
        self.plain = functools.cache(functools.partial(minilm_models.plain_jax, checkpoint))
        self.torch = functools.cache(self._torch)

    def _torch(self, dtype: str) -> Callable[..., Any]:
        if missing := minilm_models.torch_missing():
            raise ImportError(missing)
        return minilm_models.torch_model(self.checkpoint, dtype, "cuda" if self.gpu else "cpu")

    def reference(self, ids: jax.Array, mask: jax.Array) -> np.ndarray:
        """The embeddings in float32, by torch or, where it is missing, by plain JAX."""
        try:
            model = self.torch("fp32")
        except ImportError:
            params, embed = self.plain("fp32")
            return np.asarray(jax.jit(embed)(params, ids, mask))
        import torch

        tensors = (torch.from_dlpack(x).long() for x in (ids, mask))
        return np.asarray(model(*tensors).cpu().numpy())

    def contenders(self, dtype: str, *, steps: bool) -> list[Contender]:
        """The contenders; `steps`: also the forward pass with our kernels added one after another."""
        config = self.checkpoint.config
        ours = functools.partial(minilm.embed, config=config)
        params, (plain_params, plain) = self.params(dtype), self.plain(dtype)
        found = [
            Contender("xla-plain", "xla", lambda: plain, params=(plain_params,)),
            Contender("xla-ops", "xla", lambda: functools.partial(ours, implementation="xla"), params=(params,)),
            Contender(
                "xla-cudnn",
                "xla",
                lambda: self.plain(dtype, attention="cudnn")[1],
                params=(plain_params,),
                skip="" if self.gpu and dtype != "fp32" else "cuDNN attention takes fp16 and bf16 on a GPU",
            ),
            Contender(
                "torch",
                "torch",
                lambda: self.torch(dtype),
                prepare=lambda ids, mask: (ids.long(), mask.long()),
                launches=4 * config.num_layers,  # the linear maps of a layer are kernels of their own in torch
            ),
        ]
        ladder = [
            Contender(
                name,
                "ladder",
                functools.partial(minilm_models.stepped, config, name),
                params=(params,),
                gpu=True,
            )
            for name in (minilm_models.STEPS if steps else ())
        ]
        return [Contender("pallas", "ours", lambda: ours, params=(params,), gpu=True), *ladder, *found]

    def workload(self, dtype: str, shape: Shape) -> Workload:
        """One forward pass."""
        batch, seq = map(int, shape)
        config = self.checkpoint.config
        if seq > config.max_positions:
            raise ValueError(f"{batch}x{seq}: longer than the model's {config.max_positions} positions")
        return Workload(
            inputs=lambda seed: random_inputs((batch, seq), config.vocab_size, self.masks, seed),
            reference=self.reference,
            contenders=self.contenders(dtype, steps=(batch, seq) in STEP_SHAPES),
            flop=minilm_models.flop(config, batch, seq),
            bytes=minilm_models.least_bytes(config, batch, seq, itemsize(dtype)),
            measure=COSINE,
            limit=LIMITS[dtype],
            sets=INPUT_SETS,
        )


def steps(result: Result) -> str:
    """Device time as our kernels take the place of XLA's, one kind after another; empty if not measured."""
    cases = [case for case in result.cases if any(entry.family == "ladder" for entry in case.entries)]
    times = [{entry.name: entry.device for entry in case.entries} for case in cases]
    steps = list(dict.fromkeys(e.name for case in cases for e in case.entries if e.family == "ladder"))
    names = ["xla-ops", *steps, "pallas"]
    titles = ["nothing, all in XLA", *steps, "step-5-norms-in-the-products"]
    rows = []
    for title, name, before in zip(titles, names, [None, *names[:-1]], strict=True):
        row = [title]
        for found in times:
            now, last = found.get(name), found.get(before) if before else None
            gain = f"{last.median_us - now.median_us:.3g}" if now and last else "-"
            row += [tables.format_us(now), gain]
        rows.append(row)
    header = [title for case in cases for title in (f"{case.label}, us", "less by")]
    return tables.markdown(["our kernels for", *header], rows) if steps else ""


def table(result: Result) -> str:
    """Device time, wall time, and the steps."""
    found = steps(result)
    return tables.comparison(result) + (f"\n\nStep by step, device time:\n\n{found}" if found else "")


BENCHMARK = Benchmark(
    name="minilm",
    axes=("batch", "seq"),
    shapes=((1, 16), (1, 128), (64, 16), (64, 128), (256, 32), (512, 16), (256, 128), (32, 512)),
    quick_shapes=((1, 16), (256, 128)),
    cpu_shapes=((1, 16), (1, 128)),
    dtypes=("fp16",),
    compile_budget=60.0,
    table=table,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `python -m bench minilm`."""
    BENCHMARK.add_arguments(parser)
    parser.add_argument("--weights", help="checkpoint folder, or tensor file with config.json beside it")
    parser.add_argument(
        "--masks", choices=("full", "ragged"), default="full", help="sentences of full or of random length"
    )


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark; returns the exit code."""
    checkpoint = minilm_models.load_checkpoint(args.weights)
    models = Models(checkpoint, args.masks, gpu=environment.has_gpu())
    benchmark = dataclasses.replace(
        BENCHMARK,
        workload=models.workload,
        settings={"weights": checkpoint.origin, "masks": args.masks},
        shortened=args.masks != "full",
    )
    return benchmark.run(args)
