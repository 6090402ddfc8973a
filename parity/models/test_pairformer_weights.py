"""`weights.load_pairformer`: each line of models by its tensors, against its own formulas in float64; errors."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import weights
from pallas_models import pairformer, training
from parity.support.common import assert_close
from parity.support.tolerances import DEEP

BLOCKS, BATCH, SEQUENCES, N, C, C_OTHER = 2, 2, 3, 5, 12, 8


@dataclasses.dataclass(frozen=True)
class Line:
    """A stack of a line of models.

    Attributes:
      block: the function of `pair_models` that computes a block.
      prefix: what is before the blocks in the model.
      blocks: what is between this and the number of a block; None where Haiku stacks them.
      options: of `block`.
      loaded: what `load_pairformer` has to say of it.
      masks: whether the model has a mask wherever ours has one; if not, nothing is padding.
      ends: whether the last block does not update the alignment.
    """

    block: str
    prefix: str
    blocks: str | None
    options: tuple[tuple[str, Any], ...] = ()
    loaded: tuple[tuple[str, Any], ...] = ()
    masks: bool = True
    ends: bool = False

    @property
    def is_msa(self) -> bool:
        return "pairformer" not in self.block

    def at(self, block: int) -> str:
        return self.prefix + (f"{block}|" if self.blocks is None else f"{self.blocks}{block}.")


IN_PLACE = ("ending_bias", "in_place")
FIRST = ("outer_product_first", True)
BOLTZ_MSA = (("outer_product_first", False), ("normalization", "clamped"))
AF3 = "diffuser/evoformer/__layer_stack_no_per_layer"
LINES = {
    "boltz 1": Line("boltz_pairformer", "pairformer_module.", "layers.", (("version", 1),)),
    "boltz 2": Line("boltz_pairformer", "pairformer_module.", "layers.", (("post_norm", True),)),
    "boltz 1 msa": Line("boltz_msa", "msa_module.", "layers.", (("version", 1),), BOLTZ_MSA),
    "boltz 2 msa": Line("boltz_msa", "msa_module.", "layers.", (), BOLTZ_MSA),
    "protenix": Line("protenix_pairformer", "pairformer_stack.", "blocks.", masks=False),
    "protenix msa": Line("protenix_msa", "msa_module.", "blocks.", (), (FIRST,), masks=False, ends=True),
    "openfold": Line("openfold_evoformer", "model.evoformer.", "blocks."),
    "openfold 1": Line("openfold_evoformer", "evoformer.", "blocks.", (("core", True),)),
    "openfold fused": Line("openfold_evoformer", "evoformer.", "blocks.", (("fused", True),)),
    "openfold 3": Line("of3_pairformer", "pairformer_stack.", "blocks."),
    "openfold 3 msa": Line("of3_msa", "msa_module.", "blocks.", (), (FIRST,), ends=True),
    "alphafold 3": Line("af3_pairformer", f"{AF3}_1/trunk_pairformer/", None, (), (IN_PLACE,)),
    "alphafold 3 msa": Line("af3_msa", f"{AF3}/msa_stack/", None, (), (IN_PLACE, FIRST)),
}
lines = pytest.mark.parametrize("name", LINES)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Pairs, and a single representation or an alignment, with masks."""

    pair: np.ndarray
    other: np.ndarray
    pair_mask: np.ndarray
    other_mask: np.ndarray


@functools.cache
def inputs(line: Line) -> Inputs:
    """In each of the batch another token is padding, and some of the alignment is missing."""
    rng = np.random.default_rng(1)
    tokens = np.ones((BATCH, N), bool)
    tokens[0, 1] = tokens[1, 3] = not line.masks
    sequences = tokens[:, None] & ((rng.integers(0, 4, (BATCH, SEQUENCES, N)) > 0) | (not line.masks))
    sequences[:, 0] = tokens
    shape = (BATCH, SEQUENCES, N, C_OTHER) if line.is_msa else (BATCH, N, C_OTHER)
    return Inputs(
        pair=rng.normal(size=(BATCH, N, N, C)).astype(np.float32),
        other=rng.normal(size=shape).astype(np.float32),
        pair_mask=tokens[:, :, None] & tokens[:, None],
        other_mask=sequences if line.is_msa else tokens,
    )


@functools.cache
def computed(name: str) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """A random checkpoint of a line, and what its formulas make of the inputs with it."""
    torch = pytest.importorskip("torch", reason="torch is not installed: the formulas are written in it")
    from parity.models import pair_models

    line, given, checkpoint = LINES[name], inputs(LINES[name]), pair_models.Checkpoint()
    block: Callable[..., Any] = getattr(pair_models, line.block)
    other, pair, other_mask, pair_mask = (
        torch.tensor(x, dtype=torch.float64) for x in (given.other, given.pair, given.other_mask, given.pair_mask)
    )
    for i in range(BLOCKS):
        last = {"last": i == BLOCKS - 1} if line.ends else {}
        other, pair = block(
            checkpoint, line.at(i), other, pair, other_mask, pair_mask, **dict(line.options), **last
        )
    tensors = pair_models.numpy(checkpoint.tensors)
    if line.blocks is None:
        first = {n: x for n, x in tensors.items() if n.startswith(line.at(0))}
        each = {n: [tensors[n.replace("0|", f"{i}|", 1)] for i in range(BLOCKS)] for n in first}
        tensors = {n.replace("0|", "", 1): np.stack(xs) for n, xs in each.items()}
    return tensors, [other.numpy(), pair.numpy()]


def in_haiku(tensors: dict[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    nested: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition("/")
        nested.setdefault(module, {})[leaf] = tensor
    return nested


def run(line: Line, params: Any, options: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The single representation or the alignment, and the pairs, by our blocks."""
    given = inputs(line)
    options = options | {"compute_dtype": "float32", "implementation": "xla"}
    if not line.is_msa:
        step = jax.jit(functools.partial(pairformer.stack, **options))
        masks = {"pair_mask": given.pair_mask, "single_mask": given.other_mask}
        pair, other = step(params, given.pair, given.other, **masks)
        return other, pair
    other, pair = given.other, given.pair
    for block in params["layers"].values():
        step = jax.jit(functools.partial(pairformer.evoformer_block, **options))
        other, pair = step(block, other, pair, msa_mask=given.other_mask, pair_mask=given.pair_mask)
    return other, pair


@lines
def test_computes_what_the_model_computes(name):
    line, (tensors, expected) = LINES[name], computed(name)
    params, options = weights.load_pairformer(in_haiku(tensors) if line.blocks is None else tensors)
    assert options == dict(line.loaded)
    given = inputs(line)
    other, pair = run(line, params, options)
    tokens = np.diagonal(given.pair_mask, axis1=1, axis2=2)
    kept = np.broadcast_to(tokens[:, None], given.other_mask.shape) if line.is_msa else tokens
    assert_close(np.asarray(pair)[given.pair_mask], expected[1][given.pair_mask], DEEP)
    assert_close(np.asarray(other)[kept], expected[0][kept], DEEP)


@lines
def test_parameters_are_as_init_has_them(name):
    """Of all published lines: dtypes, axes and names, so that the modules take them."""
    line, (tensors, _) = LINES[name], computed(name)
    params, _ = weights.load_pairformer(tensors, dtype=jnp.bfloat16)
    dtypes = {"kernel": jnp.bfloat16}
    for path, leaf in jax.tree.leaves_with_path(params):
        assert isinstance(leaf, jax.Array)
        assert leaf.dtype == dtypes.get(path[-1].key, jnp.float32), path
    assert list(params["layers"]) == ["0", "1"]
    if not line.ends:
        stacked = training.stack_layers(params)
        assert all(leaf.shape[0] == BLOCKS for leaf in jax.tree.leaves(stacked["layers"]))


# Where a stack is


def test_the_trunk_of_a_larger_model():
    """Of several stacks the Pairformer of the trunk, and each by its prefix."""
    tensors = dict(computed("boltz 2")[0])
    tensors |= {f"confidence_module.{name}": x for name, x in computed("boltz 2")[0].items()}
    tensors |= computed("boltz 2 msa")[0]
    tensors |= {
        "msa_module.s_proj.weight": np.ones((3, 3), np.float32),
        "s_init.weight": np.ones((2, 2), np.float32),
    }
    expected, _ = weights.load_pairformer(computed("boltz 2")[0])
    for prefix in (None, "pairformer_module.", "confidence_module.pairformer_module."):
        params, options = weights.load_pairformer(tensors, prefix=prefix)
        assert options == {}
        assert jax.tree.all(jax.tree.map(np.array_equal, params, expected))
    params, options = weights.load_pairformer(tensors, prefix="msa_module.")
    assert "outer_product_mean" in params["layers"]["0"]
    assert options == dict(BOLTZ_MSA)


def test_a_stack_without_a_prefix():
    tensors = {name.removeprefix("pairformer_stack."): x for name, x in computed("openfold 3")[0].items()}
    assert list(weights.load_pairformer(tensors)[0]["layers"]) == ["0", "1"]
    tensors = {name.removeprefix(f"{AF3}/msa_stack/"): x for name, x in computed("alphafold 3 msa")[0].items()}
    assert list(weights.load_pairformer(tensors)[0]["layers"]) == ["0", "1"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", "folder"])
def test_files(tmp_path, suffix):
    tensors, _ = computed("protenix")
    path = tmp_path if suffix == "folder" else tmp_path / f"model{suffix}"
    if suffix == ".pt":
        import torch

        torch.save({name: torch.tensor(x) for name, x in tensors.items()}, path)
    else:
        save_file(tensors, path / "model.safetensors" if suffix == "folder" else path)
    params, _ = weights.load_pairformer(path)
    assert jax.tree.all(jax.tree.map(np.array_equal, params, weights.load_pairformer(tensors)[0]))


def test_a_block_of_pairs_alone():
    single = ("attention", "pre_norm_s", "transition_s", "s_post_norm")
    tensors = {n: x for n, x in computed("boltz 2")[0].items() if not n.split(".")[3].startswith(single)}
    params, _ = weights.load_pairformer(tensors)
    assert set(params["layers"]["0"]) == {
        "tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end", "pair_transition"
    }  # fmt: skip


# Errors


def test_all_that_does_not_fit_is_listed():
    tensors = dict(computed("openfold 3")[0])
    at = "pairformer_stack.blocks.1."
    del tensors[f"{at}pair_stack.tri_mul_in.linear_b_g.weight"]
    del tensors[f"{at}attn_pair_bias.mha.linear_q.bias"]
    tensors[f"{at}pair_stack.tri_att_end.mha.linear_k.weight"] = np.zeros((24, 11), np.float32)
    tensors[f"{at}pair_stack.tri_att_end.mha.linear_k.bias"] = np.zeros(24, np.float32)
    tensors[f"{at}single_transition.linear_out.weight"] = np.zeros((8, 16), np.int32)
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_pairformer(tensors)
    assert str(error.value).splitlines() == [
        "the state dict does not fit OpenFold 3's Pairformer of 2 blocks under prefix='pairformer_stack.':",
        f"  missing     {at}attn_pair_bias.mha.linear_q.bias (16,)",
        f"  missing     {at}pair_stack.tri_mul_in.linear_b_g.weight (10, 12)",
        f"  unexpected  {at}pair_stack.tri_att_end.mha.linear_k.bias (24,)",
        f"  misshapen   {at}pair_stack.tri_att_end.mha.linear_k.weight (24, 11); expected (24, 12)",
        f"  not float   {at}single_transition.linear_out.weight int32",
    ]


def test_what_does_not_fit_in_haiku_is_listed():
    tensors, at = dict(computed("alphafold 3")[0]), LINES["alphafold 3"].prefix
    del tensors[f"{at}pair_attention2/q_projection/weights"]
    tensors[f"{at}single_attention_q_projection/bias"] = np.zeros((2, 8), np.float32)
    tensors[f"{at}pair_transition/transition1/bias"] = np.zeros((2, 48), np.float32)
    with pytest.raises(weights.CheckpointError) as error:
        weights.load_pairformer(tensors)
    assert str(error.value).splitlines()[1:] == [
        f"  missing     {at}pair_attention2/q_projection/weights (2, 3, 4, 12)",
        f"  unexpected  {at}pair_transition/transition1/bias (2, 48)",
        f"  misshapen   {at}single_attention_q_projection/bias (2, 8); expected (2, 4, 2)",
    ]


def without(tensors: dict[str, np.ndarray], *parts: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in tensors.items() if not any(part in name for part in parts)}


def test_a_block_that_lacks_a_module():
    """A last block may lack what updates the alignment; no other may lack what others have."""
    tensors = computed("protenix msa")[0]
    swapped = {n.replace("blocks.0.", "blocks.2."): x for n, x in tensors.items() if "blocks.0." in n}
    with pytest.raises(
        weights.CheckpointError, match=r"missing     msa_module\.blocks\.1\.msa_stack\.transition_m"
    ):
        weights.load_pairformer(tensors | swapped)


@pytest.mark.parametrize(
    "tensors, prefix, message",
    [
        (
            {"weight": np.zeros((2, 2))},
            None,
            "the state dict holds no stack of blocks of pairs; expected names such as",
        ),
        (
            {"weight": np.zeros((2, 2))},
            "x.",
            "holds no stack of blocks of pairs under prefix='x.'; expected names",
        ),
        ("boltz 2", "trunk.", "under prefix='trunk.'; expected prefix to be one of 'pairformer_module.'"),
        (
            "two",
            None,
            r"holds several stacks of blocks of pairs; expected prefix to be one of 'a\.', 'msa_module\.'",
        ),
        (
            "gap",
            None,
            r"has the blocks 0 under prefix|has the blocks 1 under prefix='pairformer_module.'; expected 0 to 0",
        ),
        ("large", None, "holds .* with values up to 1e.06; expected at most 65504"),
    ],
)
def test_errors(tensors, prefix, message):
    boltz, msa = dict(computed("boltz 2")[0]), computed("boltz 2 msa")[0]
    cases = {
        "boltz 2": boltz,
        "two": msa | {n.replace("msa_module.", "a."): x for n, x in msa.items()},
        "gap": without(boltz, "layers.0."),
        "large": boltz
        | {"pairformer_module.layers.0.transition_z.fc1.weight": np.full((24, 12), 1e6, np.float32)},
    }
    given = cases[tensors] if isinstance(tensors, str) else tensors
    with pytest.raises(weights.CheckpointError, match=message):
        weights.load_pairformer(given, prefix=prefix, dtype="float16")


def test_errors_of_arguments(tmp_path):
    with pytest.raises(TypeError, match="dtype is float64; expected float16, bfloat16 or float32"):
        weights.load_pairformer(computed("protenix")[0], dtype="float64")
    with pytest.raises(FileNotFoundError):
        weights.load_pairformer(tmp_path / "nothing.safetensors")
