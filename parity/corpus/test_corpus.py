"""Embeddings in files: their formats, and folders that are continued as if nobody had stopped them."""

import collections
import contextlib
import functools
import json
import operator
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from pallas_models import files
from pallas_models.corpus import job, manifest, writing
from pallas_models.corpus.job import Layout
from pallas_models.corpus.manifest import Manifest
from pallas_models.corpus.writing import DTYPES, RANGED, convert
from pallas_models.sentence import pipeline
from pallas_models.sentence.quantization import ranges_of

SENTENCES = [f"sentence {i}" * (i % 3) for i in range(23)]
DIMENSION = 16
LAYOUT = Layout("float32", "npy", 5)


class Encode:
    """Stands for an encoder: a row depends on who shares its chunk, as the last bits of a real one do."""

    def __init__(self) -> None:
        self.sentences = 0

    def __call__(self, chunks: Iterable[list[str]]) -> Iterator[np.ndarray]:
        for chunk in ahead(chunks, 2):
            self.sentences += len(chunk)
            seeds = ([*map(len, chunk), i, *sentence.encode()] for i, sentence in enumerate(chunk))
            yield np.stack([np.random.default_rng(s).normal(size=DIMENSION) for s in seeds]).astype(np.float32)


def ahead(chunks: Iterable[list[str]], count: int) -> Iterator[list[str]]:
    """The chunks, each given back after `count` more were taken, as an encoder does that is busy."""
    waiting: collections.deque[list[str]] = collections.deque()
    for chunk in chunks:
        waiting.append(chunk)
        if len(waiting) > count:
            yield waiting.popleft()
    yield from waiting


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK", 3)


def planned(**settings: object) -> Manifest:
    return Manifest({"name": "a", "files": {"model.safetensors": "5f"}}, {"dtype": "float32", **settings})


def run(
    folder: Path,
    layout: Layout = LAYOUT,
    sentences: Iterable[str] = SENTENCES,
    plan: Manifest | None = None,
) -> Encode:
    encode = Encode()
    with job.begin(folder, plan or planned()) as begun:
        job.embed_to_folder(sentences, encode, folder, begun, layout)
    return encode


def embeddings_of(shard: list[str]) -> np.ndarray:
    return np.concatenate(list(Encode()(pipeline.chunks(shard, pipeline.CHUNK))))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load(path: Path) -> np.ndarray:
    if path.suffix == ".safetensors":
        from safetensors.numpy import load_file

        return load_file(path)["embeddings"]
    if path.suffix == ".parquet":
        column = pytest.importorskip("pyarrow.parquet").read_table(path)["embedding"].combine_chunks()
        return np.asarray(column.values).reshape(len(column), column.type.list_size)
    array = np.load(path)
    return array["embeddings"] if path.suffix == ".npz" else array


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", writing.FORMATS)
def test_formats(tmp_path, monkeypatch, format, dtype, count):
    """What is read back is what was written; the same bytes each time, in one part or in two."""
    monkeypatch.setattr(writing, "_ROW_GROUP", 2)
    if format == "parquet":
        pytest.importorskip("pyarrow")
    embeddings = np.random.default_rng(0).normal(size=(count, DIMENSION)).astype(np.float32)
    embeddings = convert(embeddings, dtype)
    divided = {"a": [embeddings], "b": [embeddings], "c": [embeddings[:2], embeddings[2:]][: max(count, 1)]}
    digests = {writing.write(tmp_path / f"{name}.{format}", parts, format) for name, parts in divided.items()}
    found = load(tmp_path / f"a.{format}")
    assert found.dtype == embeddings.dtype and len(digests) == 1
    np.testing.assert_array_equal(found, embeddings)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards(tmp_path, dtype):
    layout = Layout(dtype, "npy", 5)
    run(tmp_path / "out", layout)
    shards = [embeddings_of(SENTENCES[i : i + 5]) for i in range(0, 23, 5)]
    ranges = ranges_of(shards[0])
    held = manifest.read(tmp_path / "out")
    assert held.complete and held.sentences == 23 and held.dimension == DIMENSION
    assert held.ranges == (ranges.tolist() if dtype in RANGED else None)
    assert [shard.file for shard in held.shards] == [f"{i:06d}.npy" for i in range(5)]
    for shard, expected in zip(held.shards, shards, strict=True):
        found = np.load(tmp_path / "out" / shard.file)
        np.testing.assert_array_equal(found, convert(expected, dtype, ranges))
        assert shard.sentences == len(expected) and (tmp_path / "out" / shard.file).stat().st_size == shard.bytes
        assert writing.write(tmp_path / "again", [found], "npy") == shard.sha256


@pytest.mark.parametrize("count, sizes", [(0, []), (4, [4]), (5, [5]), (6, [5, 1]), (10, [5, 5])])
def test_sizes_of_shards(tmp_path, count, sizes):
    run(tmp_path / "out", sentences=SENTENCES[:count])
    held = manifest.read(tmp_path / "out")
    assert [shard.sentences for shard in held.shards] == sizes and held.complete
    assert run(tmp_path / "out", sentences=SENTENCES[:count]).sentences == 0


class Killed(BaseException):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> None:
    """Ends a run after moment // 2 files, before the next one is written (even moments) or just after it (odd)."""
    replacing, written = files.replacing, 0

    @contextlib.contextmanager
    def interrupted(path, **options):
        nonlocal written
        written += 1
        if 2 * (written - 1) >= moment:
            raise Killed
        with replacing(path, **options) as file:
            yield file
        if 2 * (written - 1) + 1 >= moment:
            raise Killed

    monkeypatch.setattr(files, "replacing", interrupted)


@pytest.mark.parametrize("dtype, writers", [("float32", 1), ("int8", 3)])
def test_stopped_at_any_file_it_continues_to_the_same_bytes(tmp_path, monkeypatch, dtype, writers):
    monkeypatch.setattr(job, "_WRITERS", writers)
    layout = Layout(dtype, "npy", 5)
    run(tmp_path / "whole", layout)
    writes = 1 + 2 * 5 + 1  # manifest; each shard and the manifest; manifest
    embedded = set()
    for moment in range(2 * writes):
        folder = tmp_path / str(moment)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, moment)
            with pytest.raises(Killed):
                run(folder, layout)
        embedded.add(run(folder, layout).sentences)
        assert contents(folder) == contents(tmp_path / "whole")
    if writers == 1:
        assert embedded == {23, 18, 13, 8, 3, 0}  # what was listed is not embedded again
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, 2 * writes)
        run(tmp_path / "end", layout)


def test_a_shard_that_is_lost_is_made_again(tmp_path):
    layout = Layout("uint8", "npy", 5)
    run(tmp_path, layout)
    whole = contents(tmp_path)
    (tmp_path / "000000.npy").unlink()
    (tmp_path / "000002.npy").write_bytes(whole["000002.npy"][:-1])
    with job.begin(tmp_path, planned()) as begun:
        assert not begun.complete
    assert run(tmp_path, layout).sentences == 10
    assert contents(tmp_path) == whole


@pytest.mark.parametrize("index", range(5))
def test_a_file_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch, index):
    def full(path, parts, format, beside):
        if path.name == f"{index:06d}.npy":
            raise OSError("no space left")
        return write(path, parts, format, beside)

    write = writing.write
    monkeypatch.setattr(writing, "write", full)
    with pytest.raises(OSError, match="no space left"):
        run(tmp_path)
    held = manifest.read(tmp_path)
    listed = [shard.file for shard in held.shards]
    assert f"{index:06d}.npy" not in listed and listed[:index] == [f"{i:06d}.npy" for i in range(index)]
    assert not held.complete


def test_an_error_keeps_what_was_written(tmp_path):
    def failing() -> Iterator[str]:
        yield from SENTENCES[:17]
        raise ValueError("line 18 is not UTF-8")

    with pytest.raises(ValueError, match="line 18"):
        run(tmp_path / "out", sentences=failing())
    assert not manifest.read(tmp_path / "out").complete
    assert run(tmp_path / "out").sentences == 23 - 15


@pytest.mark.parametrize(
    "others",
    [
        SENTENCES[:22],
        [*SENTENCES, "one more"],
        [],
        SENTENCES[:5],
        [*SENTENCES[:7], "another", *SENTENCES[8:]],
        SENTENCES[::-1],
        # The same letters, divided otherwise.
        [SENTENCES[0], SENTENCES[1] + SENTENCES[2][:1], SENTENCES[2][1:], *SENTENCES[3:]],
    ],
)
def test_other_sentences_are_refused(tmp_path, others):
    run(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"\.npy was made from other sentences than those given now"):
        run(tmp_path, sentences=others)
    assert contents(tmp_path) == before


def test_another_model_or_other_settings_are_refused(tmp_path):
    plan = planned(shard_size=5)
    plan.environment = {"jax": "0.11"}
    run(tmp_path, plan=plan)
    model, dtype, jax, ranges = (planned(shard_size=5) for _ in range(4))
    for other in (model, dtype, jax, ranges):
        other.environment = dict(plan.environment)
    model.model = {"name": "a", "files": {"model.safetensors": "60"}}
    dtype.settings["dtype"] = "int8"
    jax.environment["jax"] = "0.12"
    ranges.ranges = [[0.0], [1.0]]
    for other, difference in [
        (model, "model.safetensors was '5f' and is now '60'"),
        (dtype, "dtype was 'float32' and is now 'int8'"),
        (jax, "jax was '0.11' and is now '0.12'"),
        (ranges, "its ranges are others"),
    ]:
        with pytest.raises(ValueError, match=f"was begun otherwise: {difference}"):
            run(tmp_path, plan=other)
    renamed = planned(shard_size=5)
    renamed.model["name"], renamed.environment = "elsewhere/a", plan.environment
    assert run(tmp_path, plan=renamed).sentences == 0


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"holds files and no manifest\.json"):
        run(tmp_path)
    for broken in ("", "[]", "{}", "5", "[" * 100_000, json.dumps({"shards": [{}]}), '{"shards": 5}'):
        (tmp_path / "manifest.json").write_text(broken)
        with pytest.raises(ValueError, match=r"manifest\.json is no manifest"):
            run(tmp_path)
    with pytest.raises(OSError, match="absent"):
        run(tmp_path / "absent" / "out")


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("", [], "it is [] of type list; expected an object"),
        ("model", 5, "model is 5 of type int; expected an object"),
        ("model files", ["a"], "model.files is ['a'] of type list; expected an object of strings"),
        ("model files", None, "model.files is None of type NoneType"),
        ("model name", ..., "model.name is missing"),
        ("settings", "float32", "settings is 'float32' of type str; expected an object"),
        ("environment", [], "environment is [] of type list; expected an object"),
        ("ranges", "wide", "ranges is 'wide' of type str; expected null or two lists"),
        ("ranges", [[0.0] * 16], "ranges is "),
        ("ranges", [[0.0] * 16, [1.0] * 15], "ranges is "),
        ("ranges", [[0.0] * 16, [1.0] * 15 + [None]], "ranges is "),
        ("ranges", [[0.0] * 16, [1.0] * 15 + [float("inf")]], "ranges is "),
        ("ranges", [[0.0] * 16, [1.0] * 15 + [float("nan")]], "ranges is "),
        ("ranges", [[0.0] * 16, [1.0] * 15 + [1e30]], "finite and within 65504"),
        ("ranges", [[0.0] * 16, [1.0] * 15 + [-1.0]], "ranges is "),
        ("shards", {}, "shards is {} of type dict; expected a list"),
        ("shards 1", "000001.npy", "shards[1] is '000001.npy' of type str; expected an object"),
        ("shards 1 file", "../secret", "shards[1].file is '../secret' of type str; expected the name of a shard"),
        ("shards 1 file", "000004.npy", "shards has another file after '000004.npy' than one of a later name"),
        ("shards 2 sentences", 2.5, "shards[2].sentences is 2.5 of type float; expected a whole number"),
        ("shards 2 dimension", True, "shards[2].dimension is True of type bool"),
        ("shards 2 bytes", -1, "shards[2].bytes is -1 of type int"),
        ("shards 0 sha256", "abc", "shards[0].sha256 is 'abc' of type str; expected 64 hexadecimal digits"),
        ("shards 0 source", None, "shards[0].source is None"),
        ("shards 0 rows", 5, "shards[0].rows is unknown; expected file, sentences"),
        ("complete", "yes", "complete is 'yes' of type str; expected true or false"),
        ("complete", ..., "complete is missing"),
    ],
)
def test_an_edited_manifest_is_refused_by_the_name_of_its_field(tmp_path, path, value, message):
    run(tmp_path, Layout("int8", "npy", 5))
    content = {"": json.loads((tmp_path / "manifest.json").read_text())}
    *parents, name = ["", *(int(part) if part.isdigit() else part for part in path.split())]
    inner = functools.reduce(operator.getitem, parents, content)
    if value is ...:
        del inner[name]
    else:
        inner[name] = value
    (tmp_path / "manifest.json").write_text(json.dumps(content[""]))
    for use in (run, manifest.read_ranges):
        with pytest.raises(
            ValueError, match=re.escape("manifest.json is no manifest: ") + f".*{re.escape(message)}"
        ) as error:
            use(tmp_path)
        assert "\n" not in str(error.value)


def test_what_is_kept_beside_embeddings_continues_too(tmp_path):
    """To the same bytes; with other texts kept, or another column, it is refused."""
    parquet = pytest.importorskip("pyarrow.parquet")
    layout, ids = Layout("float32", "parquet", 5, "id"), [f"id {i}" for i in range(23)]

    def embed(folder: Path, kept: list[str], sentences: list[str] = SENTENCES) -> None:
        with job.begin(folder, planned(keep=layout.keep)) as begun:
            job.embed_to_folder(sentences, Encode(), folder, begun, layout, kept)

    def failing() -> Iterator[str]:
        yield from SENTENCES[:12]
        raise ValueError("line 13 is not UTF-8")

    embed(tmp_path / "whole", ids)
    with pytest.raises(ValueError, match="line 13"):
        embed(tmp_path / "out", ids, failing())
    embed(tmp_path / "out", ids)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    tables = [parquet.read_table(path) for path in sorted((tmp_path / "out").glob("*.parquet"))]
    assert [text for table in tables for text in table["id"].to_pylist()] == ids
    np.testing.assert_array_equal(load(tmp_path / "out" / "000001.parquet"), embeddings_of(SENTENCES[5:10]))
    with pytest.raises(ValueError, match=r"000001\.parquet was made from other"):
        embed(tmp_path / "out", [*ids[:7], "another", *ids[8:]])
    with pytest.raises(ValueError, match="the column that is kept has 2 rows beside 3 sentences"):
        embed(tmp_path / "new", ids[:22])
    with pytest.raises(ValueError, match="keep was 'id' and is now None"):
        run(tmp_path / "out", layout, plan=planned(keep=None))


def test_what_a_killed_writer_leaves_is_no_obstacle(tmp_path):
    (tmp_path / ".0123456789abcdef.draft").write_bytes(b"half")
    run(tmp_path)
    assert sorted(contents(tmp_path)) == [*(f"{i:06d}.npy" for i in range(5)), "manifest.json"]


def test_given_ranges(tmp_path):
    layout = Layout("uint8", "npy", 5)
    run(tmp_path / "sample", layout, SENTENCES[10:])
    ranges = manifest.read_ranges(tmp_path / "sample")
    plan = planned()
    plan.ranges = ranges
    run(tmp_path / "out", layout, plan=plan)
    expected = convert(embeddings_of(SENTENCES[:5]), "uint8", ranges)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "000000.npy"), expected)
    run(tmp_path / "floats")
    for folder in ("floats", "absent"):
        with pytest.raises(ValueError, match="holds no ranges"):
            manifest.read_ranges(tmp_path / folder)


def test_the_model_is_known_by_its_files(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    for name in ("config.json", "1_Pooling/config.json", ".lock"):
        (tmp_path / name).write_text(name)
    before = manifest.describe_model("a", tmp_path)
    assert list(before["files"]) == ["1_Pooling/config.json", "config.json"]
    (tmp_path / "1_Pooling" / "config.json").write_text("{}")
    after = manifest.describe_model("a", tmp_path)
    assert after["files"]["config.json"] == before["files"]["config.json"] and after != before
    one = manifest.describe_model("a", tmp_path / "config.json")
    assert one["files"] == {"config.json": before["files"]["config.json"]}
