"""The campaigns against files notice what they are made to notice."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from parity.bench import damaged_results, killed_benchmarks
from parity.campaign import checkpoints, files, kills
from parity.campaign._sandbox import Sandbox

LOADER = """
import os, time

CLEAR = (ValueError,)
HELD = []

def warm_up():
    pass

def attempt(request):
    kind = request["kind"]
    if kind == "unsound":
        return "unsound"
    if kind in ("refused", "refused without a name"):
        raise ValueError("/a/file is cut short" if kind == "refused" else "cut short")
    if kind == "another error":
        raise KeyError("a")
    if kind == "hangs":
        while True:
            pass
    if kind == "waits":
        time.sleep({"a while": 1, "for ever": 600}[request["long"]])
    if kind == "dies":
        os.abort()
    if kind == "eats":
        HELD.append(bytearray(b"x") * (200 << 20))
    if kind == "asks for more":
        try:
            bytearray(1 << 45)
        except MemoryError as error:
            raise ValueError("/a/file") from error
"""
ANSWERS = {
    "loads": None,
    "unsound": "unsound",
    "refused": None,
    "refused without a name": "names no file: cut short",
    "another error": "KeyError: 'a'",
    "hangs": "it hangs",
    "dies": "it died with exit code -6",
    "eats": "for 1000 bytes",
    "asks for more": "asked for too much memory",
}


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "loader_for_the_sandbox.py").write_text(LOADER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder))
        sandbox = Sandbox("loader_for_the_sandbox")
        yield sandbox
        sandbox.close()


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_a_sandbox_says(sandbox, kind):
    for _ in range(2):  # the second time of a process that has taken the place of the first, at times
        request = {"kind": kind, "size": 1000, "named": ["/a/file"]}
        wrong = sandbox.ask(request, timeout=0.5 if kind == "hangs" else 20)
        expected = ANSWERS[kind]
        assert wrong is None if expected is None else expected in (wrong or "")


def test_a_process_may_wait_longer_than_it_may_work(sandbox):
    """As long as others have the processor."""
    request = {"kind": "waits", "size": 1000, "named": []}
    assert sandbox.ask(request | {"long": "a while"}, timeout=0.4) is None
    assert sandbox.ask(request | {"long": "for ever"}, timeout=0.4) == "it hangs"


@pytest.mark.parametrize("module", [checkpoints, files, kills, damaged_results, killed_benchmarks])
def test_a_case_depends_on_its_seed_and_number_alone(module):
    def names(seed, count):
        return [case.name for case, _ in zip(module.cases(seed), range(count), strict=False)]

    assert names(3, 30) == names(3, 60)[:30] != names(4, 30)


@pytest.mark.parametrize("template", ["minilm folder", "qwen3 stored", "trimul folder", "minilm shards"])
def test_damage_is_the_same_each_time(tmp_path, template):
    kinds = set()
    for number in range(40):
        found = []
        for attempt in range(2):
            folder = tmp_path / f"{number}-{attempt}"
            checkpoints.TEMPLATES[template](folder)
            was = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
            what = checkpoints.change(np.random.default_rng(number), template, folder)
            changed = {path for path, content in was.items() if not path.exists() or path.read_bytes() != content}
            assert len(changed) <= 1
            found.append((what, sorted(path.name for path in changed)))
        assert found[0] == found[1]
        kinds |= {found[0][0]} if found[0][1] else set()
    assert len(kinds) > 25  # most of them change something, and in many ways


def test_a_writer_ends_with_who_started_it(monkeypatch):
    monkeypatch.setattr(kills.os, "getppid", iter([7, 7, 7, 1]).__next__)
    assert list(kills._turns(7)) == [0, 1, 0]


def test_what_may_lie_under_a_name_after_a_kill(tmp_path):
    path, older, newer = tmp_path / "a.npy", b"older" * 100, b"newer" * 100
    whole = [{path: older}, {path: newer}]
    assert kills._wrong(path, older, whole) is kills._wrong(path, newer, whole) is None
    assert kills._wrong(tmp_path / ".0123456789abcdef.draft", b"newe", whole) is None
    for content in (b"", newer[:-1], newer[:200] + older[200:]):
        assert "neither the older nor the newer" in (kills._wrong(path, content, whole) or "")


def test_the_order_of_metadata_says_nothing(tmp_path):
    path, tensors = Path("params.safetensors"), {"a": np.arange(8.0)}
    files_of = [save(tensors, {"x": "1", "y": "2"}), save(tensors, {"y": "2", "x": "1"})]
    assert kills._wrong(path, files_of[0], [{path: files_of[1]}]) is None
    assert kills._wrong(path, files_of[0][:-1], [{path: files_of[1]}])
    assert kills._wrong(path, save({"a": np.arange(8.0) + 1}), [{path: files_of[1]}])
