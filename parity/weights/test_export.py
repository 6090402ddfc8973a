"""`weights.export`: our loaders, transformers and sentence-transformers read it, and nothing is lost."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import weights
from pallas_models import gpt2, minilm, qwen3, training
from parity.models import test_losses as losses
from parity.support.common import assert_close, random_params
from parity.support.tolerances import DEEP
from parity.weights import checkpoints
from parity.weights.test_weights import assert_trees_equal
from weights import families

LOADERS = {"gpt2": weights.load_gpt2, "qwen3": weights.load_qwen3, "minilm": weights.load_minilm}
BERT, GPT2, QWEN3, TIED = (
    dataclasses.replace(config, num_layers=2) for config in (losses.BERT, losses.GPT2, losses.QWEN3, losses.TIED)
)
every_config = pytest.mark.parametrize("config", [BERT, GPT2, QWEN3, TIED], ids=["bert", "gpt2", "qwen3", "tied"])


def params_of(config):
    return random_params(config, "float32", families.of(config).init)


@every_config
def test_our_loaders_read_it_back(tmp_path, config):
    family, params = families.of(config), params_of(config)
    path = weights.export(params, tmp_path / "new" / "folder", config=config)
    assert path == tmp_path / "new" / "folder" / "model.safetensors"
    assert_trees_equal(LOADERS[family.name](path.parent, dtype="float32"), params)
    half = weights.export(params, tmp_path, config=config, dtype=jnp.float16)
    assert {t.dtype.name for t in load_file(half).values() if t.ndim == 2} == {"float16"}


@pytest.mark.parametrize("config", [GPT2, QWEN3, TIED], ids=["gpt2", "qwen3", "tied"])
def test_transformers_computes_the_same(tmp_path, config):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    params, ids = params_of(config), np.arange(9)[None] % config.vocab_size
    weights.export(params, tmp_path, config=config)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    module = gpt2 if config is GPT2 else qwen3
    with torch.inference_mode():
        expected = model(torch.tensor(ids)).logits
    assert_close(module.logits(params, jnp.asarray(ids), config=config), expected, DEEP)


def test_files_beside_the_tensors_come_along(tmp_path):
    """Of a sentence encoder: tokenizer, pooling, and the pooler, which is kept though nothing uses it."""
    config = checkpoints.CONFIG
    pooler = {"pooler.dense.bias": np.full(64, 3.0, np.float32)}
    source = checkpoints.write(tmp_path / "source", checkpoints.bert_tensors() | pooler, max_length=7)
    (source / "notes.txt").write_text("ours")
    trained = jax.tree.map(lambda leaf: 1.5 * leaf, weights.load_minilm(source))
    weights.export(trained, tmp_path / "out", config=config, like=source)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    texts = {"config.json", "tokenizer.json", "sentence_bert_config.json", "modules.json", "1_Pooling/config.json"}
    assert found == {*texts, "model.safetensors"}
    assert_trees_equal(weights.load_minilm(tmp_path / "out"), trained)
    assert load_file(tmp_path / "out" / "model.safetensors")["pooler.dense.bias"][0] == 3.0
    assert minilm.Encoder.from_pretrained(tmp_path / "out").max_length == 7
    weights.export(trained, source, config=config, like=source)  # in place
    assert_trees_equal(weights.load_minilm(source), trained)
    assert (source / "notes.txt").exists()


@checkpoints.needs_real_weights
def test_sentence_transformers_computes_the_same(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    params = jax.tree.map(lambda leaf: 1.01 * leaf, weights.load_minilm())
    weights.export(params, tmp_path, like="all-MiniLM-L6-v2")
    sentences = ["A man is playing a guitar.", "Someone plays an instrument."]
    expected = library.SentenceTransformer(str(tmp_path), device="cpu").encode(sentences)
    assert_close(minilm.Encoder.from_pretrained(tmp_path).encode(sentences), expected, DEEP)


def test_errors(tmp_path):
    params = params_of(BERT)
    with pytest.raises(weights.CheckpointError, match=r"layers\.1\.mlp\.up\.bias"):
        weights.export(training.stack_layers(params), tmp_path / "out", config=BERT)
    with pytest.raises(weights.CheckpointError, match=r"hidden_size=64.*expected MiniLMConfig.*hidden_size=32"):
        weights.export(params, tmp_path / "out", config=BERT, like=checkpoints.write(tmp_path / "source"))
    with pytest.raises(FileNotFoundError):
        weights.export(params, tmp_path / "out", config=BERT, like=tmp_path / "absent")
    with pytest.raises(TypeError, match="config is a str"):
        weights.export(params, tmp_path / "out", config="bert")
    assert not (tmp_path / "out").exists()
