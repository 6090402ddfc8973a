"""`python -m parity lowered FOLDER`: what the GPU's compilers are given, call by call, on any machine.

A change of structure is to change no kernel. Lower everything before it and after it, and compare:

    python -m parity lowered build/before
    python -m parity lowered build/after --compare build/before

FOLDER/programs.json has, for each call of `parity.cases` and for MiniLM, forward and backward, the digests
of its kernels and of the program around them; FOLDER/DIGEST.mlir is the text of each, without the lines of source
that it comes from. What differs is listed with the files to diff, and the exit code is then 1. Kernels of Mosaic
GPU are lowered where the CUDA plugin of JAX is installed; nothing else of CUDA is needed.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

from pallas_models import minilm
from parity.cases import BY_BACKEND
from parity.support.common import HOPPER, MOSAIC_CALL, TRITON_CALL, cuda_device

ADA = ("NVIDIA GeForce RTX 4090", 128)
EMBEDDED = ((1, 16), (1, 128), (64, 16), (64, 128), (256, 32), (512, 16), (256, 128), (32, 512), (3, 77))
PROGRAMS = "programs.json"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function to lower, and the GPU that it is for."""

    name: str
    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    device: tuple[str, int] = HOPPER


def squares(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """The sum of the squares of the results."""

    def total(*arrays: Any) -> jax.Array:
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in jax.tree.leaves(function(*arrays)))

    return total


def programs() -> Iterator[Program]:
    """Every call of every kernel with its gradient, and MiniLM."""
    for backend, calls in BY_BACKEND.items():
        sizes = [("float16", 16, HOPPER), ("bfloat16", 1, HOPPER)]
        sizes += [("float16", 16, ADA), ("float32", 16, HOPPER)] if backend == "triton" else []
        for call in calls:
            for dtype, size, device in sizes:
                arrays = call.arrays(dtype, size)
                moving = tuple(i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
                for implementation in (backend, None):
                    function, gpu = call(implementation), device[0].rpartition(" ")[2]
                    name = f"{backend}/{call.name}/{dtype}/{size}/{gpu}/{implementation}"
                    yield Program(name, function, arrays, device)
                    yield Program(f"{name}/gradient", jax.grad(squares(function), moving), arrays, device)
    config = minilm.MiniLMConfig()
    embed = functools.partial(minilm.embed, config=config)
    for dtype in ("float16", "float32"):
        params = jax.eval_shape(functools.partial(minilm.init, config=config, dtype=dtype), jax.random.key(0))
        for shape in EMBEDDED:
            tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
            name = f"minilm/{dtype}/{'x'.join(map(str, shape))}"
            yield Program(name, embed, (params, tokens, tokens))
        yield Program(f"{name}/gradient", jax.grad(squares(embed)), (params, tokens, tokens))


def lower(program: Program) -> Any:
    """The module of a program."""
    with cuda_device(*program.device):
        lowered = jax.jit(program.function).trace(*program.arrays).lower(lowering_platforms=("cuda",))
    return lowered.compiler_ir()


def texts(module: Any) -> tuple[str, list[str]]:
    """The program as MLIR without its kernels' code, and the kernels' code in order."""
    kernels = []
    with module.context:
        for call in _calls(module.operation):
            attributes = call.attributes
            key = next(name for name in ("mhlo.backend_config", "backend_config") if name in attributes)
            kernels.append("\n".join(f"{name}: {value}" for name, value in _readable(attributes[key])))
            attributes[key] = ir.StringAttr.get("")
    text = module.operation.get_asm(enable_debug_info=False, large_elements_limit=16)
    return re.sub(r"@[\w.]+", "@f", text), kernels  # functions are numbered as a process comes to them


def _calls(operation: Any) -> Iterator[Any]:
    if operation.name == "stablehlo.custom_call":
        name = ir.StringAttr(operation.attributes["call_target_name"]).value
        if name in (TRITON_CALL, MOSAIC_CALL):
            yield operation
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _calls(inner.operation)


def _readable(config: Any) -> Iterator[tuple[str, str]]:
    """The attributes of a kernel's call, its module as text."""
    for entry in config:
        value = entry.attr
        if entry.name in ("ir", "module"):
            yield entry.name, _module(value.value_bytes)
        elif entry.name != "kernel_hash":  # which the lines of source are part of
            yield entry.name, str(value)


def _module(code: bytes) -> str:
    from jax._src.interpreters import mlir
    from jax._src.lib import mosaic_gpu_dialect, triton

    with mlir.make_ir_context() as context:
        context.allow_unregistered_dialects = True
        mosaic_gpu_dialect.register_dialect(context)
        triton.dialect.register_dialect(context)
        module = ir.Module.parse(code)
        return str(module.operation.get_asm(enable_debug_info=False, print_generic_op_form=True))


def write(folder: Path, selected: Sequence[Program]) -> dict[str, Any]:
    """Lowers programs into a folder, and gives the digests; of one that is refused, the message."""
    folder.mkdir(parents=True, exist_ok=True)

    def keep(text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        (folder / f"{digest}.mlir").write_text(text, encoding="utf-8")
        return digest

    found: dict[str, Any] = {}
    for program in selected:
        try:
            module = lower(program)
        except (NotImplementedError, ValueError, TypeError, ModuleNotFoundError) as error:
            found[program.name] = f"{type(error).__name__}: {error}"
        else:
            text, kernels = texts(module)
            found[program.name] = {"program": keep(text), "kernels": sorted(map(keep, kernels))}
    (folder / PROGRAMS).write_text(json.dumps(found, indent=1, sort_keys=True), encoding="utf-8")
    return found


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each program that is lowered otherwise, or only once."""
    lines = []
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            kernels = [x for x in old["kernels"] if x not in new["kernels"]]
            others = [x for x in new["kernels"] if x not in old["kernels"]]
            what = f"kernels {kernels} became {others}"
            if not kernels and not others:
                what = f"the program around the kernels, {old['program']}, became {new['program']}"
        else:
            what = f"{old} became {new}"
        lines.append(f"{name}: {what}")
    return lines


def parser_of(name: str, description: str) -> argparse.ArgumentParser:
    """The arguments of a program that lowers."""
    parser = argparse.ArgumentParser(prog=f"python -m parity {name}", description=description)
    parser.add_argument("folder", type=Path, help="where it is written")
    parser.add_argument("--only", default="", metavar="PATTERN", help="programs whose names have this in them")
    parser.add_argument("--compare", type=Path, metavar="FOLDER", help="list what differs from what is there")
    return parser


def chosen(args: argparse.Namespace, every: Iterable[Program]) -> dict[str, Any]:
    """Lowers the programs that the arguments choose, and says how many they are; the digests."""
    found = write(args.folder, [program for program in every if re.search(args.only, program.name)])
    print(f"{len(found)} programs, {sum(isinstance(x, str) for x in found.values())} refused")
    return found


def compared(args: argparse.Namespace, after: dict[str, Any]) -> list[str]:
    """Says and returns how programs differ from those that they are to be compared with, if any are given."""
    if args.compare is None:
        return []
    before = json.loads((args.compare / PROGRAMS).read_text(encoding="utf-8"))
    lines = differences({name: value for name, value in before.items() if re.search(args.only, name)}, after)
    print(*lines, f"{len(lines)} differ", sep="\n")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser_of("lowered", "Write what the GPU's compilers are given, or compare it.").parse_args(arguments)
    return int(bool(compared(args, chosen(args, programs()))))
