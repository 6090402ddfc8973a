"""Attention of sequences that are spread over devices: keys and values go from device to device in a ring."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_models._implementation import Implementation, Name, check_implementation
from pallas_models.dispatch.run import run, run_backward
from pallas_models.dispatch.sharding import varying_alike
from pallas_models.kernels.common.scores import NO_KEY
from pallas_models.kernels.forms.attention import Form
from pallas_models.ops import _checks
from pallas_models.ops._attention_form import form_of, merged_heads
from pallas_models.ops._checks import Array
from pallas_models.ops.attention import OP, reference


def ring_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: str,
    causal: bool = False,
    mask: Array | None = None,
    segment_ids: Array | None = None,
    kv_segment_ids: Array | None = None,
    sm_scale: float | Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Computes `attention` in a `jax.shard_map`, where each device has a part of the queries and of the keys.

    The parts of keys and values go round the devices ([Ring Attention](https://arxiv.org/abs/2310.01889)): each
    device attends to the part that it has while the next is on its way, and joins the results by their
    log-sum-exp. No device has more than two parts at a time. In the gradient, which kernels of `attention`
    compute, the parts go round once more, and the gradients of each part go straight to the device that it is
    from. There is a gradient of first order alone, in reverse mode.

    With `causal` the tokens are in the order of `zigzag_order`, so that all devices have as much to do.

    The gradient keeps on each device its own q, k and v, its part of the result, and the log-sum-exp, (B, Sq, Hq)
    float32; the other parts of the keys are sent again.

    ```
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("seq",))
    spread = jax.sharding.PartitionSpec(None, "seq")
    attend = functools.partial(ops.ring_attention, axis_name="seq")
    y = jax.shard_map(attend, mesh=mesh, in_specs=spread, out_specs=spread)(*[jnp.ones((2, 16, 4, 32))] * 3)
    ```

    Args:
      q: (B, Sq, Hq, D), the queries of this device, as in `attention`.
      k: (B, Skv, Hkv, D), its keys.
      v: as k.
      axis_name: the axis of the mesh that the sequence is split over.
      causal: whether a query sees no key after its position. Each device has two chunks of the sequence, one after
        another: of n devices, device i has chunks i and 2 n - 1 - i of 2 n.
      mask: (B, Skv), of this device's keys.
      segment_ids: (B, Sq), of its queries, integers of up to 32 bits that mean the same on all devices.
      kv_segment_ids: (B, Skv), of its keys; `segment_ids` when None.

    All other arguments are as in `attention`.

    Returns:
      (B, Sq, Hq, D) in the dtype of q.

    Raises:
      TypeError: as `attention`; or segment ids have 64 bits.
      ValueError: as `attention`; or with `causal` queries and keys differ in number, or the number is odd.
      NotImplementedError: as `attention`.
    """
    qkv = merged_heads(q, k, v)
    seq, kv_seq = q.shape[1], k.shape[1]
    if causal and (seq != kv_seq or seq % 2):
        raise ValueError(
            f"q has {seq} tokens and k has {kv_seq} on a device; with causal=True expected the same even number"
        )
    if mask is not None:
        _checks.check_mask("mask", mask, k.shape[:2], "(B, Skv)")
    for name, ids in (("segment_ids", segment_ids), ("kv_segment_ids", kv_segment_ids)):
        if ids is not None and ids.dtype.itemsize > 4:
            raise TypeError(f"{name} has dtype {ids.dtype}; expected integers of up to 32 bits")
    form = form_of(
        qkv,
        num_heads=q.shape[2],
        num_kv_heads=k.shape[2],
        head_dim=q.shape[3],
        mask=mask,
        segment_ids=segment_ids,
        kv_segment_ids=kv_segment_ids,
        sm_scale=sm_scale,
        return_lse=True,
        precision=precision,
    )
    ring = _Ring(
        axis_name=axis_name,
        causal=causal,
        form=form.abstract(),
        implementation=check_implementation(implementation) or None,
    )
    form = form.of(varying_alike(form.operands))
    queries, keys, values = form.qkv
    out = _attend(ring, _Queries(queries, form.segment_ids), _Keys(keys, values, form.mask, form.kv_segment_ids))
    return out.reshape(q.shape)


def zigzag_order(length: int, num_devices: int) -> np.ndarray:
    """The positions of tokens in the order in which causal `ring_attention` has them spread.

    Of 2 n equal chunks of the sequence the first and the last come first, then the second and the last but one:
    each of n devices has an early chunk, whose queries see few keys, and a late one, whose queries see many.
    `x[:, zigzag_order(length, n)]` puts tokens in this order, and `y[:, np.argsort(zigzag_order(length, n))]`
    back. Rotary and learned positions are the positions of the tokens: the values given.

    ```
    ops.zigzag_order(8, 2)  # [0, 1, 6, 7, 2, 3, 4, 5]
    ```

    Args:
      length: of the sequence.
      num_devices: n, over which it is split.

    Returns:
      (length,) integers.

    Raises:
      ValueError: the length is not a multiple of 2 n.
    """
    if num_devices < 1 or length % (2 * num_devices):
        raise ValueError(f"{length=} is not a multiple of 2 * {num_devices=}")
    chunks = np.arange(length).reshape(2 * num_devices, -1)
    return np.stack([chunks[:num_devices], chunks[: num_devices - 1 : -1]], axis=1).ravel()


class _Queries(NamedTuple):
    """The queries of a device (B, Sq, heads * head_dim), and their segment ids (B, Sq)."""

    q: jax.Array
    segment_ids: jax.Array | None


class _Keys(NamedTuple):
    """A part of keys and values (B, Skv, kv_heads * head_dim), and their mask and segment ids (B, Skv)."""

    k: jax.Array
    v: jax.Array
    mask: jax.Array | None
    segment_ids: jax.Array | None


class _Rows(NamedTuple):
    """The results of queries (B, Sq, heads * head_dim), and their log-sum-exp (B, Sq, heads)."""

    out: jax.Array
    lse: jax.Array


_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Ring:
    """A call.

    Attributes:
      axis_name: the axis of the mesh.
      causal: whether it is causal over the whole sequence.
      form: attention of the queries of a device to its own keys, where each query sees each key.
      implementation: the implementations that are named, or None.
    """

    axis_name: str
    causal: bool
    form: Form[Any]
    implementation: tuple[Name, ...] | None

    @property
    def size(self) -> int:
        """The number of devices."""
        return int(jax.lax.axis_size(self.axis_name))

    def send(self, tree: _T, steps: int = 1) -> _T:
        """The tree of the device so many steps before this one."""
        to = [(i, (i + steps) % self.size) for i in range(self.size)]
        sent: _T = jax.lax.ppermute(tree, self.axis_name, to)
        return sent

    def part(self, queries: _Queries, keys: _Keys, *, causal: bool) -> Form[jax.Array]:
        """Attention of these queries to these keys."""
        operands = ((queries.q, keys.k, keys.v), keys.mask, None, queries.segment_ids, keys.segment_ids)
        return self.form.of(operands).replace(causal=causal)

    def attend(self, queries: _Queries, keys: _Keys, *, causal: bool = False) -> _Rows:
        """The rows of these queries over these keys."""
        out, lse = run(OP, self.part(queries, keys, causal=causal), implementation=self.implementation)
        return _Rows(out.astype(_wide(out)), lse.swapaxes(1, 2))

    def pull(
        self, queries: _Queries, rows: _Rows, dout: jax.Array, keys: _Keys, *, causal: bool = False
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The gradients of q, and of k and v, by the weight that these keys have in the rows of all keys."""
        form = self.part(queries, keys, causal=causal)
        dq, dk, dv = run_backward(
            OP,
            form,
            [rows.out, rows.lse.swapaxes(1, 2)],
            [dout, None],
            (True, False, False, False, False),
            functools.partial(_pull_in_xla, form.abstract()),
            implementation=self.implementation,
        )
        return dq.astype(_wide(dq)), (dk.astype(_wide(dk)), dv.astype(_wide(dv)))

    def paired(self, step: int, queries: _T, keys: _U) -> tuple[_T, _U]:
        """Queries and keys of which each sees each, half as many, in twice the batch; or trees of such rows.

        Keys that came in `step` steps are from device i - step. If that device is before this one, all queries
        see the first half of its keys; else the second half of the queries sees all of its keys.
        """
        is_before = jax.lax.axis_index(self.axis_name) >= step

        def of_queries(x: jax.Array) -> jax.Array:
            first, second = jnp.split(x, 2, axis=1)
            return jnp.concatenate([second, jnp.where(is_before, first, second)])

        def of_keys(x: jax.Array) -> jax.Array:
            first, second = jnp.split(x, 2, axis=1)
            return jnp.concatenate([first, jnp.where(is_before, first, second)])

        return jax.tree.map(of_queries, queries), jax.tree.map(of_keys, keys)

    def joined(self, step: int, rows: _Rows, part: _Rows) -> _Rows:
        """The rows over more keys: `part` has the rows of `paired` queries over these."""
        is_before = jax.lax.axis_index(self.axis_name) >= step

        def halves(x: jax.Array, empty: float) -> tuple[jax.Array, jax.Array]:
            second, either = jnp.split(x, 2)
            none = jnp.full_like(second, empty)
            other = [jnp.where(is_before, either, none), jnp.where(is_before, none, either)]
            return jnp.concatenate([none, second], axis=1), jnp.concatenate(other, axis=1)

        (out, other_out), (lse, other_lse) = halves(part.out, 0.0), halves(part.lse, NO_KEY)
        return _merged(_merged(rows, _Rows(out, lse)), _Rows(other_out, other_lse))


def _wide(x: jax.Array) -> jnp.dtype:
    """The dtype that sums over devices are kept in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _merged(a: _Rows, b: _Rows) -> _Rows:
    """The rows over the keys of both."""
    lse = jnp.logaddexp(a.lse, b.lse)
    return _Rows(_by_head(a.out, _share(a.lse, lse)) + _by_head(b.out, _share(b.lse, lse)), lse)


def _share(part: jax.Array, lse: jax.Array) -> jax.Array:
    """The weight of a part of the keys among all of them; 0 where there is none."""
    return jnp.where(part == NO_KEY, 0.0, jnp.exp(part - lse))


def _by_head(x: jax.Array, weights: jax.Array) -> jax.Array:
    """x (B, S, heads * head_dim) times weights (B, S, heads)."""
    return (x.reshape(*weights.shape, -1) * weights[..., None]).reshape(x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, queries: _Queries, keys: _Keys) -> jax.Array:
    return _rows(ring, queries, keys).out


def _rows(ring: _Ring, queries: _Queries, keys: _Keys) -> _Rows:
    following = ring.send(keys)
    rows = ring.attend(queries, keys, causal=ring.causal)
    for step in range(1, ring.size):
        # One part is on its way while the kernel runs, and no other before it has ended.
        keys, rows = jax.lax.optimization_barrier((following, rows))
        following = ring.send(keys) if step + 1 < ring.size else keys
        if ring.causal:
            rows = ring.joined(step, rows, ring.attend(*ring.paired(step, queries, keys)))
        else:
            rows = _merged(rows, ring.attend(queries, keys))
    return _Rows(rows.out.astype(queries.q.dtype), rows.lse)


_Kept = tuple[_Queries, _Rows, _Keys]


def _forward(ring: _Ring, queries: _Queries, keys: _Keys) -> tuple[jax.Array, _Kept]:
    # Policies of `jax.checkpoint` that keep the rows of attention keep these.
    rows = _Rows(*(checkpoint_name(x, OP.name) for x in _rows(ring, queries, keys)))
    return rows.out, (queries, rows, keys)


def _backward(ring: _Ring, kept: _Kept, dout: jax.Array) -> tuple[_Queries, _Keys]:
    queries, rows, keys = kept
    # Parts of keys are sent again: XLA must not keep the parts of the forward pass, which are the whole sequence.
    keys, dout = jax.lax.optimization_barrier((keys, dout))
    of_queries, dtype = (queries, rows, dout), dout.dtype
    following = ring.send(keys)

    @jax.jit  # so that a step is lowered once
    def pull(*of_keys: Any) -> Any:
        return ring.pull(*of_keys)

    found = ring.pull(queries, rows, dout, keys, causal=ring.causal)
    for step in range(1, ring.size):
        keys, found = jax.lax.optimization_barrier((following, found))
        following = ring.send(keys) if step + 1 < ring.size else keys
        if ring.causal:
            (pair_queries, pair_rows, pair_dout), pair_keys = ring.paired(step, of_queries, keys)
            part = pull(pair_queries, pair_rows, pair_dout, pair_keys)
            part = jax.linear_transpose(functools.partial(ring.paired, step), *found)(part)
        else:
            part = pull(*of_queries, keys)
        # The gradients of keys go straight to where the keys are from.
        home = ring.send(jax.tree.map(lambda x: x.astype(dtype), part[1]), -step)
        found = jax.tree.map(jnp.add, found, (part[0], jax.tree.map(lambda x: x.astype(_wide(x)), home)))
    dq, dk, dv = (x.astype(dtype) for x in jax.tree.leaves(found))
    return _Queries(dq, None), _Keys(dk, dv, None, None)


_attend.defvjp(_forward, _backward)


def _pull_in_xla(
    form: Form[Any], operands: tuple[Any, ...], kept: list[jax.Array], cotangents: list[Any]
) -> list[jax.Array]:
    """The gradients of the form's queries, keys and values, for rows over more keys than these.

    It is the derivative of the rows over these keys alone, with cotangents that make up for the other keys.
    """
    qkv, *others = operands
    (out, lse), dout = kept, cotangents[0].astype(_wide(cotangents[0]))
    (part, part_lse), pull = jax.vjp(lambda qkv: reference(form.of((qkv, *others))), qkv)
    share = _share(part_lse, lse)
    by_head = (*out.shape[:2], lse.shape[1], -1)
    change = jnp.sum((dout * (part - out)).reshape(by_head), axis=-1).swapaxes(1, 2)
    dpart = _by_head(dout, share.swapaxes(1, 2)).astype(part.dtype)
    return jax.tree.leaves(pull((dpart, share * change)))
