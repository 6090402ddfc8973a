"""How files are written: whole or not at all, by one writer or many, killed or not."""

import errno
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from pallas_models import files
from parity import ROOT


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a program that may import `files` alone; it is ready once it has printed a line."""
    given = [f"import runpy, sys; files = runpy.run_path({files.__file__!r})\n" + textwrap.dedent(code)]
    command = [sys.executable, "-c", *given, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_text_and_bytes(tmp_path):
    files.write(tmp_path / "a", "é\n")
    files.write(tmp_path / "b", b"\xff")
    assert (tmp_path / "a").read_bytes() == "é\n".encode() and (tmp_path / "b").read_bytes() == b"\xff"
    assert names(tmp_path) == ["a", "b"]


def test_others_may_read_it_as_any_other_file(tmp_path):
    (tmp_path / "usual").touch()
    files.write(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_older_file_alone(tmp_path, error):
    (tmp_path / "a").write_text("old")
    with pytest.raises(error), files.replacing(tmp_path / "a") as file:
        file.write(b"ne")
        file.flush()
        raise error
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_a_full_disk_leaves_the_older_file_alone(tmp_path, monkeypatch):
    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    (tmp_path / "a").write_text("old")
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old" and names(tmp_path) == ["a"]


def test_nothing_is_in_place_before_all_is_on_the_disk(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append((tmp_path / "a").read_text()))
    (tmp_path / "a").write_text("old")
    with files.replacing(tmp_path / "a") as file:
        file.write(b"new")
        assert (tmp_path / "a").read_text() == "old"
    assert seen == ["old", "new"]  # the file, and then its folder


def test_a_link_stays_one(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "b")
    files.write(tmp_path / "a", "x")
    assert (tmp_path / "a").is_symlink() and (tmp_path / "b").read_text() == "x"


def test_a_link_can_be_replaced(tmp_path):
    (tmp_path / "b").write_text("other")
    (tmp_path / "folder").mkdir()
    for target in ("b", "folder", "nowhere", os.devnull):
        (tmp_path / "a").symlink_to(tmp_path / target)
        files.write(tmp_path / "a", target, follow_links=False, mode=0o600)
        assert not (tmp_path / "a").is_symlink() and (tmp_path / "a").read_text() == target
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
        (tmp_path / "a").unlink()
    assert (tmp_path / "b").read_text() == "other" and names(tmp_path) == ["b", "folder"]
    os.mkfifo(tmp_path / "a")  # to which nobody listens
    files.write(tmp_path / "a", "x", follow_links=False)
    assert (tmp_path / "a").read_text() == "x"
    with pytest.raises(IsADirectoryError):
        files.write(tmp_path / "folder", "x", follow_links=False)


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


OLDER = {"a": "old", "sub/b": "old", "notes": "kept"}
NEWER = {"a": "new", "sub/c": "new", "notes": "kept"}


def make_older(folder: Path) -> Path:
    for name, text in OLDER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def replace_by_newer(folder: Path) -> None:
    with files.replacing_folder(folder) as draft:
        files.write(draft / "a", "new")
        assert not (folder / "a").exists() or (folder / "a").stat().st_ino != (draft / "a").stat().st_ino
        (draft / "sub" / "b").unlink(missing_ok=True)
        (draft / "sub").mkdir(exist_ok=True)
        files.write(draft / "sub" / "c", "new")


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_whole_and_keeps_what_else_is_in_it(tmp_path, monkeypatch, exchanges):
    if not exchanges:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda name: None)  # as on systems that cannot
    folder = make_older(tmp_path / "folder")
    replace_by_newer(folder)
    assert contents(folder) == NEWER and names(tmp_path) == ["folder"]
    replace_by_newer(tmp_path / "another")
    assert contents(tmp_path / "another") == {name: NEWER[name] for name in ("a", "sub/c")}


def test_a_failure_leaves_the_older_folder_alone(tmp_path):
    folder = make_older(tmp_path / "folder")
    with pytest.raises(RuntimeError), files.replacing_folder(folder) as draft:
        files.write(draft / "a", "new")
        raise RuntimeError
    assert contents(folder) == OLDER and names(tmp_path) == ["folder"]
    with pytest.raises(NotADirectoryError, match="notes is a file"), files.replacing_folder(folder / "notes"):
        pass


ENDED_AT_EACH_STEP = """
import itertools, os, pathlib

for step in itertools.count():
    folder = pathlib.Path(sys.argv[1], str(step), "folder")
    child = os.fork()
    if not child:
        left = iter(range(step))
        sys.addaudithook(lambda event, arguments: None if next(left, None) is not None else os._exit(9))
        with files["replacing_folder"](folder) as draft:
            files["write"](draft / "a", "new")
            (draft / "sub" / "b").unlink()
            files["write"](draft / "sub" / "c", "new")
        os._exit(0)
    if not os.waitpid(child, 0)[1]:
        break
"""


def test_a_folder_is_the_older_or_the_newer_after_a_kill_at_any_step(tmp_path):
    """A child ends at the first operation that Python audits, those on files among them, another at the second."""
    folders = [make_older(tmp_path / str(step) / "folder") for step in range(200)]
    start(ENDED_AT_EACH_STEP, tmp_path).communicate(timeout=60)
    found = [contents(folder) for folder in folders]
    after = found.index(NEWER)
    assert 30 < after < 180 and found[:after] == [OLDER] * after
    assert all(content in (OLDER, NEWER) for content in found)
    replace_by_newer(folders[after - 1])  # what a killed writer has left is no hindrance
    assert names(folders[after - 1].parent) == ["folder"]


def test_what_is_no_regular_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE)
    files.write(pipe, "through")
    assert reader.communicate()[0] == b"through"
    assert names(tmp_path) == ["pipe"]


def test_impossible_paths_are_found_at_once(tmp_path):
    (tmp_path / "file").touch()
    for path, error in (
        (tmp_path, IsADirectoryError),
        (tmp_path / "absent" / "a", FileNotFoundError),
        (tmp_path / "file" / "a", NotADirectoryError),
        ("/proc/a", OSError),
    ):
        with pytest.raises(error, match=str(path)), files.replacing(path):
            pytest.fail("the work was begun")


def test_drafts_of_killed_writers_are_removed_and_no_others(tmp_path):
    program = """
    with files["replacing"](sys.argv[1]) as file:
        file.write(b"half")
        file.flush()
        print("begun", flush=True)
        sys.stdin.read()
    """
    killed, other = start(program, tmp_path / "a"), start(program, tmp_path / "b")
    with killed, other:
        assert killed.stdout.readline() == other.stdout.readline() == "begun\n"
        killed.kill()
        killed.wait()
        assert len(names(tmp_path)) == 2
        files.write(tmp_path / "c", "x")
        assert len(names(tmp_path)) == 2 and "c" in names(tmp_path)  # the file of the writer that goes on is there
        other.send_signal(signal.SIGKILL)


def test_many_writers_of_one_file(tmp_path):
    """Whoever reads the file finds what one of them wrote, and nothing but the file is left."""
    program = """
    for _ in range(40):
        files["write"](sys.argv[1], sys.argv[2] * 300_000)
    """
    path = tmp_path / "a"
    path.write_text("0" * 300_000)
    writers = [start(program, path, digit) for digit in "123"]
    found = set()
    while any(writer.poll() is None for writer in writers):
        found.add(path.read_text())
        time.sleep(1e-3)
    for writer in writers:
        with writer:
            assert writer.wait() == 0
    assert found <= {digit * 300_000 for digit in "0123"} and len(found) > 1
    assert names(tmp_path) == ["a"]


def test_a_folder_is_locked_for_as_long_as_a_job_lives(tmp_path):
    """Another job names the one that has it; once that is killed, the next one takes it and leaves nothing."""
    holder = start("with files['locked'](sys.argv[1]):\n    print('has it', flush=True)\n    input()", tmp_path)
    with holder:
        assert holder.stdout.readline() == "has it\n"
        message = f"{re.escape(str(tmp_path))} is being written by process {holder.pid} on .+; expected a folder"
        with pytest.raises(BlockingIOError, match=message), files.locked(tmp_path):
            pass
        holder.kill()
    assert names(tmp_path) == [".lock"]
    with files.locked(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert names(tmp_path) == []


def test_a_lock_that_is_given_back_while_another_job_waits_for_it_is_taken_anew(tmp_path, monkeypatch):
    flock, removed = files.fcntl.flock, []

    def late(descriptor, operation):
        if not removed:
            removed.append((tmp_path / ".lock").unlink())
        flock(descriptor, operation)

    monkeypatch.setattr(files.fcntl, "flock", late)
    with files.locked(tmp_path), pytest.raises(BlockingIOError), files.locked(tmp_path):
        pass
    assert removed and names(tmp_path) == []


def test_no_lock_where_there_is_none_to_be_had(tmp_path, monkeypatch):
    """On a file system without locks, and in a folder that cannot be written; no link is written through."""

    def without(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(files.fcntl, "flock", without)
        with files.locked(tmp_path), files.locked(tmp_path):
            pass
    monkeypatch.setattr(files.os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
    with files.locked(tmp_path):
        assert names(tmp_path) == []
    monkeypatch.undo()
    (tmp_path / "thesis").write_text("whole")
    (tmp_path / ".lock").symlink_to("thesis")
    with pytest.raises(OSError, match="Too many levels"), files.locked(tmp_path):
        pass
    assert (tmp_path / "thesis").read_text() == "whole"


WRITES = re.compile(
    r"""\.write_(text|bytes)\(|open\(.*["'][wxa]b?["']|os\.(replace|rename)\(|(np\.save|save_file)\((?!file,)"""
)
# A scratch file for a process that is started next, a member of an archive, an example in a docstring, and the
# function itself.
ELSEWHERE = {
    "bench/cases/startup.py": 1,
    "pallas_models/corpus/writing.py": 1,
    "pallas_models/exporting.py": 1,
    "pallas_models/files.py": 2,
}


def test_nothing_is_written_elsewhere():
    found = {}
    for package in ("pallas_models", "weights", "bench"):
        for path in (ROOT / package).rglob("*.py"):
            if count := sum(1 for line in path.read_text().splitlines() if WRITES.search(line.partition("#")[0])):
                found[path.relative_to(ROOT).as_posix()] = count
    assert found == ELSEWHERE
