"""The losses of the models against torch in float64, and what training needs: stacked layers, casts, remat."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_models import gpt2, minilm, qwen3, training
from pallas_models.gpt2 import GPT2Config
from pallas_models.minilm import MiniLMConfig
from pallas_models.qwen3 import Qwen3Config
from parity.models.decoder_checkpoints import gpt2_tensors, qwen3_tensors
from parity.support.common import (
    KERNEL,
    array,
    assert_close,
    assert_equal,
    cuda_device,
    equations,
    normal,
    random_params,
    relative_error,
)
from parity.support.tolerances import DEEP, MODEL, MODEL_GRADIENT, SAME

GPT2 = GPT2Config(vocab_size=20, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=12)
QWEN3 = Qwen3Config(
    vocab_size=20,
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    max_positions=12,
)
TIED = dataclasses.replace(QWEN3, tie_embeddings=True)
BERT = MiniLMConfig(
    vocab_size=20, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48, max_positions=12
)
CASES = {"gpt2": (gpt2, GPT2), "qwen3": (qwen3, QWEN3), "qwen3-tied": (qwen3, TIED)}
every_model = pytest.mark.parametrize("model", CASES)

IDS = array(np.random.default_rng(0).integers(0, 20, (3, 9)), "int32")
# Nothing missing, padding on the right, padding on the left.
MASK = array([[1] * 9, [1] * 4 + [0] * 5, [0] * 3 + [1] * 6])
POSITIONS = array(np.maximum(np.cumsum(MASK, 1) - 1, 0))
names = jax.checkpoint_policies.save_only_these_names


def case_of(model, num_layers):
    module, config = CASES[model]
    return module, dataclasses.replace(config, num_layers=num_layers)


def loss_of(model, *, num_layers=1, **options):
    """The loss of parameters, ids and mask."""
    module, config = case_of(model, num_layers)
    return functools.partial(module.loss, config=config, **options)


def params_of(model, num_layers=1):
    module, config = case_of(model, num_layers)
    return random_params(config, "float32", module.init)


@functools.cache
def value_and_gradient(model, remat="none", *, stacked=False):
    params = params_of(model, 2)
    step = jax.jit(jax.value_and_grad(loss_of(model, num_layers=2, remat=remat)))
    value, gradient = step(training.stack_layers(params) if stacked else params, IDS, MASK)
    return value, training.unstack_layers(gradient) if stacked else gradient


def torch_loss(reference, decoders, model, weights, smoothing, reduction):
    """The loss by torch's cross entropy of every token that is predicted, and the gradients by tensor name."""
    from torch.nn import functional

    module, config = CASES[model]
    tensors = gpt2_tensors(params_of(model)) if module is gpt2 else qwen3_tensors(params_of(model), config)
    kind = decoders.GPT2 if module is gpt2 else decoders.Qwen3
    network = decoders.load(kind(config), tensors)
    logits = network(*map(reference.tensor, (IDS, MASK, POSITIONS)))
    ids, mask, weights = map(reference.tensor, (IDS, MASK, weights))
    counts = weights[:, 1:] * (mask[:, 1:] * mask[:, :-1])
    losses = functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), ids[:, 1:], label_smoothing=smoothing, reduction="none"
    )
    total = (losses * counts).sum()
    value = total / counts.sum() if reduction == "mean" else total
    value.backward()
    return float(value.detach()), {name: p.grad.cpu().numpy() for name, p in network.named_parameters()}


@pytest.mark.parametrize(
    "model, smoothing, reduction",
    [("gpt2", 0.0, "mean"), ("gpt2", 0.1, "sum"), ("qwen3", 0.1, "sum"), ("qwen3-tied", 0.0, "mean")],
)
def test_decoders_against_torch(reference, decoders, model, smoothing, reduction):
    weights = jnp.abs(normal(np.random.default_rng(1), *IDS.shape))
    function = loss_of(
        model,
        weights=weights,
        positions=POSITIONS,
        label_smoothing=smoothing,
        reduction=reduction,
        implementation=KERNEL,
    )
    value, gradient = jax.jit(jax.value_and_grad(function))(params_of(model), IDS, MASK)
    expected, gradients = torch_loss(reference, decoders, model, weights, smoothing, reduction)
    assert value.dtype == jnp.float32
    assert_close(value, expected, DEEP)
    ours = gpt2_tensors(gradient) if model == "gpt2" else qwen3_tensors(gradient, CASES[model][1])
    assert ours.keys() == gradients.keys()
    for name, found in ours.items():
        assert_close(found, gradients[name], MODEL_GRADIENT)


@every_model
def test_a_token_counts_where_it_and_its_neighbour_are_no_padding(model):
    """What padding holds has no effect, nor has the weight of a sequence's first token."""
    function, params = jax.jit(loss_of(model, positions=POSITIONS)), params_of(model)
    expected = function(params, IDS, MASK)
    assert_equal(function(params, jnp.where(MASK == 0, 7, IDS), MASK), expected)
    weights = MASK.astype(bool).at[:, 0].set(False)
    assert_equal(function(params, IDS, MASK, weights=weights), expected)
    assert relative_error(function(params, IDS, MASK, weights=weights.at[0, 4].set(False)), expected) > 1e-4
    value, gradient = jax.value_and_grad(function)(params, IDS, jnp.zeros_like(MASK))
    assert value == 0.0 and all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient))


# What training asks of the decoders


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "remat, stacked",
    [("none", True), ("block", False), ("block", True), (names("qkv", "mlp_norm"), True)],
    ids=["none-stacked", "block", "block-stacked", "names-stacked"],
)
@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_stacked_layers_and_remat_change_nothing(model, remat, stacked):
    found = value_and_gradient(model, remat, stacked=stacked)
    jax.tree.map(lambda a, b: assert_close(a, b, 4 * SAME), found, value_and_gradient(model))


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_stacked_layers_are_in_the_program_once(model):
    def size(num_layers, *, stacked):
        module, deeper = case_of(model, num_layers)
        params = jax.eval_shape(lambda: module.init(jax.random.key(0), deeper))
        if stacked:
            params = jax.eval_shape(training.stack_layers, params)
        step = jax.jit(jax.grad(functools.partial(module.loss, config=deeper)))
        return len(re.findall(r"stablehlo\.\w+|\bcall @", step.lower(params, IDS).as_text()))

    assert size(7, stacked=True) == size(3, stacked=True)
    assert size(7, stacked=False) > size(3, stacked=False)


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_documented_names_are_those_of_the_layer(model):
    module, _ = CASES[model]
    docstring = inspect.getdoc(module.loss) or ""  # indented alike by every Python
    documented = re.search(r"remat: .*?\n  [a-z]", docstring + "\n  x", re.DOTALL)
    assert documented is not None
    jaxpr = str(jax.make_jaxpr(loss_of(model))(params_of(model), IDS))
    found = set(re.findall(r"name\[name=(\w+)\]", jaxpr))
    assert found == set(re.findall(r'"(\w+)"', documented[0].split("Returns")[0])) and found


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_policies_keep_what_they_name(model):
    """Products are counted: what is kept is not computed again."""

    def products(remat):
        params = training.stack_layers(params_of(model))  # one layer in the program
        program = jax.make_jaxpr(jax.grad(loss_of(model, remat=remat)))(params, IDS)
        return sum(equation.primitive.name == "dot_general" for equation in equations(program.jaxpr))

    counts = [products(remat) for remat in ("none", names("qkv"), "block")]
    assert counts == sorted(set(counts)), f"{counts} should increase"


@pytest.mark.parametrize("scanned", [False, True])
def test_what_is_computed_again_is_not_taken_from_the_first_time(scanned):
    """XLA would, and keep it; not where a loop stands between."""
    (layer,) = jax.make_jaxpr(training.checkpointed(jnp.sin, "block", scanned=scanned))(1.0).eqns
    assert layer.params["prevent_cse"] is not scanned


@pytest.mark.parametrize("model", ["gpt2", "qwen3", "minilm"])
def test_mixed_precision(model):
    """Kernels are cast, gradients are not, and sums over tokens that occur often are float32."""
    module, config = CASES.get(model, (minilm, BERT))
    params = random_params(config, "float32", module.init)
    ids = jnp.full((64, 12), 5).at[:, ::3].set(jnp.arange(64)[:, None] % 20)
    if model == "minilm":
        tokens = (ids, jnp.ones_like(ids))
        loss = lambda p: minilm.contrastive_loss(p, tokens, (ids[:, ::-1], tokens[1]), config=config)  # noqa: E731
    else:
        loss = functools.partial(module.loss, ids=ids, config=config)
    cast = training.cast(params, jnp.bfloat16)
    dtypes = {path[-1].key: leaf.dtype.name for path, leaf in jax.tree.leaves_with_path(cast)}
    assert dtypes.pop("kernel") == "bfloat16" and set(dtypes.values()) == {"float32"}
    gradient = jax.jit(jax.grad(lambda p: loss(training.cast(p, jnp.bfloat16))))(params)
    expected = jax.jit(jax.grad(loss))(params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(gradient)} == {"float32"}
    found, wanted = (tree["embeddings" if "embeddings" in tree else "word"] for tree in (gradient, expected))
    found, wanted = (tree.get("word", tree)["embedding"] for tree in (found, wanted))
    assert_close(found[5], wanted[5], 4 * MODEL["bfloat16"])


def test_errors():
    params = params_of("gpt2", 2)
    stacked = training.stack_layers(params)
    with pytest.raises(ValueError, match="remat='all' is unknown; expected 'none', 'block' or a policy"):
        loss_of("gpt2", num_layers=2, remat="all")(params, IDS)
    with pytest.raises(ValueError, match=r"weights has shape \(3, 8\)"):
        loss_of("gpt2", num_layers=2, weights=jnp.ones((3, 8)))(params, IDS)
    with pytest.raises(
        ValueError, match=r"\['layers'\]\['mlp'\]\['up'\]\['bias'\]: expected \(2, 48\), got \(3, 48\)"
    ):
        wrong = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:1]]), stacked["layers"])
        loss_of("gpt2", num_layers=2)({**stacked, "layers": wrong}, IDS)
    with pytest.raises(
        ValueError, match=r"has \['attention', 'attention_norm', 'mlp', 'mlp_norm'\]; expected layers"
    ):
        training.stack_layers(stacked)
    with pytest.raises(ValueError, match=r"has \['0', '2'\]; expected layers named"):
        training.stack_layers({"layers": {"0": params["layers"]["0"], "2": params["layers"]["1"]}})
    with pytest.raises(ValueError, match="is not stacked"):
        training.unstack_layers(params)
    with pytest.raises(ValueError, match="positives has 2 sentences; expected 3, a pair each"):
        minilm.contrastive_loss({}, (IDS, MASK), (IDS[:2], MASK[:2]), config=BERT)


def test_layers_beyond_nine_keep_their_order():
    layers = {str(i): {"mlp": {"bias": jnp.full((2,), i)}} for i in reversed(range(12))}
    stacked = training.stack_layers({"layers": layers})["layers"]
    np.testing.assert_array_equal(stacked["mlp"]["bias"][:, 0], range(12))


# Pairs of sentences


@pytest.mark.parametrize("symmetric, hard", [(False, False), (True, True)])
def test_contrastive_loss_against_torch(reference, bert, symmetric, hard):
    import torch

    rng = np.random.default_rng(3)
    params = random_params(BERT)
    sides = [(jnp.asarray(rng.integers(0, 20, (3, n)), jnp.int32), MASK[:, :n]) for n in (9, 9, 7)]
    sides = sides if hard else sides[:2]
    function = functools.partial(
        minilm.contrastive_loss, scale=7.0, symmetric=symmetric, config=BERT, implementation=KERNEL
    )
    value, gradient = jax.jit(jax.value_and_grad(function))(params, *sides)

    tensors = bert.bert_tensors(params)
    encoder = bert.Encoder(tensors, num_heads=BERT.num_heads, epsilon=BERT.epsilon)
    first, second, *rest = (encoder.embed(*map(reference.tensor, side)) for side in sides)
    labels = torch.arange(3, device=first.device)
    expected = torch.nn.functional.cross_entropy(7.0 * first @ torch.cat([second, *rest]).T, labels)
    if symmetric:
        expected = (expected + torch.nn.functional.cross_entropy(7.0 * second @ first.T, labels)) / 2
    expected.backward()
    assert_close(value, float(expected.detach()), DEEP)
    wanted = {name: p.grad.cpu().numpy() for name, p in encoder.named_parameters()}
    ours = bert.Encoder(bert.bert_tensors(gradient), num_heads=BERT.num_heads)
    for name, found in ours.named_parameters():
        assert_close(found.detach().cpu(), wanted[name], MODEL_GRADIENT)


def test_minilm_takes_stacked_layers_and_remat():
    config = dataclasses.replace(BERT, num_layers=2)
    params, tokens = random_params(config), (IDS, MASK)
    function = functools.partial(minilm.contrastive_loss, config=config)
    step = jax.jit(jax.value_and_grad(function), static_argnames="remat")
    expected = step(params, tokens, (IDS[::-1], MASK[::-1]))
    value, gradient = step(training.stack_layers(params), tokens, (IDS[::-1], MASK[::-1]), remat="block")
    jax.tree.map(lambda a, b: assert_close(a, b, 4 * SAME), (value, training.unstack_layers(gradient)), expected)


@pytest.mark.parametrize("model", ["gpt2", "qwen3"])
def test_steps_lower_for_cuda(model):
    module, config = CASES[model]
    params = jax.eval_shape(lambda: module.init(jax.random.key(0), config))
    step = jax.jit(jax.grad(lambda p: loss_of(model, remat="block")(training.cast(p, jnp.bfloat16), IDS)))
    with cuda_device("NVIDIA H200", 132):
        text = step.trace(params).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" in text
