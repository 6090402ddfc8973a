"""Our encoder beside sentence-transformers on the same folders: values, lengths, prompts, and what is refused."""

import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weights
from pallas_models.minilm import Encoder
from pallas_models.sentence.heads import Dense, Head, Normalize
from parity.sentence import encoder_checkpoints
from parity.sentence.encoder_checkpoints import sentences
from parity.support.common import ON_GPU, assert_close, cosines
from parity.support.tolerances import COSINE, DEEP
from parity.weights import checkpoints

PROMPTS = {"query": "a man is ", "document": "the ", "passage": "an onion "}
SENTENCES = sentences(12)


def modules() -> Any:
    """The modules of sentence-transformers, which are in more than one package."""
    library = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    base = pytest.importorskip("sentence_transformers.base.modules")
    return types.SimpleNamespace(
        Transformer=base.Transformer, Dense=base.Dense, Normalize=base.Normalize, Pooling=library.Pooling
    )


def write(
    folder: Path,
    kind: str = "bert",
    pooling: Any = "mean",
    *following: Any,
    sizes: Mapping[str, Any] = types.MappingProxyType({}),
    **options: Any,
) -> Any:
    """Writes a folder with sentence-transformers; returns its model, read from there."""
    library = pytest.importorskip("sentence_transformers")
    source = encoder_checkpoints.write(folder / "transformers", kind, **sizes)
    transformer = modules().Transformer(str(source))
    pool = modules().Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling)
    model = library.SentenceTransformer(modules=[transformer, pool, *following], device="cpu", **options)
    model.save(str(folder / "model"), create_model_card=False)
    return library.SentenceTransformer(str(folder / "model"), device="cpu")


def dense(*sizes: int, activation: str = "Tanh", **options: Any) -> Any:
    torch = pytest.importorskip("torch")
    return modules().Dense(*sizes, activation_function=getattr(torch.nn, activation)(), **options)


def normalize() -> Any:
    return modules().Normalize()


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Any, Encoder]:
    folder = tmp_path_factory.mktemp("both")
    theirs = write(folder, prompts=PROMPTS, default_prompt_name="passage")
    return theirs, Encoder.from_pretrained(folder / "model")


# Modules and families


@pytest.mark.parametrize("kind", encoder_checkpoints.FAMILIES)
def test_families(tmp_path, kind):
    theirs = write(tmp_path, kind, "lasttoken" if kind == "qwen3" else "mean", normalize())
    ours = Encoder.from_pretrained(tmp_path / "model")
    expected = theirs.encode(SENTENCES)
    assert_close(ours.encode(SENTENCES), expected, DEEP)  # packed
    assert_close(ours.encode(SENTENCES[0]), expected[0], DEEP)  # padded


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: sizes of published models; test_families has small ones")
@pytest.mark.parametrize("kind", encoder_checkpoints.FAMILIES)
def test_families_in_float16(tmp_path, kind):
    """The cosine of every sentence, packed or alone, with what is computed in float32."""
    options = dict(sizes=encoder_checkpoints.REAL[kind])
    theirs = write(tmp_path, kind, "lasttoken" if kind == "qwen3" else "mean", normalize(), **options).to("cuda")
    ours = Encoder.from_pretrained(tmp_path / "model", dtype=jnp.float16)
    ours.max_seq_length = theirs.max_seq_length = 256
    given = sentences(96, longest=32) + sentences(32, longest=200)
    expected = theirs.encode(given)
    assert np.median(expected @ expected.T) < 0.95  # sentences differ: an embedding is not any other's
    packed = cosines(ours.encode(given), expected).min()
    padded = cosines(np.stack([ours.encode(sentence) for sentence in given[::24]]), expected[::24]).min()
    print(f"{kind}: 1 - cosine at most {1 - packed:.1e} packed, {1 - padded:.1e} alone")
    assert min(packed, padded) >= COSINE["float16"]


@pytest.mark.parametrize("spelling", ["new", "old"])
def test_modules(tmp_path, spelling):
    modes = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
    following = (
        dense(6 * 32, 24),
        normalize(),
        dense(24, 24, activation="ReLU", bias=False, use_residual=True),
        dense(24, 8, activation="Identity", use_residual=True),
    )
    theirs = write(tmp_path, "bert", modes, *following)
    if spelling == "old":
        pooling = tmp_path / "model" / "1_Pooling" / "config.json"
        old = (
            "cls_token",
            "max_tokens",
            "mean_tokens",
            "mean_sqrt_len_tokens",
            "weightedmean_tokens",
            "lasttoken",
        )
        pooling.write_text(json.dumps({f"pooling_mode_{mode}": True for mode in old}))
        listed = json.loads((tmp_path / "model" / "modules.json").read_text())
        for module in listed:
            module["type"] = f"sentence_transformers.models.{module['type'].rsplit('.', 1)[1]}"
        (tmp_path / "model" / "modules.json").write_text(json.dumps(listed))
    ours = Encoder.from_pretrained(tmp_path / "model")
    assert ours.head == Head(
        pooling=modes,
        layers=(
            Dense(in_features=192, out_features=24),
            Normalize(),
            Dense(in_features=24, out_features=24, activation="relu", use_bias=False, residual=True),
            Dense(in_features=24, out_features=8, activation="identity", residual=True),
        ),
    )
    assert ours.get_sentence_embedding_dimension() == theirs.get_embedding_dimension() == 8
    expected = theirs.encode(SENTENCES)
    assert_close(ours.encode(SENTENCES), expected, DEEP)
    assert_close(ours.encode(SENTENCES[3]), expected[3], DEEP)
    assert_close(np.concatenate(list(ours.encode_iter(iter(SENTENCES)))), expected, DEEP)


def test_without_modules_it_is_the_mean(tmp_path):
    library = pytest.importorskip("sentence_transformers")
    folder = encoder_checkpoints.write(tmp_path, "bert")
    expected = library.SentenceTransformer(str(folder), device="cpu").encode(SENTENCES)
    assert_close(Encoder.from_pretrained(folder).encode(SENTENCES), expected, DEEP)


def test_lower_case(tmp_path):
    theirs = write(tmp_path, "bert", "mean", normalize())
    options = tmp_path / "model" / "sentence_bert_config.json"
    stated = json.loads(options.read_text())
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer | {"normalizer": None}))
    del theirs
    for lower_case in (False, True):
        options.write_text(json.dumps(stated | {"do_lower_case": lower_case}))
        theirs = pytest.importorskip("sentence_transformers").SentenceTransformer(
            str(tmp_path / "model"), device="cpu"
        )
        ours = Encoder.from_pretrained(tmp_path / "model")
        assert_close(ours.encode(["A Man is Playing"] * 2), theirs.encode(["A Man is Playing"] * 2), DEEP)


# Folders that are written


@pytest.mark.parametrize("kind", encoder_checkpoints.FAMILIES)
def test_a_saved_encoder_is_read_by_sentence_transformers(tmp_path, kind):
    library = pytest.importorskip("sentence_transformers")
    pooling = "lasttoken" if kind == "qwen3" else "mean"
    following = dense(32, 24, activation="GELU"), normalize(), dense(24, 24, bias=False, use_residual=True)
    theirs = write(tmp_path, kind, pooling, *following, prompts=PROMPTS, similarity_fn_name="dot")
    encoder = Encoder.from_pretrained(tmp_path / "model")
    encoder.max_seq_length = 9
    encoder.save_pretrained(tmp_path / "saved")
    again, other = (
        Encoder.from_pretrained(tmp_path / "saved"),
        library.SentenceTransformer(str(tmp_path / "saved"), device="cpu"),
    )
    assert repr(again) == repr(encoder) and again.similarity_fn_name == other.similarity_fn_name == "dot"
    np.testing.assert_array_equal(again.encode_query(SENTENCES), encoder.encode_query(SENTENCES))
    theirs.max_seq_length = 9
    assert_close(other.encode_query(SENTENCES), theirs.encode_query(SENTENCES), DEEP)


def test_poolings_in_an_order_of_their_own(tmp_path):
    write(tmp_path, "bert", ("mean", "cls"))
    encoder = Encoder.from_pretrained(tmp_path / "model")
    encoder.save(tmp_path / "saved")
    saved = pytest.importorskip("sentence_transformers").SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert_close(saved.encode(SENTENCES), encoder.encode(SENTENCES), DEEP)


def test_saved_over_what_was_converted(tmp_path):
    from weights.__main__ import main

    source = encoder_checkpoints.write(tmp_path / "source", "bert")
    assert main(["minilm", str(source), str(tmp_path / "own")]) == 0
    other = Encoder.from_pretrained(encoder_checkpoints.write(tmp_path / "other", "bert", seed=1))
    other.half().save(tmp_path / "own")
    again = Encoder.from_pretrained(tmp_path / "own", dtype=jnp.float16)
    np.testing.assert_array_equal(again.encode(SENTENCES), other.encode(SENTENCES))


# Options of a call


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prompt_name": "query"},
        {"prompt": "a guitar . "},
        {"prompt": ""},
        {"normalize_embeddings": True},
        {"truncate_dim": 8},
        {"truncate_dim": 8, "normalize_embeddings": True},
        {"truncate_dim": 100},
        {"batch_size": 1, "show_progress_bar": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
def test_options(both, method, options):
    theirs, ours = both
    expected = getattr(theirs, method)(SENTENCES, **options)
    assert_close(getattr(ours, method)(SENTENCES, **options), expected, DEEP)


def test_one_sentence(both):
    theirs, ours = both
    expected = theirs.encode(SENTENCES[0], truncate_dim=8, normalize_embeddings=True)
    assert_close(ours.encode(SENTENCES[0], truncate_dim=8, normalize_embeddings=True), expected, DEEP)
    assert_close(ours.encode_query(SENTENCES[1]), theirs.encode_query(SENTENCES[1]), DEEP)


@pytest.mark.parametrize("method", ["encode", "encode_query", "encode_document"])
@pytest.mark.parametrize("given", [("query",), (None, "a guitar "), ("query", None, 2, False)], ids=str)
def test_options_by_position(both, method, given):
    """In the order of sentence-transformers."""
    theirs, ours = both
    expected = getattr(theirs, method)(SENTENCES, *given)
    assert_close(getattr(ours, method)(SENTENCES, *given), expected, DEEP)


def test_truncation_as_an_attribute(both):
    theirs, ours = both
    try:
        ours.truncate_dim = 5
        assert ours.get_embedding_dimension() == 5
        assert_close(ours.encode(SENTENCES), theirs.encode(SENTENCES, truncate_dim=5), DEEP)
        with ours.truncate_embeddings(3), theirs.truncate_embeddings(3):
            assert_close(ours.encode(SENTENCES), theirs.encode(SENTENCES), DEEP)
        assert ours.truncate_dim == 5
    finally:
        ours.truncate_dim = None


def test_token_embeddings(both):
    theirs, ours = both
    expected = theirs.encode(SENTENCES, output_value="token_embeddings", prompt_name="query")
    found = ours.encode(SENTENCES, output_value="token_embeddings", prompt_name="query")
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == tuple(b.shape)
        assert_close(a, b.numpy(), DEEP)
    one = ours.encode(SENTENCES[2], output_value="token_embeddings")
    assert_close(one, theirs.encode(SENTENCES[2], output_value="token_embeddings").numpy(), DEEP)


@pytest.mark.parametrize("precision", ["binary", "ubinary", "int8", "uint8"])
def test_precision(both, precision):
    """Bits and steps may differ where a value lies on a border: in less than one of a hundred."""
    theirs, ours = both
    found, expected = (model.encode(SENTENCES, precision=precision) for model in (ours, theirs))
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert np.mean(found != expected) < 0.01


@pytest.mark.parametrize("measure", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarity(both, measure):
    theirs, ours = both
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 5, 16)).astype(np.float32)
    try:
        theirs.similarity_fn_name = ours.similarity_fn_name = measure
        assert_close(ours.similarity(a, b[:3]), theirs.similarity(a, b[:3]).numpy(), 1e-6)
        assert_close(ours.similarity_pairwise(a, b), theirs.similarity_pairwise(a, b).numpy(), 1e-6)
        assert_close(ours.similarity(a[0], b), theirs.similarity(a[0], b).numpy(), 1e-6)
        one = ours.similarity_pairwise(a[0], b[0])
        assert one.shape == () and abs(one - theirs.similarity_pairwise(a[:1], b[:1]).item()) < 1e-5
    finally:
        theirs.similarity_fn_name = ours.similarity_fn_name = "cosine"


def test_tokens(both):
    theirs, ours = both
    found, expected = ours.tokenize(SENTENCES), theirs.preprocess(SENTENCES)
    for name in ("input_ids", "attention_mask"):
        np.testing.assert_array_equal(found[name], expected[name].numpy())


def test_length(tmp_path):
    """Where version 6 writes it, and set afterwards; a list and one sentence."""
    theirs = write(tmp_path)
    ours = Encoder.from_pretrained(tmp_path / "model")
    long = sentences(4, longest=60, seed=9)
    assert ours.max_seq_length == theirs.max_seq_length == 24
    assert_close(ours.encode(long), theirs.encode(long), DEEP)
    ours.max_seq_length = theirs.max_seq_length = 7
    assert_close(ours.encode(long), theirs.encode(long), DEEP)
    assert_close(ours.encode(long[0]), theirs.encode(long[0]), DEEP)
    with pytest.raises(ValueError, match="max_length=41; expected 2 to 40"):
        ours.max_seq_length = 41


def test_kinds_of_results(both):
    _, ours = both
    expected = ours.encode(SENTENCES)
    tensor = ours.encode(SENTENCES, convert_to_tensor=True)
    rows = ours.encode(SENTENCES, convert_to_numpy=False)
    assert isinstance(tensor, jax.Array) and isinstance(rows, list) and isinstance(rows[0], jax.Array)
    np.testing.assert_array_equal(tensor, expected)
    np.testing.assert_array_equal(np.stack(rows), expected)
    assert ours.encode("a man", convert_to_tensor=True).shape == (32,)
    assert ours.encode([], truncate_dim=3).shape == (0, 3)
    states = ours.encode(SENTENCES, output_value="token_embeddings", convert_to_tensor=True)
    assert isinstance(states, list) and all(isinstance(state, jax.Array) for state in states)
    for device in ("cpu", "cpu:0", jax.devices("cpu")[0], ["cpu"]):
        on_device = ours.encode(SENTENCES, device=device)
        if ON_GPU:  # `expected` is the GPU's
            assert_close(on_device, expected, DEEP)
        else:
            np.testing.assert_array_equal(on_device, expected)
    assert "BertConfig" not in repr(ours) and "MiniLMConfig(vocab_size=40" in repr(ours)
    assert "max_seq_length=24" in repr(ours) and "passage" in repr(ours)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"prompt_name": "title"}, ValueError, "there is no prompt 'title'; expected one of .*'query'"),
        ({"truncate_dim": 0}, ValueError, "truncate_dim=0; expected at least 1"),
        ({"truncate_dim": "8"}, TypeError, "str"),
        ({"batch_size": "32"}, TypeError, "str"),
        ({"precision": "int4"}, ValueError, "precision='int4' is unknown"),
        ({"output_value": "tokens"}, ValueError, "output_value='tokens' and precision='float32'; expected"),
        ({"output_value": "token_embeddings", "precision": "int8"}, ValueError, "precision='int8'; expected"),
        ({"device": "cpu:99"}, ValueError, "device='cpu:99' is not there; expected one of"),
        ({"device": "fpga"}, ValueError, "device='fpga' is not there"),
        ({"device": []}, ValueError, r"expected a list of one device or more"),
        ({"sentences": None}, TypeError, "sentences is of type NoneType; expected an iterable of str"),
        ({"sentences": 3}, TypeError, "sentences is of type int; expected"),
        ({"sentences": b"a man"}, TypeError, "sentences is of type bytes; expected"),
        ({"sentences": np.array("a man")}, TypeError, "sentences is of type ndarray; expected"),
    ],
)
def test_arguments_are_checked(both, options, error, message):
    with pytest.raises(error, match=message):
        both[1].encode(**{"sentences": SENTENCES} | options)


# What cannot be run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path)


@pytest.mark.parametrize(
    "listed, message",
    [
        (["Transformer"], "lists no Pooling"),
        (["Pooling"], "lists Pooling here; expected a Transformer, a Pooling, then any of Dense and Normalize"),
        (["Transformer", "Pooling", "LSTM"], "lists LSTM here"),
        (["Transformer", "Dense", "Pooling"], "lists Dense here"),
        (["Transformer", "Pooling", "Pooling"], "lists Pooling here"),
        (["CLIPModel"], "lists CLIPModel here"),
    ],
)
def test_modules_that_are_not_run(folder, listed, message):
    (folder / "modules.json").write_text(json.dumps(checkpoints.modules(*listed)))
    with pytest.raises(NotImplementedError, match=message) as error:
        Encoder.from_pretrained(folder)
    assert str(folder / "modules.json") in str(error.value)


@pytest.mark.parametrize(
    "file, content, error, message",
    [
        (
            "1_Pooling/config.json",
            {"pooling_mode": "attention"},
            NotImplementedError,
            "pooling_mode is .'attention'",
        ),
        ("1_Pooling/config.json", {"include_prompt": False}, NotImplementedError, "include_prompt is False"),
        ("modules.json", {}, ValueError, "a JSON dict; expected an array"),
        ("modules.json", [3], ValueError, "lists 3; expected an object with type and path"),
        (
            "modules.json",
            [{"type": "custom.Model", "path": ""}],
            NotImplementedError,
            "no module of sentence-trans",
        ),
        (
            "modules.json",
            [{"type": "sentence_transformers.models.Transformer", "path": "../x"}],
            ValueError,
            "names the folder '../x'; expected one inside",
        ),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, NotImplementedError, "is 'fill-mask'"),
        (
            "sentence_bert_config.json",
            {"max_seq_length": 1},
            ValueError,
            "max_seq_length is 1; expected an integer",
        ),
        ("tokenizer_config.json", {"model_max_length": "long"}, ValueError, "model_max_length is 'long'"),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, ValueError, "prompts is"),
        (
            "config_sentence_transformers.json",
            {"default_prompt_name": "a"},
            ValueError,
            "default_prompt_name is 'a'",
        ),
        ("config_sentence_transformers.json", {"similarity_fn_name": "maxsim"}, NotImplementedError, "'maxsim'"),
        ("config_sentence_transformers.json", {"model_type": "CrossEncoder"}, NotImplementedError, "CrossEncoder"),
    ],
)
def test_files_that_ask_for_what_is_not_run(folder, file, content, error, message):
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(error, match=message) as raised:
        Encoder.from_pretrained(folder)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"activation_function": "my.Activation"},
            NotImplementedError,
            "is 'my.Activation'; expected a class of torch.nn",
        ),
        ({"activation_function": "torch.nn.Mish"}, NotImplementedError, "is 'torch.nn.Mish'"),
        (
            {"module_input_name": "token_embeddings"},
            NotImplementedError,
            "module_input_name is 'token_embeddings'",
        ),
        ({"in_features": "64"}, ValueError, "in_features is '64'; expected a positive integer"),
        ({"bias": 1}, ValueError, "bias is 1; expected true or false"),
        ({"out_features": 9}, ValueError, r"misshapen   linear.weight \(8, 64\); expected \(9, 64\)"),
        ({"bias": False}, ValueError, r"unexpected  linear.bias \(8,\)"),
    ],
)
def test_a_dense_layer_that_is_not_run(folder, change, error, message):
    from safetensors.numpy import save_file

    place = folder / "2_Dense"
    place.mkdir()
    save_file(
        {"linear.weight": np.ones((8, 64), np.float32), "linear.bias": np.ones(8, np.float32)},
        place / "model.safetensors",
    )
    stated = {"in_features": 64, "out_features": 8, "activation_function": "torch.nn.modules.activation.Tanh"}
    (place / "config.json").write_text(json.dumps(stated))
    (folder / "modules.json").write_text(json.dumps(checkpoints.modules("Transformer", "Pooling", "Dense")))
    assert Encoder.from_pretrained(folder).encode("a man").shape == (8,)
    (place / "config.json").write_text(json.dumps(stated | change))
    with pytest.raises(error, match=message):
        Encoder.from_pretrained(folder)


def test_a_transformer_in_a_folder_of_its_own(tmp_path):
    """As the first versions of sentence-transformers wrote it."""
    expected = Encoder.from_pretrained(checkpoints.write(tmp_path / "flat")).encode(SENTENCES[:2])
    checkpoints.write(tmp_path / "deep" / "0_Transformer")
    (tmp_path / "deep" / "0_Transformer" / "modules.json").rename(tmp_path / "deep" / "modules.json")
    (tmp_path / "deep" / "0_Transformer" / "1_Pooling").rename(tmp_path / "deep" / "1_Pooling")
    listed = checkpoints.modules("Transformer", "Pooling", "Normalize")
    listed[0]["path"] = "0_Transformer"
    (tmp_path / "deep" / "modules.json").write_text(json.dumps(listed))
    np.testing.assert_array_equal(Encoder.from_pretrained(tmp_path / "deep").encode(SENTENCES[:2]), expected)


def test_a_converted_folder_keeps_its_modules(tmp_path):
    from weights.__main__ import main

    theirs = write(tmp_path, "distilbert", "cls", dense(32, 8), prompts=PROMPTS)
    assert main(["distilbert", str(tmp_path / "model"), str(tmp_path / "converted")]) == 0
    ours = Encoder.from_pretrained(tmp_path / "converted")
    assert_close(ours.encode_query(SENTENCES), theirs.encode_query(SENTENCES), DEEP)
    assert weights.load_config(tmp_path / "converted") == ours.config
