"""Scores of pairs of sentences, as sentence-transformers gives them on the same folders, and refusals."""

import json
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

import weights
from pallas_models.minilm import CrossEncoder
from parity.sentence import encoder_checkpoints
from parity.support.common import ON_GPU, assert_close, cosines
from parity.support.tolerances import COSINE, DEEP

KINDS = [kind for kind in encoder_checkpoints.FAMILIES if kind != "qwen3"]
FIRST = encoder_checkpoints.sentences(10, longest=6)
SECOND = encoder_checkpoints.sentences(10, longest=24, seed=4)
PAIRS = list(zip(FIRST, SECOND, strict=True))


def write(folder: Path, kind: str, num_labels: int = 1, **changes: Any) -> Path:
    """What transformers writes of a classifier of random parameters, and a tokenizer of pairs with token types."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    encoder_checkpoints.write(folder, kind)  # the tokenizer of its
    name, options = encoder_checkpoints.FAMILIES[kind]
    torch.manual_seed(1)
    config = getattr(transformers, name)(**options | changes, num_labels=num_labels)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    encoder_checkpoints.randomize(model)
    model.save_pretrained(folder)
    types = kind == "bert"
    tokenizer = encoder_checkpoints.tokenizer(kind)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A [SEP] $B:{types:d} [SEP]:{types:d}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = json.loads((folder / "tokenizer_config.json").read_text())
    stated["model_input_names"] = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    return folder


def theirs(folder: Path) -> Any:
    return pytest.importorskip("sentence_transformers").CrossEncoder(str(folder), device="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_families(tmp_path, kind):
    model = theirs(write(tmp_path, kind))
    ours = CrossEncoder.from_pretrained(tmp_path)
    assert ours.max_seq_length == model.max_seq_length == 24  # the longest pairs are cut
    identity = pytest.importorskip("torch").nn.Identity()
    logits = model.predict(PAIRS, activation_fn=identity)
    assert_close(ours.predict(PAIRS, activation_fn=lambda x: x), logits, DEEP)
    assert_close(ours.predict(PAIRS), model.predict(PAIRS), DEEP)
    one = ours.predict(PAIRS[0])
    assert one.shape == () and abs(one - model.predict(PAIRS[0])) < 1e-4


def test_it_is_pickled(tmp_path):
    ours = CrossEncoder.from_pretrained(write(tmp_path, "bert", num_labels=3), max_length=12)
    ours.prompts["query"] = "guitar "
    expected = ours.predict(PAIRS, prompt_name="query")
    other = pickle.loads(pickle.dumps(ours))
    assert repr(other) == repr(ours)
    np.testing.assert_array_equal(other.predict(PAIRS, prompt_name="query"), expected)


def test_tokenizer_of_another_model(tmp_path):
    """Ids beyond the vocabulary would be taken for token types."""
    write(tmp_path, "bert")
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([f"word{i}" for i in range(1000)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"the tokenizer has \d+ ids, the model only"):
        CrossEncoder.from_pretrained(tmp_path)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: sizes of published models; test_families has small ones")
@pytest.mark.parametrize("kind", KINDS)
def test_families_in_float16(tmp_path, kind):
    """The scores of all pairs as one vector, before an activation."""
    model = theirs(write(tmp_path, kind, **encoder_checkpoints.REAL[kind])).to("cuda")
    ours = CrossEncoder.from_pretrained(tmp_path, dtype=jnp.float16)
    ours.max_seq_length = model.max_seq_length = 256
    firsts = encoder_checkpoints.sentences(64, longest=12)
    pairs = list(zip(firsts, encoder_checkpoints.sentences(64, longest=200, seed=4), strict=True))
    expected = model.predict(pairs, activation_fn=pytest.importorskip("torch").nn.Identity())
    assert np.std(expected) > 0.1 * np.abs(np.mean(expected))  # pairs differ
    packed = cosines(ours.predict(pairs, activation_fn=lambda x: x)[None], expected[None])[0]
    alone = [ours.predict(pair, activation_fn=lambda x: x) for pair in pairs[::8]]
    padded = cosines(np.stack(alone)[None], expected[None, ::8])[0]
    print(f"{kind}: 1 - cosine {1 - packed:.1e} packed, {1 - padded:.1e} alone")
    assert min(packed, padded) >= COSINE["float16"]


def test_several_labels(tmp_path):
    model = theirs(write(tmp_path, "modernbert", 3, classifier_pooling="mean"))
    ours = CrossEncoder.from_pretrained(tmp_path)
    assert ours.num_labels == 3
    assert_close(ours.predict(PAIRS), model.predict(PAIRS), DEEP)
    assert_close(ours.predict(iter(PAIRS), apply_softmax=True), model.predict(PAIRS, apply_softmax=True), DEEP)
    with pytest.raises(ValueError, match="the model has 3 scores for a pair; expected one to rank by"):
        ours.rank("a", ["b"])


def test_what_version_6_writes(tmp_path):
    """Its modules.json, and the activation in a file of its own."""
    model = theirs(write(tmp_path / "source", "bert"))
    model.activation_fn = pytest.importorskip("torch").nn.Tanh()
    model.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    ours = CrossEncoder.from_pretrained(tmp_path / "saved")
    assert_close(ours.predict(PAIRS), theirs(tmp_path / "saved").predict(PAIRS), DEEP)
    assert ours.predict(PAIRS).min() < 0


@pytest.mark.parametrize("key", ["sentence_transformers", "sbert_ce_default_activation_function"])
def test_the_activation_in_config_json(tmp_path, key):
    path = write(tmp_path, "bert") / "config.json"
    name = "torch.nn.modules.linear.Identity"
    stated = {key: {"activation_fn": name} if key == "sentence_transformers" else name}
    path.write_text(json.dumps(json.loads(path.read_text()) | stated))
    assert_close(CrossEncoder.from_pretrained(tmp_path).predict(PAIRS), theirs(tmp_path).predict(PAIRS), DEEP)


def test_prompts(tmp_path):
    """Before the first sentence of a pair: named, given, or the default one."""
    library = pytest.importorskip("sentence_transformers")
    prompts = dict(prompts={"ask": "a man is "}, default_prompt_name="ask")
    model = library.CrossEncoder(str(write(tmp_path / "source", "bert")), device="cpu", **prompts)
    model.save_pretrained(str(tmp_path / "saved"), create_model_card=False)
    model, ours = theirs(tmp_path / "saved"), CrossEncoder.from_pretrained(tmp_path / "saved")
    for options in ((), ("ask",), (None, "the guitar "), (None, ""), ("ask", None, 2, False)):
        assert_close(ours.predict(PAIRS, *options), model.predict(PAIRS, *options), DEEP)
    assert np.ptp([ours.predict(PAIRS[0], prompt=p) for p in ("", "a man is ")]) > 1e-3
    with pytest.raises(ValueError, match=r"there is no prompt 'title'; expected one of \('ask'"):
        ours.predict(PAIRS, "title")


def test_kinds_of_results(tmp_path):
    ours = CrossEncoder.from_pretrained(write(tmp_path, "distilbert"))
    expected = ours.predict(PAIRS)
    tensor, rows = ours.predict(PAIRS, convert_to_tensor=True), ours.predict(PAIRS, convert_to_numpy=False)
    assert isinstance(tensor, jax.Array) and isinstance(rows, list) and isinstance(rows[0], jax.Array)
    np.testing.assert_array_equal(tensor, expected)
    np.testing.assert_array_equal(np.stack(rows), expected)
    np.testing.assert_array_equal(ours.predict(inputs=PAIRS), expected)
    assert ours.max_length == ours.max_seq_length == 24


def test_rank(tmp_path):
    model = theirs(write(tmp_path, "distilbert"))
    ours = CrossEncoder.from_pretrained(tmp_path)
    found, expected = (m.rank(FIRST[0], SECOND, top_k=4, return_documents=True) for m in (ours, model))
    assert [r["corpus_id"] for r in found] == [r["corpus_id"] for r in expected]
    assert [r["text"] for r in found] == [SECOND[r["corpus_id"]] for r in found]
    np.testing.assert_allclose([r["score"] for r in found], [r["score"] for r in expected], atol=1e-4)
    assert ours.rank(FIRST[0], SECOND, top_k=1)[0].keys() == {"corpus_id", "score"}


def test_length_can_be_set(tmp_path):
    model = theirs(write(tmp_path, "bert"))
    ours = CrossEncoder.from_pretrained(tmp_path, max_length=9)
    model.max_seq_length = 9
    assert_close(ours.predict(PAIRS), model.predict(PAIRS), DEEP)
    with pytest.raises(ValueError, match="max_length=3; expected 4 to 40"):
        ours.max_seq_length = 3


@pytest.mark.parametrize(
    "pairs, options, error, message",
    [
        (["a"], {}, TypeError, r"pairs\[0\] is 'a'; expected two str"),
        ([("a", "b", "c")], {}, TypeError, r"pairs\[0\] is \('a', 'b', 'c'\); expected two str"),
        ([("a", "b"), ("a", 3)], {}, TypeError, r"pairs\[1\] is of type int; expected str"),
        ([("a", "\ud800")], {}, ValueError, "half of a surrogate pair"),
        ([("a", "b")], {"batch_size": 0}, ValueError, "batch_size=0; expected at least 1"),
        ([("a", "b")], {"batch_size": 1.5}, TypeError, "batch_size=1.5 is of type float; expected an integer"),
        ([("a", "b")], {"inputs": [("a", "b")]}, TypeError, "pairs and inputs are both given"),
        (None, {}, TypeError, "pairs is of type NoneType; expected an iterable of pairs of str"),
    ],
)
def test_errors(tmp_path, pairs, options, error, message):
    ours = CrossEncoder.from_pretrained(write(tmp_path, "bert"))
    with pytest.raises(error, match=message):
        ours.predict(pairs, **options)


def test_what_is_no_classifier(tmp_path):
    with pytest.raises(
        weights.CheckpointError, match=r"holds no classifier; expected a tensor classifier\.weight"
    ):
        CrossEncoder.from_pretrained(encoder_checkpoints.write(tmp_path / "bert", "bert"))
    with pytest.raises(NotImplementedError, match="holds a qwen3; classifiers are of one of bert, roberta"):
        CrossEncoder.from_pretrained(encoder_checkpoints.write(tmp_path / "qwen3", "qwen3"))
    folder = write(tmp_path / "cut", "bert")
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "classifier.bias"}, folder / "model.safetensors")
    with pytest.raises(weights.CheckpointError, match=r"missing     classifier\.bias \(1,\)"):
        CrossEncoder.from_pretrained(folder)
    (folder / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Pooling", "path": ""}])
    )
    with pytest.raises(NotImplementedError, match=r"lists \['Pooling'\]; expected a Transformer alone"):
        CrossEncoder.from_pretrained(folder)
