"""How the kernels are launched: CTAs of warpgroups, and references by name."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.mlir import ir

from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import interpreter_params, tracing
from pallas_models.kernels.mosaic.common.parallel_compile import compiled_ahead

Refs = Any  # a namespace of references, by the names that `launch` was given


def launch(
    body: Callable[[Refs], None],
    operands: Mapping[str, jax.Array | None],
    out_type: Mapping[str, jax.ShapeDtypeStruct | None],
    scratch_types: Mapping[str, Any],
    *,
    name: str,
    num_ctas: int,
    num_warpgroups: int,
    interpret: bool,
    cluster: int = 1,
    **compiler_params: Any,
) -> list[jax.Array]:
    """Runs `body` in each warpgroup of each CTA, whose indices are those of the axes "warpgroup" and "cta".

    Args:
      body: `body(refs)` sees operands, outputs and scratch memory as attributes.
      operands: arrays in device memory, None for what a call does not have.
      out_type: what the kernel writes, None for what a call does not ask for.
      scratch_types: shared memory and barriers of a CTA.
      cluster: CTAs in each cluster; where there are several, "cta" and `num_ctas` count clusters, and the axis
        "rank" the CTAs of one.
      compiler_params: of Mosaic GPU, beside those that all kernels share.

    Returns:
      The outputs that are not None.
    """
    present = {key: value for key, value in operands.items() if value is not None}
    outputs = {key: value for key, value in out_type.items() if value is not None}

    def kernel(*arrays: Ref, **scratch: Ref) -> None:
        if not interpret:
            _prepare_module(name)
        absent = dict.fromkeys((*operands, *out_type))
        refs = types.SimpleNamespace(**absent | dict(zip((*present, *outputs), arrays, strict=True)) | scratch)
        # JAX traces a kernel anew where it is mapped over, under the user's settings.
        with (
            jax.enable_x64(False),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            tracing(interpret),
        ):
            body(refs)

    kernel.__name__ = name
    results = plgpu.kernel(
        kernel,
        out_type=list(outputs.values()),
        scratch_types=dict(scratch_types),
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        **({} if cluster == 1 else dict(cluster=(cluster,), cluster_names=("rank",))),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **compiler_params
        ),
        interpret=interpreter_params() if interpret else None,
    )(*present.values())
    return results if interpret else compiled_ahead(results)


def _prepare_module(name: str) -> None:
    """Makes the module that a kernel becomes one that compiles faster, and once for equal kernels."""

    @plgpu.inline_mgpu()
    def prepare(context: Any) -> None:
        # Inference of layouts has MLIR check the module hundreds of times: to wake threads takes longer than that.
        context.module.context.enable_multithreading(False)
        if jax.__version_info__ >= (0, 11):
            _set_name(ir.InsertionPoint.current.block, name)
        context.scratch.host_init.append(functools.partial(_copy_words, context.scratch))

    prepare()


def _set_name(block: Any, name: str) -> None:
    """Names the module; else JAX numbers modules as a process comes to lower them.

    By their numbers equal kernels would differ: XLA would compile each of them, and the persistent compilation
    cache would find a program only where a process has lowered the same kernels before it.
    """
    module = block.owner
    while module.parent is not None:
        module = module.parent
    module.attributes["mosaic_gpu.dump_basename"] = ir.StringAttr.get(name)


def _copy_words(scratch: Any, memory: Any) -> None:
    """Has the host hand over the descriptors of copies, 128 bytes each, in vectors of 64 bytes.

    JAX hands them over as an array of bytes, which LLVM loads and stores one by one; the time to optimise that
    grows with the square of their number. It was a quarter of what compiling a product with five of them takes;
    with words of 64 bits it was a fifth of what compiling a kernel with 24 takes.
    """
    words = ir.Type.parse(f"!llvm.array<{scratch.next_offset // 64} x vector<8xi64>>")
    memory.owner.attributes["elem_type"] = ir.TypeAttr.get(words)
    (load,) = (use.owner for use in memory.uses if use.owner.name == "llvm.load")
    load.result.set_type(words)
