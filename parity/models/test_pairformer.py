"""The pair stack against torch: parts, blocks of every line of models, stacks, masks, precisions, gradients."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_models import pairformer, training
from pallas_models.pairformer import (
    AttentionConfig,
    EvoformerConfig,
    OuterProductConfig,
    PairConfig,
    PairformerConfig,
    TransitionConfig,
    msa,
)
from pallas_models.trimul import TriMulConfig
from parity.ops.test_lowering import DEVICES, lowered_for_cuda
from parity.support.common import (
    KERNEL,
    ON_GPU,
    array,
    assert_close,
    assert_equal,
    by_device,
    cuda_device,
    float64,
    kernel_calls,
    naming,
    normal,
    random_params,
    relative_error,
    together,
)
from parity.support.tolerances import CHAIN, LONG, MODEL, MODEL_GRADIENT, SAME

P, S, M = by_device(cpu=(16, 12, 10), gpu=(128, 384, 64))  # channels of pairs, single representation, alignment
D = by_device(cpu=(8, 4), gpu=(32, 24))
ROWS = 3  # sequences of the alignment
SIZES = by_device(cpu=(1, 7), gpu=(1, 7, 65, 129))  # the number of positions
BATCH, N = 2, by_device(cpu=(5,), gpu=(65,))[0]


def pairs(*, biases: bool = False, **options: Any) -> PairConfig:
    """What a block does to pairs, as AlphaFold 3 has it or, with biases, AlphaFold 2."""
    return PairConfig(
        triangle_update=TriMulConfig(channels=P, hidden=3 * P // 2, gate_after=True, use_bias=biases),
        triangle_attention=AttentionConfig(
            channels=P, num_heads=2, head_dim=D[0], gate_bias=biases, out_bias=biases
        ),
        transition=TransitionConfig(channels=P, hidden=2 * P, kind="relu" if biases else "swiglu"),
        **options,
    )


SINGLE = dict(
    single_attention=AttentionConfig(channels=S, num_heads=3, head_dim=D[1], pair_channels=P, query_bias=True),
    single_transition=TransitionConfig(channels=S, hidden=2 * S),
)
OF_MSA = AttentionConfig(channels=M, num_heads=2, head_dim=D[0], pair_channels=P)
WITH_BIAS = dataclasses.replace(OF_MSA, gate_bias=True, out_bias=True)
OUTER = OuterProductConfig(channels=M, hidden=4, pair_channels=P)

BLOCKS: dict[str, PairformerConfig] = {
    "alphafold3": PairformerConfig(pair=pairs(ending_bias="in_place"), num_layers=3, **SINGLE),
    "protenix": PairformerConfig(pair=pairs(), num_layers=3, **SINGLE),
    "boltz": PairformerConfig(pair=pairs(), num_layers=3, single_norm=True, **SINGLE),
    "pairs alone": PairformerConfig(
        pair=pairs(biases=True), single_attention=None, single_transition=None, num_layers=3
    ),
}
MSA_MODULE = EvoformerConfig(
    pair=pairs(),
    outer_product=OUTER,
    row_attention=None,
    column_attention=None,
    pair_averaging=OF_MSA,
    msa_transition=TransitionConfig(channels=M, hidden=2 * M),
    outer_product_first=True,
    num_layers=3,
)
EVOFORMERS: dict[str, EvoformerConfig] = {
    "alphafold2": EvoformerConfig(
        pair=pairs(biases=True),
        outer_product=dataclasses.replace(OUTER, use_bias=True),
        row_attention=WITH_BIAS,
        column_attention=WITH_BIAS,
        msa_transition=TransitionConfig(channels=M, hidden=2 * M, kind="relu"),
        num_layers=3,
    ),
    "alphafold3": MSA_MODULE,
    "boltz": dataclasses.replace(
        MSA_MODULE,
        outer_product=dataclasses.replace(OUTER, normalization="clamped"),
        outer_product_first=False,
    ),
    "last of protenix": dataclasses.replace(MSA_MODULE, pair_averaging=None, msa_transition=None),
}


@functools.cache
def params_of(config: PairformerConfig | EvoformerConfig, dtype: str = "float32") -> Any:
    """The random parameters of a block: so large that softmax and gates are far from even at any width.

    Larger ones would make scores so different that their rounding decides which key a query attends to.
    """

    def widened(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        return array(np.asarray(x) * (16 / x.shape[0] ** 0.5), x.dtype) if path[-1].key == "kernel" else x

    return jax.tree.map_with_path(widened, random_params(config, dtype, pairformer.init_block))


@dataclasses.dataclass(frozen=True)
class Data:
    pair: jax.Array
    single: jax.Array
    msa: jax.Array
    pair_mask: jax.Array
    single_mask: jax.Array
    msa_mask: jax.Array


@functools.cache
def data(n: int = N, dtype: str = "float32", batch: int = BATCH) -> Data:
    """Inputs with masks that have holes: pairs, positions and sequences of which everything is masked, too."""
    rng = np.random.default_rng(n)

    def mask(*shape: int) -> jax.Array:
        kept = rng.integers(0, 4, shape) > 0
        kept[-1, -1] = n == 1
        return array(kept)

    return Data(
        pair=normal(rng, batch, n, n, P, dtype=dtype),
        single=normal(rng, batch, n, S, dtype=dtype),
        msa=normal(rng, batch, ROWS, n, M, dtype=dtype),
        pair_mask=mask(batch, n, n),
        single_mask=array(rng.integers(0, 4, (batch, n)) > 0),
        msa_mask=mask(batch, ROWS, n),
    )


@dataclasses.dataclass(frozen=True)
class Part:
    """A function of `pairformer` and of the reference, with the parameters and the arrays that they take.

    Attributes:
      config: of a block that has the parameters, at `path`.
      floats: the names of arrays that are differentiated.
      mask: the name of the mask.
    """

    name: str
    config: Any
    path: str
    floats: tuple[str, ...]
    mask: str | None
    options: tuple[tuple[str, Any], ...] = ()
    reference: str = ""

    def params(self, dtype: str = "float32") -> Any:
        return params_of(self.config, dtype)[self.path]

    def arrays(self, given: Data, masked: bool = True) -> tuple[list[jax.Array], jax.Array | None]:
        return [getattr(given, name) for name in self.floats], (
            getattr(given, self.mask) if self.mask and masked else None
        )

    def call(self, **options: Any) -> Callable[..., jax.Array]:
        options = dict(self.options) | options

        def function(params: Any, mask: Any, *floats: jax.Array) -> jax.Array:
            masks = (mask,) if self.mask else ()
            return getattr(pairformer, self.name)(params, *floats, *masks, **options)

        return function

    def in_torch(self, module: Any) -> Callable[..., Any]:
        def function(params: Any, mask: Any, *floats: Any) -> Any:
            masks = (mask,) if self.mask else ()
            return getattr(module, self.reference or self.name)(params, *floats, *masks, **dict(self.options))

        return function


AF2, AF3 = EVOFORMERS["alphafold2"], BLOCKS["alphafold3"]
PARTS = {
    "starting": Part(
        "triangle_attention", AF3, "tri_att_start", ("pair",), "pair_mask", (("direction", "starting"),)
    ),
    "starting with another's bias": Part(
        "triangle_attention",
        AF3,
        "tri_att_start",
        ("pair",),
        "pair_mask",
        (("direction", "starting"), ("ending_bias", "in_place")),
    ),
    "ending": Part("triangle_attention", AF3, "tri_att_end", ("pair",), "pair_mask", (("direction", "ending"),)),
    "ending with biases": Part(
        "triangle_attention", AF2, "tri_att_end", ("pair",), "pair_mask", (("direction", "ending"),)
    ),
    "ending in place": Part(
        "triangle_attention",
        AF3,
        "tri_att_end",
        ("pair",),
        "pair_mask",
        (("direction", "ending"), ("ending_bias", "in_place")),
    ),
    "swiglu": Part("transition", AF3, "pair_transition", ("pair",), None),
    "relu": Part("transition", AF2, "pair_transition", ("pair",), None),
    "single": Part("attention_pair_bias", AF3, "single_attention", ("single", "pair"), "single_mask"),
    "row": Part(
        "msa_row_attention", AF2, "row_attention", ("msa", "pair"), "msa_mask", reference="attention_pair_bias"
    ),
    "column": Part(
        "msa_column_attention", AF2, "column_attention", ("msa",), "msa_mask", reference="column_attention"
    ),
    "averaging": Part("pair_averaging", MSA_MODULE, "pair_averaging", ("msa", "pair"), "pair_mask"),
    "outer product": Part("outer_product_mean", MSA_MODULE, "outer_product_mean", ("msa",), "msa_mask"),
    "outer product with biases": Part("outer_product_mean", AF2, "outer_product_mean", ("msa",), "msa_mask"),
    "outer product clamped": Part(
        "outer_product_mean",
        MSA_MODULE,
        "outer_product_mean",
        ("msa",),
        "msa_mask",
        (("normalization", "clamped"),),
    ),
}
every_part = pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)


def check(reference, module, calls: dict[str, tuple[Part, Data]], dtype="float32", masked=True, **options) -> None:
    """Parts with their inputs, by names, against torch."""
    operands = {name: (part.params(dtype), *part.arrays(given, masked)) for name, (part, given) in calls.items()}
    found = together(
        {
            name: (calls[name][0].call(**options), (params, mask, *floats))
            for name, (params, floats, mask) in operands.items()
        }
    )
    for name, (params, floats, mask) in operands.items():
        with naming(name):
            assert found[name].dtype == floats[0].dtype
            expected = reference.compute(calls[name][0].in_torch(module), params, mask, *floats)
            compute_dtype = options.get("compute_dtype", dtype)
            assert_close(found[name], expected, MODEL[compute_dtype])
            if compute_dtype != dtype:  # or it would compute in its own
                assert relative_error(found[name], expected) > LONG


@pytest.mark.covering(1)
def test_parts(reference, torch_pairformer, implementation, dtype):
    calls = {name: (part, data(dtype=dtype)) for name, part in PARTS.items()}
    check(reference, torch_pairformer, calls, dtype, implementation=implementation)


@pytest.mark.parametrize("n", SIZES)
def test_parts_of_any_size_without_a_mask(reference, torch_pairformer, n):
    for batch in (1, 3) if n < 9 else (1,):
        calls = {name: (part, data(n, batch=batch)) for name, part in PARTS.items()}
        check(reference, torch_pairformer, calls, masked=False, implementation=KERNEL if ON_GPU else "xla")


@pytest.mark.parametrize("compute_dtype", ["bfloat16", "float16"])
def test_products_in_half_precision_of_float32(reference, torch_pairformer, compute_dtype):
    calls = {name: (part, data()) for name, part in PARTS.items()}
    check(reference, torch_pairformer, calls, implementation="xla", compute_dtype=compute_dtype)


def gradients_in_torch(reference, function: Callable[..., Any], params: Any, mask: Any, floats, cotangent):
    leaves, tree = jax.tree.flatten(params)
    mask = reference.tensor(mask)

    def of_leaves(*arrays):
        return function(tree.unflatten(arrays[: len(leaves)]), mask, *arrays[len(leaves) :])

    return reference.gradients(of_leaves, [*leaves, *floats], cotangent)


def assert_gradients(found: Any, expected: Any, tolerance: float) -> None:
    """Those of parameters and inputs, each in relation to the largest of its module.

    A bias of the norm of pairs that give a bias to all keys of a query alike has no effect: its gradient is what
    rounding leaves of sums of the terms that the scale's gradient has.
    """
    given = jax.tree.leaves_with_path(found)
    sizes: dict[Any, float] = {}
    for (path, _), wanted in zip(given, jax.tree.leaves(expected), strict=True):
        sizes[path[:-1]] = max(sizes.get(path[:-1], 0.0), float(np.linalg.norm(float64(wanted))))
    for (path, gradient), wanted in zip(given, jax.tree.leaves(expected), strict=True):
        error, size = float(np.linalg.norm(float64(gradient) - float64(wanted))), sizes[path[:-1]]
        assert size > 0 and error <= tolerance * size, f"{jax.tree_util.keystr(path)}: {error:.2e} of {size:.2e}"


GRADIENT = {"float32": MODEL_GRADIENT, "bfloat16": MODEL["bfloat16"]}


def of_relu(error: float) -> float:
    """What the gradient of a ReLU is off by where its arguments are off by a part of their size.

    They change their signs with a probability of at most p = error / sqrt(2 pi), and half of the arguments have a
    gradient: sqrt(2 p) of its norm.
    """
    return (2 * error / (2 * math.pi) ** 0.5) ** 0.5


OF_RELU = {"float32": 0.0, "bfloat16": of_relu(2.0**-9)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", GRADIENT)
def test_gradients_of_parts(reference, torch_pairformer, implementation, dtype):
    calls, expected = {}, {}
    for name, part in PARTS.items():
        params, (floats, mask) = part.params(dtype), part.arrays(data(dtype=dtype))
        call = part.call(implementation=implementation)
        shape = jax.eval_shape(call, params, mask, *floats)
        cotangent = normal(np.random.default_rng(5), *shape.shape, dtype=dtype)
        calls[name] = functools.partial(pull, call), (cotangent, params, mask, *floats)
        in_torch = part.in_torch(torch_pairformer)
        expected[name] = gradients_in_torch(reference, in_torch, params, mask, floats, cotangent)
    for name, gradients in together(calls).items():
        tolerance = max(GRADIENT[dtype], OF_RELU[dtype] if name == "relu" else 0.0)
        with naming(name):
            assert_gradients(gradients, expected[name], tolerance)


def pull(call: Callable[..., jax.Array], cotangent: jax.Array, params: Any, mask: Any, *floats: jax.Array) -> Any:
    return jax.vjp(lambda params, *floats: call(params, mask, *floats), params, *floats)[1](cotangent)


@every_part
def test_residual(part):
    params, (floats, mask) = part.params(), part.arrays(data())
    if part.name == "outer_product_mean":
        added, options = data().pair, dict(pair=data().pair)
    else:
        added, options = floats[0], dict(residual=True)
    out = part.call(implementation="xla", **options)(params, mask, *floats)
    assert_close(out, added + part.call(implementation="xla")(params, mask, *floats), SAME)


# Blocks


def block_call(config: Any, n: int = N, dtype: str = "float32"):
    """A block as a function of parameters and two arrays; these, the masks and the model's options."""
    given = data(n, dtype)
    if isinstance(config, PairformerConfig):
        arrays = (given.pair, None if config.single_attention is None else given.single)
        masks = dict(pair_mask=given.pair_mask, single_mask=given.single_mask)
        return pairformer.block, arrays, masks, dict(ending_bias=config.pair.ending_bias)
    masks = dict(msa_mask=given.msa_mask, pair_mask=given.pair_mask)
    variant = dict(
        outer_product_first=config.outer_product_first, normalization=config.outer_product.normalization
    )
    return pairformer.evoformer_block, (given.msa, given.pair), masks, variant


EVERY_BLOCK = {f"block of {name}": config for name, config in BLOCKS.items()} | {
    f"evoformer of {name}": config for name, config in EVOFORMERS.items()
}
every_block = pytest.mark.parametrize("config", EVERY_BLOCK.values(), ids=EVERY_BLOCK)


def expected_of(reference, module, config: Any, params: Any, arrays: Any, masks: Any, variant: Any) -> list[Any]:
    import torch

    function = module.block if isinstance(config, PairformerConfig) else module.evoformer_block
    with torch.no_grad():
        out = function(
            reference.tensor(params), *map(reference.tensor, arrays), **reference.tensor(masks), **variant
        )
    return [None if x is None else x.cpu().numpy() for x in out]


def test_blocks(reference, torch_pairformer, implementation):
    calls, expected = {}, {}
    dtypes = ("float32",) if implementation == "interpret" else ("float32", "bfloat16")  # the parts have it
    for dtype, (name, config) in itertools.product(dtypes, EVERY_BLOCK.items()):
        function, arrays, masks, variant = block_call(config, dtype=dtype)
        params = params_of(config, dtype)
        call = functools.partial(function, implementation=implementation, **variant)
        calls[name, dtype] = functools.partial(with_masks, call), (masks, params, *arrays)
        expected[name, dtype] = expected_of(reference, torch_pairformer, config, params, arrays, masks, variant)
    for (name, dtype), out in together(calls).items():
        for x, wanted in zip(out, expected[name, dtype], strict=True):
            with naming(f"{name}, {dtype}"):
                assert (x is None) == (wanted is None)
                if x is not None:
                    assert x.dtype == dtype
                    assert_close(x, wanted, MODEL[dtype])


def with_masks(call: Callable[..., Any], masks: dict[str, jax.Array], params: Any, *arrays: Any) -> Any:
    return call(params, *arrays, **masks)


def test_gradients_of_blocks(reference, torch_pairformer):
    import torch

    calls, expected = {}, {}
    for name, config in EVERY_BLOCK.items():
        function, arrays, masks, variant = block_call(config)
        params = params_of(config)
        kept = [x for x in arrays if x is not None]
        rng = np.random.default_rng(6)
        cotangents = [normal(rng, *x.shape) for x in kept]
        leaves, tree = jax.tree.flatten(params)
        call = functools.partial(function, implementation=KERNEL if ON_GPU else "xla", **variant, **masks)
        calls[name] = functools.partial(pull_all, call, cotangents), (params, *kept)
        in_torch = torch_pairformer.block if function is pairformer.block else torch_pairformer.evoformer_block
        tensors = [reference.tensor(x).requires_grad_() for x in (*leaves, *kept)]
        out = in_torch(
            tree.unflatten(tensors[: len(leaves)]), *tensors[len(leaves) :], **reference.tensor(masks), **variant
        )
        out = [x for x in out if x is not None]
        gradients = torch.autograd.grad(out, tensors, [*map(reference.tensor, cotangents)])
        expected[name] = [g.cpu().numpy() for g in gradients]
    for name, gradients in together(calls).items():
        has_relu = EVERY_BLOCK[name].pair.transition.kind == "relu"
        with naming(name):
            assert_gradients(gradients, expected[name], max(MODEL_GRADIENT, of_relu(CHAIN) if has_relu else 0.0))


def pull_all(call: Callable[..., Any], cotangents: list[jax.Array], params: Any, *arrays: jax.Array) -> Any:
    return jax.vjp(lambda params, *arrays: jax.tree.leaves(call(params, *arrays)), params, *arrays)[1](cotangents)


@every_block
def test_padding_changes_nothing_that_is_there(config):
    """However large it is, with masks of positions that are there, as models have them."""
    function, arrays, masks, variant = block_call(config)
    there = np.ones((BATCH, N), bool)
    there[0, 1], there[1, -2:] = False, False
    masks = (
        dict(
            pair_mask=array(there[:, :, None] & there[:, None]),
            single_mask=array(there),
            msa_mask=array(np.broadcast_to(there[:, None], (BATCH, ROWS, N))),
        )
        | {}
    )
    of_arrays = ("pair", "single") if function is pairformer.block else ("msa", "pair")
    masks_of = {f"{name}_mask": masks[f"{name}_mask"] for name in of_arrays}
    call = jax.jit(functools.partial(function, implementation="xla", **variant))
    filled = [
        None if x is None else jnp.where(masks[f"{name}_mask"][..., None], x, 30.0)
        for name, x in zip(of_arrays, arrays, strict=True)
    ]
    outs = [call(params_of(config), *given, **masks_of) for given in (arrays, filled)]
    for name, one, other in zip(of_arrays, *outs, strict=True):
        if one is not None:
            kept = np.asarray(masks[f"{name}_mask"])
            assert_close(np.asarray(other)[kept], np.asarray(one)[kept], SAME)
            assert np.all(np.isfinite(np.asarray(other)))


# Stacks


def stack_of(config: Any) -> tuple[Callable[..., Any], Any, Any, Any, Any]:
    """A stack of blocks that differ, and what it takes."""
    function, arrays, masks, variant = block_call(config)
    block = params_of(config)
    layers = {str(i): jax.tree.map(lambda x, i=i: x * (1 + 0.1 * i), block) for i in range(config.num_layers)}
    stack = pairformer.stack if function is pairformer.block else pairformer.evoformer_stack
    return stack, {"layers": layers}, arrays, masks, variant


both_stacks = pytest.mark.parametrize(
    "config", [BLOCKS["boltz"], EVOFORMERS["boltz"]], ids=["blocks", "evoformer"]
)


@both_stacks
def test_a_stack_is_its_blocks(config):
    stack, params, arrays, masks, variant = stack_of(config)
    function = block_call(config)[0]
    options = dict(implementation="xla", **masks, **variant)
    expected = arrays
    for layer in params["layers"].values():
        expected = jax.jit(functools.partial(function, **options))(layer, *expected)
    for given in (params, training.stack_layers(params)):
        out = jax.jit(functools.partial(stack, **options))(given, *arrays)
        jax.tree.map(lambda x, wanted: assert_close(x, wanted, CHAIN), out, expected)


@both_stacks
def test_remat_changes_no_gradient(config):
    stack, params, arrays, masks, variant = stack_of(config)
    stacked = training.stack_layers(params)

    def gradient(remat, implementation="xla"):
        def loss(params, *arrays):
            options = dict(implementation=implementation, remat=remat, **masks, **variant)
            return sum(jnp.sum(jnp.sin(x)) for x in stack(params, *arrays, **options))

        return jax.jit(jax.grad(loss, (0, 1, 2)))(stacked, *arrays)

    plain = gradient("none")
    names = jax.tree.leaves_with_path(plain)
    assert all(float(jnp.max(jnp.abs(leaf))) > 0 for _, leaf in names), "a parameter without a gradient"
    assert_gradients(gradient("block"), plain, MODEL_GRADIENT)


def test_a_block_hands_on_what_its_updates_keep():
    """With `residuals="recompute"` its gradient keeps less; the tests of the update hold the values of both."""
    block = BLOCKS["pairs alone"].pair
    update = dataclasses.replace(block.triangle_update, hidden=P)  # as wide as its gradient's kernels serve
    config = dataclasses.replace(BLOCKS["pairs alone"], pair=dataclasses.replace(block, triangle_update=update))
    params, pair = params_of(config, "bfloat16"), data(dtype="bfloat16").pair

    def kept(residuals):
        def updated(params, pair):
            return pairformer.block(params, pair, residuals=residuals, implementation=KERNEL)[0]

        found = jax.eval_shape(lambda *arrays: jax.vjp(updated, *arrays)[1], params, pair)
        return sum(x.size for x in jax.tree.leaves(found))

    assert kept("save") - kept("recompute") == 2 * 4 * pair.size  # left, right, product and gate, of two updates


def test_a_stack_with_remat_keeps_what_is_between_blocks():
    """Of a block it keeps its inputs; without remat many times as much."""
    config = BLOCKS["protenix"]
    stack, params, arrays, masks, _ = stack_of(config)

    def kept(remat):
        def loss(*arrays):
            out = stack(training.stack_layers(params), *arrays, implementation="xla", remat=remat, **masks)
            return sum(map(jnp.sum, out))

        residuals = jax.eval_shape(lambda *arrays: jax.vjp(loss, *arrays)[1], *arrays)
        return sum(x.size for x in jax.tree.leaves(residuals) if x.shape[:1] == (config.num_layers,))

    parameters = config.num_layers * sum(x.size for x in jax.tree.leaves(params["layers"]["0"]))
    inputs = config.num_layers * sum(x.size for x in arrays)
    assert kept("block") <= inputs + parameters < kept("none") / 3


# As it is used


def test_modules_are_the_functions():
    given, config = data(), BLOCKS["protenix"]
    module = pairformer.Pairformer(config, rngs=nnx.Rngs(0))
    out = module(given.pair, given.single, given.pair_mask, given.single_mask, implementation="xla")
    masks = dict(pair_mask=given.pair_mask, single_mask=given.single_mask)
    for params in (nnx.state(module), pairformer.init(jax.random.key(0), config)):
        shapes = jax.tree.map(lambda x: x.shape, pairformer.stack(params, given.pair, given.single, **masks))
        assert shapes == jax.tree.map(lambda x: x.shape, out)
    found = pairformer.stack(nnx.state(module), given.pair, given.single, implementation="xla", **masks)
    jax.tree.map(assert_equal, found, out)


def test_init():
    key, config = jax.random.key(0), EVOFORMERS["alphafold3"]
    params = pairformer.init(key, config, dtype=jnp.bfloat16)
    assert len(params["layers"]) == config.num_layers
    for path, leaf in jax.tree.leaves_with_path(params):
        assert leaf.dtype == ("bfloat16" if path[-1].key == "kernel" else "float32")
    shapes = jax.tree.map(jnp.shape, params["layers"]["0"])
    assert shapes == jax.tree.map(jnp.shape, pairformer.init_block(key, config))


def test_sizes_of_published_models():
    """Parameters of a block, as the models have them: counted by hand from their modules."""

    def count(config, block=pairformer.init_block):
        shapes = jax.eval_shape(functools.partial(block, config=config), jax.random.key(0))
        return sum(x.size for x in jax.tree.leaves(shapes))

    c, s, m = 128, 384, 64
    update = 2 * c + 4 * c * c + c * c + 2 * c + c * c
    attention = 2 * c + 4 * c * c + 4 * c + c * c
    pair = 2 * update + 2 * attention + (2 * c + 12 * c * c)
    single = 2 * s + 2 * c + 16 * c + 4 * s * s + s + s * s + 2 * s + 12 * s * s
    assert count(PairformerConfig()) == pair + single
    outer = 2 * m + 2 * m * 32 + 32 * 32 * c + c
    averaging = 2 * m + 2 * c + 8 * c + 2 * m * m + m * m
    assert count(pairformer.MSA_MODULE) == pair + outer + averaging + 2 * m + 12 * m * m
    m = 256
    biases = 2 * (6 * c) + 2 * (2 * c) + 5 * c
    attention_of_msa = 2 * m + 5 * m * m + 2 * m
    of_msa = 2 * attention_of_msa + 2 * c + 8 * c + 2 * m + 8 * m * m + 5 * m
    outer = 2 * m + 2 * m * 32 + 2 * 32 + 32 * 32 * c + c
    assert count(EvoformerConfig()) == pair - 4 * c * c + biases + of_msa + outer


@every_part
def test_vmap(part):
    params, (floats, mask) = part.params(), part.arrays(data())
    call = part.call(implementation=KERNEL)
    out = jax.jit(jax.vmap(lambda *floats: call(params, None, *(x[None] for x in floats))[0]))(*floats)
    assert_close(out, part.call(implementation="xla")(params, None, *floats), LONG)
    scales = jnp.array([1.0, 0.5])
    of_params = jax.vmap(lambda scale: call(jax.tree.map(lambda p: scale * p, params), mask, *floats))
    assert_close(jax.jit(of_params)(scales)[0], part.call(implementation="xla")(params, mask, *floats), LONG)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "config", [BLOCKS["alphafold3"], EVOFORMERS["alphafold2"]], ids=["pairformer", "evoformer"]
)
@pytest.mark.parametrize("setting", ["x64", "strict promotion", "debug_nans"])
def test_settings(config, setting):
    function, arrays, masks, variant = block_call(config)
    call = functools.partial(function, params_of(config), *arrays, **masks, **variant)
    expected = call()
    settings = {
        "x64": jax.enable_x64(True),
        "strict promotion": jax.numpy_dtype_promotion("strict"),
        "debug_nans": jax.debug_nans(True),
    }
    with settings[setting]:
        out = call()
    for x, wanted in zip(out, expected, strict=True):
        assert x.dtype == wanted.dtype
        assert_close(x, wanted, SAME)


def test_masks_of_any_dtype():
    config = BLOCKS["alphafold3"]
    function, arrays, masks, variant = block_call(config)
    call = functools.partial(function, params_of(config), *arrays, implementation="xla", **variant)
    expected = call(**masks)
    for dtype in ("int32", "float32", "bfloat16"):
        out = call(**{name: mask.astype(dtype) for name, mask in masks.items()})
        jax.tree.map(lambda x, wanted: assert_close(x, wanted, SAME), out, expected)
    masks = {name: np.asarray(mask) for name, mask in masks.items()}
    out = function(params_of(config), *map(np.asarray, arrays), implementation="xla", **variant, **masks)
    jax.tree.map(assert_equal, out, expected)


def test_outer_products_a_block_of_positions_at_a_time(monkeypatch):
    part, given = PARTS["outer product with biases"], data(7)
    params, (floats, mask) = part.params(), part.arrays(given)

    def with_gradient():
        def loss(params, msa):
            out = part.call(implementation="xla")(params, mask, msa)
            return jnp.sum(jnp.sin(3 * out)), out

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, *floats)

    whole = with_gradient()
    monkeypatch.setattr(msa, "_OUTER", 3 * BATCH * 7 * AF2.outer_product.hidden**2)
    blocks = with_gradient()
    jax.tree.map(lambda x, wanted: assert_close(x, wanted, LONG), blocks, whole)
    text = jax.jit(part.call(implementation="xla")).lower(params, mask, *floats).as_text()
    assert "while" in text


def test_outer_products_of_many_sequences_stay_in_the_range_of_float16():
    part, rows = PARTS["outer product"], 2048
    x = normal(np.random.default_rng(2), 1, 1, 2, M)
    msa = jnp.broadcast_to(x, (1, rows, 2, M))  # their sum is as large as it can be
    kernel = 100 * part.params()["projections"]["kernel"]
    params = part.params() | {"projections": {"kernel": kernel}}
    expected = part.call(implementation="xla")(params, None, msa)
    out = part.call(implementation="xla", compute_dtype="float16")(params, None, msa)
    assert_close(out, expected, MODEL["float16"])


@pytest.mark.parametrize("device", DEVICES, ids=["hopper", "ada"])
def test_a_block_is_lowered_to_kernels(device):
    """The forward pass has no product of XLA's."""
    params = jax.eval_shape(pairformer.init_block, jax.random.key(0))
    pair, single = (jax.ShapeDtypeStruct((1, 64, *shape), jnp.bfloat16) for shape in ((64, 128), (384,)))
    pair_mask, single_mask = (jax.ShapeDtypeStruct((1, 64, *shape), bool) for shape in ((64,), ()))

    def block(params, pair, single, pair_mask, single_mask):
        return pairformer.block(params, pair, single, pair_mask=pair_mask, single_mask=single_mask)

    with cuda_device(*device):
        text = lowered_for_cuda(block, params, pair, single, pair_mask, single_mask)
    assert "stablehlo.dot_general" not in text
    assert kernel_calls(text) > 20


# Errors


def test_errors_name_the_argument():
    given, block = data(), params_of(BLOCKS["protenix"])
    pair, single = given.pair, given.single
    attention = functools.partial(pairformer.triangle_attention, block["tri_att_start"], direction="starting")

    def raises(error, text, function, *args, **options):
        with pytest.raises(error, match=re.escape(text)):
            function(*args, **options)

    raises(ValueError, f"pair has shape {pair[0].shape}; expected (B, N, N, {P})", attention, pair[0])
    raises(ValueError, "pair has shape", attention, pair[:, :-1])
    raises(TypeError, "pair has dtype int32", attention, pair.astype(int))
    raises(ValueError, "mask has shape (2, 3, 3)", attention, pair, jnp.ones((2, 3, 3), bool))
    raises(TypeError, "mask has dtype complex64", attention, pair, jnp.ones(pair.shape[:3], "complex64"))
    raises(ValueError, "direction='sideways'", attention, pair, direction="sideways")
    raises(ValueError, "ending_bias='gone'", attention, pair, ending_bias="gone")
    raises(ValueError, "parameters of an attention", pairformer.triangle_attention, {}, pair, direction="ending")
    raises(ValueError, "parameters of a Pairformer's block", pairformer.block, {"layers": block}, pair)
    raises(ValueError, "parameters of a Pairformer;", pairformer.stack, block, pair)
    raises(ValueError, "single is None; the parameters are of a block with", pairformer.block, block, pair)
    alone = params_of(BLOCKS["pairs alone"])
    raises(
        ValueError,
        "single is not None; the parameters are of a block without",
        pairformer.block,
        alone,
        pair,
        single,
    )
    raises(ValueError, "single has shape", pairformer.block, block, pair, single[:, :-1])
    raises(ValueError, "single_mask has shape", pairformer.block, block, pair, single, single_mask=given.pair_mask)
    raises(ValueError, "pair_mask has shape", pairformer.block, block, pair, single, pair_mask=given.single_mask)
    broken = block | {"tri_att_end": block["tri_att_end"] | {"out": {"kernel": jnp.zeros((3, P))}}}
    raises(ValueError, "['tri_att_end']['out']['kernel']: expected", pairformer.block, broken, pair, single)
    raises(ValueError, "residuals='none'", pairformer.block, block, pair, single, residuals="none")
    raises(ValueError, "remat='all'", pairformer.stack, {"layers": {"0": block}}, pair, single, remat="all")
    raises(
        ValueError,
        "expected 16 channels".replace("16", str(P)),
        pairformer.transition,
        block["pair_transition"],
        single,
    )
    evoformer = params_of(MSA_MODULE)
    raises(
        ValueError, "expected the same B and N", pairformer.evoformer_block, evoformer, given.msa[:, :, 1:], pair
    )
    outer = functools.partial(pairformer.outer_product_mean, evoformer["outer_product_mean"])
    raises(ValueError, "normalization='none'", outer, given.msa, normalization="none")
    raises(ValueError, "kind='tanh'", TransitionConfig, kind="tanh")
    raises(ValueError, "single_attention and single_transition", PairformerConfig, single_attention=None)
