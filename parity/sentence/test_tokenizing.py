"""Texts to token ids: processes give what this one gives, and what becomes of one that ends."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers

import weights
from pallas_models.minilm import Encoder
from pallas_models.sentence import pipeline, tokenizer_process, tokenizing
from parity import ROOT
from parity.weights import checkpoints
from parity.weights.checkpoints import needs_real_weights as needs_real

LIMIT = 9
SENTENCES = [
    "",
    "a man",
    "a man cuts an onion and a woman the guitar " * 3,
    "文字 \0 [MASK] é\n",
    *checkpoints.WORDS,
] * 5


def here(sentences: list[str]) -> tokenizing.Tokens:
    tokenizer = checkpoints.word_tokenizer()
    tokenizer.enable_truncation(LIMIT)
    return tokenizing.tokens(lambda texts: [e.ids for e in tokenizer.encode_batch_fast(texts)], sentences)


def assert_same(found: tokenizing.Tokens, expected: tokenizing.Tokens) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype


@pytest.fixture(scope="module")
def processes() -> Iterator[tokenizing.Processes]:
    yield tokenizing.Processes(checkpoints.word_tokenizer(), 2)


def free(processes: tokenizing.Processes, count: int) -> list[tokenizing._Process]:
    """The processes, of which there are so many, once they are up; none has anything to do."""
    processes.start()
    places = [processes._free.get(timeout=60) for _ in range(count * tokenizing._ASKED)]
    for process in places:
        processes._free.put(process)
    found = list(dict.fromkeys(places))
    assert len(found) == count
    return found


def test_processes_give_what_this_one_gives(processes):
    class Text(str):
        def __str__(self) -> str:
            return "another"

    pieces = [SENTENCES, SENTENCES[::-1], [], [""], [Text("a man"), np.str_("a woman")]] * 4
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda piece: processes(piece, LIMIT), pieces))
    assert len(free(processes, 2)) == 2
    for one, piece in zip(found, pieces, strict=True):
        assert_same(one, here(piece))
    assert processes(SENTENCES, 4).lengths.max() == 4


def test_errors_of_a_process_are_raised_here(processes):
    with pytest.raises(TypeError, match="descriptor '__str__'"):
        processes([3], LIMIT)
    with pytest.raises(OverflowError, match="negative int"):
        processes(["a man"], -1)
    assert_same(processes(["a man"], LIMIT), here(["a man"]))


def test_a_process_that_ends_is_replaced(processes):
    for process in free(processes, 2):
        os.kill(process.pid, signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(ChildProcessError, match="a process that tokenizes ended with exit code -9"):
            processes(SENTENCES, LIMIT)
    assert_same(processes(SENTENCES, LIMIT), here(SENTENCES))
    assert len(free(processes, 2)) == 2


def test_a_process_that_does_not_start_is_an_error_and_another_is_tried(monkeypatch):
    """Also for those that wait for it, of which there are more than processes."""
    processes = tokenizing.Processes(checkpoints.word_tokenizer(), 1)
    with monkeypatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(sys, "executable", "/nowhere/python")
        for call in [pool.submit(processes, SENTENCES, LIMIT) for _ in range(3)]:
            with pytest.raises(FileNotFoundError, match="/nowhere/python"):
                call.result(60)
        while processes._free.empty():  # until the last that was tried has failed as well
            time.sleep(0.01)
    with pytest.raises(FileNotFoundError):
        processes(SENTENCES, LIMIT)
    assert_same(processes(SENTENCES, LIMIT), here(SENTENCES))


def test_processes_start_at_once_and_whoever_is_up_works(monkeypatch):
    """All begin to start before one is up, and one that takes long keeps nobody."""
    begun, slow = threading.Barrier(3, timeout=60), threading.Event()
    up = itertools.count()
    start = tokenizing._Process.__init__

    def starts(self, tokenizer):
        begun.wait()  # breaks unless three are here
        if next(up) == 1:
            assert slow.wait(60)
        start(self, tokenizer)

    monkeypatch.setattr(tokenizing._Process, "__init__", starts)
    processes = tokenizing.Processes(checkpoints.word_tokenizer(), 3)
    processes.start()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda piece: processes(piece, LIMIT), [SENTENCES] * 20))
    for one in found:
        assert_same(one, here(SENTENCES))
    slow.set()
    free(processes, 3)


def tokenizer_of(kind: str) -> tokenizers.Tokenizer:
    tokenizer = checkpoints.word_tokenizer()
    if kind == "cased":
        tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=False)
    elif kind == "BERT's older template":
        tokenizer.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    elif kind == "added":
        added = tokenizers.AddedToken
        tokenizer.add_special_tokens(["[MASK]", added("<s>", lstrip=True)])
        tokenizer.add_tokens([added("Éa", normalized=True), added("GU", normalized=False), "zz man"])
    elif kind == "no template":
        tokenizer.post_processor = None
    elif kind == "padding":
        tokenizer.enable_padding(length=7)
    elif kind == "other words":
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    elif kind == "other normalizer":
        lower = tokenizers.normalizers.Lowercase()
        tokenizer.normalizer = tokenizers.normalizers.Sequence([lower, tokenizers.normalizers.Strip()])
    elif kind == "of the real model":
        tokenizer = tokenizers.Tokenizer.from_file(str(weights.resolve() / "tokenizer.json"))
        tokenizer.no_padding()
    return tokenizer


PLAIN = ("uncased", "cased", "BERT's older template", "added", pytest.param("of the real model", marks=needs_real))
OTHERS = ("no template", "padding", "other words", "other normalizer")


@pytest.mark.parametrize("kind", [*PLAIN, *OTHERS])
def test_ids_by_words_are_those_of_the_tokenizer(kind):
    """For texts with and without what makes them plain, each with a limit after another."""
    rng, printable = random.Random(1), [chr(code) for code in range(0x20, 0x7F)]
    known = [*checkpoints.WORDS, "Man", "GUITAR", "GU", "zz man", "éa", "ÉA", "[MASK]", "[mask]", "<s>", "x" * 101]
    rare = [*"\t\n\r\0\v\x1f\x7f\xa0\u200bé文İ\u017f\u212a", "e\u0301"]
    parts = [printable, [" "], known, [f" {word} " for word in known]]
    texts = [
        "".join(rng.choice(rng.choice([*parts, rare][: 4 + i % 2])) for _ in range(i % 30)) for i in range(600)
    ]
    tokenizer, expected = tokenizer_of(kind), tokenizer_of(kind)
    tokenizer.no_truncation()
    words = tokenizer_process.Words(tokenizer)
    for limit in (2, 3, 300, 9, 1):
        expected.enable_truncation(limit)
        found = tokenizer_process.encode(tokenizer, words, texts, limit)
        assert found == [encoding.ids for encoding in expected.encode_batch(texts)]
    plain = [text for text in texts if words.ids(text, 9) is not None]
    assert len(set(plain)) > 30 if kind not in OTHERS else not plain


def test_few_words_are_kept(monkeypatch):
    tokenizer = checkpoints.word_tokenizer()
    words = tokenizer_process.Words(tokenizer)
    monkeypatch.setattr(tokenizer_process, "_MOST_WORDS", 2)
    assert words.ids("the man cuts an onion", 9) == [2, 8, 5, 11, 12, 13, 3]
    assert list(words) == ["the", "man"]
    assert words.ids("x" * 100 + " man", 9) == [2, 1, 5, 3]
    assert list(words) == ["the", "man"]


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


PROGRAM = """
import os, signal
from pallas_models.sentence import tokenizing
from parity.weights.checkpoints import word_tokenizer
processes = tokenizing.Processes(word_tokenizer(), 1)
processes(["a man"], 9)
process = processes._free.get()
process._send((["a man"] * 10000, 9))  # whose answer finds nobody
print(process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_processes_end_with_the_one_that_asks():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    deadline = time.monotonic() + 30
    while is_there(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_there(int(done.stdout))


def test_an_encoder_tokenizes_long_streams_in_processes(tmp_path, monkeypatch):
    """And the same embeddings come of it; its processes end with it."""
    folder = checkpoints.write(tmp_path / "checkpoint", max_length=20)
    sentences = SENTENCES * 3
    expected = Encoder.from_pretrained(folder).encode(sentences)
    encoder = Encoder.from_pretrained(folder)  # that has not asked yet how many processes it may start
    asked: list[int] = []
    ask = tokenizing.Processes.__call__

    def asks(self, texts, limit):
        asked.append(len(texts))
        return ask(self, texts, limit)

    monkeypatch.setattr(tokenizing.Processes, "__call__", asks)
    monkeypatch.setattr(tokenizing, "count", lambda *_: 2)
    for name, value in dict(_FEW=0, _PIECE=7, MANY=40, CHUNK=20).items():
        monkeypatch.setattr(pipeline, name, value)
    np.testing.assert_allclose(encoder.encode(sentences), expected, atol=1e-6)
    assert sum(asked) == len(sentences) - 40
    started = [process.pid for process in free(encoder._processes, 2)]
    assert all(map(is_there, started))
    del encoder
    gc.collect()
    assert not any(map(is_there, started))


def test_how_many(monkeypatch):
    monkeypatch.setattr(tokenizing, "cores", lambda: 16)
    assert tokenizing.count("gpu") == 15
    assert tokenizing.count("cpu") == 0  # it has no cores to spare
    monkeypatch.setattr(tokenizing, "cores", lambda: 100)
    assert [tokenizing.count("gpu", devices) for devices in (1, 2, 8)] == [32, 64, 99]
    monkeypatch.setattr(tokenizing, "cores", lambda: 3)
    assert tokenizing.count("gpu") == 0
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setattr(tokenizing, "cores", lambda: 16)
    assert tokenizing.count("gpu") == 0
