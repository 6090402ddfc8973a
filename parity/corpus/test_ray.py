"""On a Ray cluster: actors that embed batches, and files to files while a worker is killed."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pallas_models.corpus.embedder import Embedder, EmbedderOptions
from pallas_models.corpus.job import Layout
from pallas_models.corpus.manifest import Shard
from pallas_models.corpus.reading import Corpus
from pallas_models.corpus.writing import convert
from pallas_models.minilm import Encoder
from pallas_models.ray import Embed, _EmbedFile
from parity import ROOT
from parity.weights import checkpoints

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
SENTENCES = [*(" ".join(checkpoints.WORDS[i % 7 : i % 13]) for i in range(59)), "the guitar"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.write(tmp_path / "checkpoint")


def test_batches(folder):
    """An actor's class without a cluster: what it adds to a batch, in each dtype."""
    expected = Encoder.from_pretrained(folder).encode(SENTENCES)[:, :16]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    batch = {"id": np.arange(60), "text": np.array(SENTENCES, object)}
    for dtype, ranges in (("float32", None), ("int8", [[-0.5] * 16, [0.5] * 16]), ("ubinary", None)):
        embed = Embed("text", output_column="e", dtype=dtype, ranges=ranges, model=str(folder), truncate_dim=16)
        found = embed(batch)
        assert list(found) == ["id", "text", "e"] and list(batch) == ["id", "text"]
        np.testing.assert_array_equal(found["id"], batch["id"])
        np.testing.assert_array_equal(found["e"], convert(expected, dtype, ranges))


def test_options_are_the_fields_of_an_embedder():
    assert EmbedderOptions.__annotations__ == {field.name: field.type for field in dataclasses.fields(Embedder)}


def test_a_worker_keeps_a_column(folder, tmp_path):
    """What a worker does with a file, without a cluster: again, once it is embedded, and with another column."""
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.csv").write_text("id,text\n7,a man\n8,the guitar\n")
    given = Corpus([tmp_path / "a.csv"], "text"), Embedder(model=str(folder)), tmp_path
    row = {"path": str(tmp_path / "a.csv"), "name": "000000.parquet"}
    layout = Layout("float32", "parquet", None, "id")
    done = _EmbedFile(*given, {}, None, layout)(row)
    assert done["error"] is None
    assert parquet.read_table(tmp_path / "000000.parquet")["id"].to_pylist() == ["7", "8"]
    embedded = {row["name"]: Shard(**done["shard"])}
    assert _EmbedFile(*given, embedded, None, layout)(row) == done
    other = dataclasses.replace(layout, keep="text")
    assert "was made from other sentences" in _EmbedFile(*given, embedded, None, other)(row)["error"]


def test_refused(folder):
    with pytest.raises(ValueError, match="dtype='uint8' needs ranges that all workers share"):
        Embed("text", dtype="uint8", model=str(folder))
    with pytest.raises(ValueError, match="a batch has the columns text; expected 'body' among them"):
        Embed("body", model=str(folder))({"text": np.array(["a"], object)})


# The second half of this sentence's file or batch is never reached by the worker that comes first.
FATAL = "the guitar"
PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy as np
import ray
from pallas_models import __main__ as cli
from pallas_models.corpus import command as work
from pallas_models.corpus.embedder import Embedder
from pallas_models.corpus.reading import Corpus
from pallas_models.ray import Embed

folder, checkpoint, fatal = sys.argv[1:]
marker = folder + "/killed"

def end_once(sentence):
    if sentence == fatal and not os.path.exists(marker):
        os.mkdir(marker)
        os.kill(os.getpid(), signal.SIGKILL)
    return sentence

class EmbedderThatEnds(Embedder):
    def __call__(self, chunks):
        return super().__call__([end_once(sentence) for sentence in chunk] for chunk in chunks)

class EmbedThatEnds(Embed):
    def __call__(self, batch):
        return super().__call__({name: list(map(end_once, column)) for name, column in batch.items()})

ray.init(num_cpus=2, include_dashboard=False)
work.Embedder = EmbedderThatEnds
command = ["embed", folder + "/in", "--column", "text", "--output", folder + "/out/", "--format", "npy"]
assert cli.main([*command, "--model", checkpoint, "--ray", "--workers", "2"]) == 0
os.rmdir(marker)  # it is there: a worker ended

sentences = Corpus([folder + "/in"], "text")
rows = ray.data.from_items([{"text": sentence} for sentence in sentences], override_num_blocks=6).map_batches(
    EmbedThatEnds,
    fn_constructor_kwargs={"column": "text", "model": checkpoint},
    compute=ray.data.ActorPoolStrategy(size=1),
    batch_size=5,
).take_all()
os.rmdir(marker)
np.save(folder + "/embeddings.npy", [row["embedding"] for row in rows])
Path(folder, "sentences.txt").write_text("".join(row["text"] + "\\n" for row in rows))
"""


@needs_ray
def test_a_worker_that_is_killed_loses_nothing_and_doubles_nothing(folder, tmp_path):
    parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    (tmp_path / "in").mkdir()
    files = {f"{name}.parquet": SENTENCES[i::6] for i, name in enumerate("fedcba")}
    for name, sentences in files.items():
        parquet.write_table(pa.table({"id": range(len(sentences)), "text": sentences}), tmp_path / "in" / name)
    program = [sys.executable, "-c", PROGRAM, tmp_path, folder, FATAL]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    encoder = Encoder.from_pretrained(folder)
    held = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert held["complete"] and [shard["file"] for shard in held["shards"]] == [f"{i:06d}.npy" for i in range(6)]
    for shard, name in zip(held["shards"], sorted(files), strict=True):
        found = np.load(tmp_path / "out" / shard["file"])
        np.testing.assert_array_equal(found, np.concatenate(list(encoder.encode_iter(files[name]))))
    sentences = (tmp_path / "sentences.txt").read_text().split("\n")[:-1]
    assert sorted(sentences) == sorted(SENTENCES)
    expected = encoder.encode(sentences)
    # Other batches, other rounding. Sentences here that differ have similarities of 0.9985 at most.
    assert np.all(np.sum(np.load(tmp_path / "embeddings.npy") * expected, axis=1) > 1 - 1e-6)
