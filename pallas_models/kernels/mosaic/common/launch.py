"""How the kernels are launched: CTAs of warpgroups, and references by name."""

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import custom_batching
from jax.experimental import pallas as pl

from pallas_models import _jax
from pallas_models.kernels.common.backend import Ref
from pallas_models.kernels.common.primitives import tracing
from pallas_models.kernels.mosaic.common.backend import plgpu
from pallas_models.kernels.mosaic.common.interpreter import interpreter_params
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
    num_warpgroups: int | None,
    interpret: bool,
    cluster: int = 1,
    in_place: Mapping[str, jax.Array] | None = None,
    **compiler_params: Any,
) -> list[jax.Array]:
    """Runs `body` in each warpgroup of each CTA, whose indices are on the axes "warpgroup" and "cta".

    Args:
      body: `body(refs)` sees operands, arrays `in_place`, outputs and scratch memory as attributes.
      operands: arrays in device memory, None for those that a call does not have.
      out_type: the outputs of the kernel, None for those that a call does not ask for.
      scratch_types: shared memory and barriers of a CTA.
      num_warpgroups: of a CTA; None for one and no axis of them, as pipelines of Pallas want it.
      cluster: CTAs in each cluster; where there are several, "cta" and `num_ctas` count clusters, and the axis
        "rank" the CTAs of one.
      in_place: arrays that the kernel changes. Where nobody else uses one it is not copied.
      compiler_params: of Mosaic GPU, beside those that all kernels share.

    Returns:
      The arrays that were changed, then the outputs that are not None.
    """
    changed = in_place or {}
    present = {key: value for key, value in operands.items() if value is not None}
    outputs = {key: value for key, value in out_type.items() if value is not None}

    def kernel(*arrays: Ref, **scratch: Ref) -> None:
        if not interpret:
            plgpu.inline_mgpu()(functools.partial(_jax.prepare_mosaic_module, name=name))()
        absent = dict.fromkeys((*operands, *out_type))
        refs = types.SimpleNamespace(
            **absent | dict(zip((*present, *changed, *outputs), arrays, strict=True)) | scratch
        )
        # JAX traces a kernel anew where it is mapped over, under the user's settings.
        with (
            jax.enable_x64(False),
            jax.numpy_rank_promotion("allow"),
            jax.numpy_dtype_promotion("standard"),
            tracing(interpret),
        ):
            body(refs)

    kernel.__name__ = name
    call = plgpu.kernel(
        kernel,
        out_type=list(outputs.values()),
        scratch_types=dict(scratch_types),
        grid=(num_ctas,),
        grid_names=("cta",),
        **({} if num_warpgroups is None else dict(num_threads=num_warpgroups, thread_name="warpgroup")),
        **({} if cluster == 1 else dict(cluster=(cluster,), cluster_names=("rank",))),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup, **compiler_params
        ),
        interpret=interpreter_params() if interpret else None,
    )
    if not changed:
        results = call(*present.values())
        return results if interpret else compiled_ahead(results)

    # The references stay inside: transformations know nothing of them. JAX cannot map over that, so that
    # the arrays of a batch are changed one after another.
    @custom_batching.sequential_vmap
    def change(given: list[jax.Array], before: list[jax.Array]) -> list[jax.Array]:
        empty = [jax.lax.empty(x.shape, x.dtype) for x in outputs.values()]
        # In a loop XLA makes one operation of a call and the slices that it reads and writes, and forgets that
        # the call changes an array in place: what it leaves as it is would not be in the result.
        given, before = jax.lax.optimization_barrier((given, before))

        def run(refs: tuple[list[Ref], list[Ref]]) -> None:
            for ref, result in zip(refs[0], call(*given, *refs[1]), strict=True):
                ref[...] = result

        found, after = pl.run_state(run)((empty, before))
        changed_and_found: list[jax.Array] = jax.lax.optimization_barrier([*after, *found])
        return changed_and_found

    results = change(list(present.values()), list(changed.values()))
    return results if interpret else compiled_ahead(results)
