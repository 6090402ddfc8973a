"""Trains a small GPT-2 from scratch on the bytes of texts, keeps checkpoints, and writes a sample at the end.

    python examples/train_gpt2.py --text README.md --steps 1000 --checkpoints runs/readme

Run again with the same --checkpoints and more --steps, it goes on where it stopped, with the batches that it would
have seen. Small texts are learned by heart: the loss of the last tenth of the text, which it is not trained on,
shows how well it does on others.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from pallas_models import gpt2, training
from pallas_models.gpt2 import GPT2Config

State = tuple[Any, Any]  # parameters and the state of the optimiser


def at_least(least: int) -> Callable[[str], int]:
    """An integer of the command line that is no less."""

    def integer(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value}; expected at least {least}")
        return value

    return integer


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small GPT-2 on the bytes of texts.")
    root = Path(__file__).parents[1]
    texts = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").glob("*.md"))]
    parser.add_argument("--text", type=Path, nargs="+", default=texts, help="files; the documentation here")
    parser.add_argument("--checkpoints", type=Path, help="folder to keep checkpoints in and to go on from")
    parser.add_argument("--steps", type=at_least(1), default=300, help="to have taken at the end")
    parser.add_argument("--save-every", type=at_least(1), default=100, help="steps between checkpoints")
    parser.add_argument("--batch-size", type=at_least(1), default=32, help="sequences a step")
    parser.add_argument("--length", type=at_least(2), default=256, help="bytes of a sequence")
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--width", type=at_least(1), default=256, help="of the model, a multiple of 64")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the products")
    parser.add_argument("--sample", type=at_least(0), default=200, help="bytes to write at the end")
    args = parser.parse_args(arguments)
    if args.width % gpt2.HEAD_DIM:
        parser.error(f"argument --width: {args.width}; expected a multiple of {gpt2.HEAD_DIM}")
    return args


def check_model(args: argparse.Namespace) -> None:
    """Ends the program where the checkpoints are of a model of other sizes; notes the sizes of the first."""
    sizes = {f"--{name}": getattr(args, name) for name in ("layers", "width", "length")}
    path = args.checkpoints / "model.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sizes))
    elif (found := json.loads(path.read_text())) != sizes:
        of, given = (" ".join(f"{name} {size}" for name, size in each.items()) for each in (found, sizes))
        sys.exit(f"{args.checkpoints} has checkpoints of a model with {of}; got {given}")


def batch(data: np.ndarray, step: int, batch_size: int, length: int) -> np.ndarray:
    """The sequences of a step, which depend on its number alone."""
    starts = np.random.default_rng(step).integers(0, len(data) - length + 1, batch_size)
    return data[starts[:, None] + np.arange(length)].astype(np.int32)


def sample(params: Any, config: GPT2Config, prompt: bytes, count: int) -> bytes:
    """Goes on after a prompt, a byte at a time, each drawn from the model's distribution."""

    @jax.jit
    def draw(ids: jax.Array, mask: jax.Array, key: jax.Array) -> jax.Array:
        logits = gpt2.logits(params, ids, mask, config=config, last_only=True)
        return jax.random.categorical(key, logits[0])

    text, length = bytearray(prompt), config.max_positions
    for key in jax.random.split(jax.random.key(1), count):
        seen = text[-length:]
        padding = length - len(seen)  # one shape, so one program, whatever the length of the text
        ids = jnp.asarray([[0] * padding + list(seen)], jnp.int32)
        text.append(int(draw(ids, jnp.asarray([[0] * padding + [1] * len(seen)]), key)))
    return bytes(text)


def main(arguments: Sequence[str] | None = None) -> dict[int, float]:
    """Trains; returns the loss before each step, in nats a byte."""
    args = parse(arguments)
    data = np.frombuffer(b"\n".join(path.read_bytes() for path in args.text), np.uint8)
    cut = len(data) * 9 // 10
    if len(data) - cut < args.length:
        sys.exit(f"the texts have {len(data)} bytes; expected at least {10 * args.length}, ten times --length")
    if args.checkpoints is not None:
        check_model(args)
    held_out = batch(data[cut:], 0, args.batch_size, args.length)
    config = GPT2Config(
        vocab_size=256,
        hidden_size=args.width,
        num_layers=args.layers,
        num_heads=args.width // gpt2.HEAD_DIM,
        intermediate_size=4 * args.width,
        max_positions=args.length,
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(optax.warmup_constant_schedule(0.0, args.learning_rate, 20), b2=0.95, weight_decay=0.1),
    )

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        return gpt2.loss(training.cast(params, args.dtype), ids, config=config)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: State, ids: jax.Array) -> tuple[State, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, ids)
        changes, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, changes), moments), value

    params = gpt2.init(jax.random.key(0), config)
    state, first, manager = (params, optimizer.init(params)), 0, None
    if args.checkpoints is not None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=args.save_every)
        manager = ocp.CheckpointManager(args.checkpoints.absolute(), options=options)
        if (last := manager.latest_step()) is not None:
            state, first = manager.restore(last, args=ocp.args.StandardRestore(state)), last
            print(f"going on after step {first}")
    losses: dict[int, float] = {}
    started = time.perf_counter()
    for step in range(first, args.steps):
        state, value = update(state, batch(data[:cut], step, args.batch_size, args.length))
        losses[step] = float(value)
        if manager is not None:
            manager.save(step + 1, args=ocp.args.StandardSave(state), force=step + 1 == args.steps)
        if step % 20 == 0 or step + 1 == args.steps:
            rate = (step + 1 - first) * args.batch_size * args.length / (time.perf_counter() - started)
            print(f"step {step}: loss {losses[step]:.3f}, {rate:,.0f} bytes/s", flush=True)
    if manager is not None:
        manager.close()  # waits until all is written
    print(f"loss of text not seen: {float(jax.jit(loss)(state[0], held_out)):.3f}")
    if args.sample:
        print(sample(state[0], config, b"The ", args.sample).decode("utf-8", "replace"))
    return losses


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(f"error: {error}")
