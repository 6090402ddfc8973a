"""Matrix product with a fused epilogue, for Hopper."""
import functools
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from pallas_models.kernels.mosaic._common import Ref, tiled
from pallas_models.kernels.mosaic._gemm import CONSUMERS, Config, Refs, Tile, gemm

def matmul(x, w, *, config, interpret, transpose_w=False, out_dtype=None):
    (m, k), n = x.shape, w.shape[0 if transpose_w else 1]
    out_dtype = out_dtype or x.dtype
    width=64
    slots=2

    def epilogue(refs, tile, sums, wg):
        for c in range(0, tile.num_columns, width):
            slot=(c//width)%slots
            plgpu.wait_smem_to_gmem(slots-1, wait_read_only=True)
            buf = refs.out.at[wg, slot]
            buf[...] = sums[:, c:c+width].astype(out_dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buf, refs.o.at[tile.rows, pl.ds(tile.column + c, width)])
    return gemm(dict(x=x, w=w), dict(o=jax.ShapeDtypeStruct((m,n), out_dtype)), config=config, m=m,n=n,k=k,dtype=x.dtype,
      a=lambda r,t,ks: r.x.at[t.rows, ks], b=[lambda r,t,ks: r.w.at[t.columns, ks] if transpose_w else r.w.at[ks, t.columns]],
      transpose_b=transpose_w, epilogue=epilogue, scratch_types=dict(out=tiled((CONSUMERS, slots, config.rows, width), out_dtype)), name="matmul", interpret=interpret)[0]
