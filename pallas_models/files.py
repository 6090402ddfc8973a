"""Writes files and folders whole or not at all, even where a writer is killed or a disk is full.

A draft, `.<random>.draft`, is written beside, and takes the final name once it is on the disk. A writer that fails
removes its draft. A killed writer leaves it behind, and the next writer in the folder removes it: the lock on a
draft ends with its writer, so that the next one can tell. `locked` keeps a folder for one job in the same way.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(
    path: str | os.PathLike[str], *, follow_links: bool = True, mode: int = 0o666
) -> Iterator[IO[bytes]]:
    """Opens a draft, which becomes the file `path` at the end of the context.

    Where an exception leaves the context, the file stays as it was. A device or a pipe, such as /dev/stdout, is
    written to directly.

    ```
    with files.replacing("vectors.npy") as file:
        np.save(file, np.zeros((2, 3)))
    ```

    Args:
      follow_links: whether a link stays a link, and the file that it names is replaced. Otherwise the link itself
        is replaced, and so is a device or a pipe.
      mode: of the file, less the bits of the umask.

    Raises:
      OSError: `path` is a folder, or its folder does not exist or cannot be written: raised at the beginning, so
        that no work is done in vain; or the disk is full.
    """
    path = Path(path)
    if path.is_dir() and (follow_links or not path.is_symlink()):
        raise IsADirectoryError(f"{path} is a folder; expected a file, or nothing there")
    if follow_links:
        if path.exists() and not path.is_file():
            with path.open("wb") as device:
                yield device
            return
        path = Path(os.path.realpath(path))
    _remove_abandoned(path.parent)
    try:
        draft, descriptor = _open_draft(path.parent, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {path.parent}: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    _sync(path.parent)


def write(
    path: str | os.PathLike[str], content: str | bytes, *, follow_links: bool = True, mode: int = 0o666
) -> None:
    """Writes a file as `replacing` does; text in UTF-8.

    ```
    files.write("notes.txt", "whoever reads it sees the old text or the new one, never a half")
    ```
    """
    with replacing(path, follow_links=follow_links, mode=mode) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Makes a draft of a folder, which becomes the folder `path` at the end of the context.

    The draft begins with the files of the folder, so that files which the context leaves alone stay. They are
    links to the files of the folder: to change one, replace it, as `write` does. Where an exception leaves the
    context, the folder stays as it was. At any time the older folder or the newer one is in place. Only where the
    system cannot let two folders change their names at once, as Linux can, there is none for a moment, and after a
    kill in that moment the older one is `.<random>.older`. A mount point has no name to change: it is written to
    directly.

    ```
    with files.replacing_folder("model") as draft:
        files.write(draft / "config.json", "{}")
    ```

    Raises:
      OSError: `path` is a file, or its parent does not exist or cannot be written.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is a file; expected a folder, or nothing there")
    if os.path.ismount(path):
        yield path
        return
    _remove_abandoned(path.parent)
    try:
        draft, descriptor = _open_draft(path.parent, os.O_RDONLY, is_folder=True)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {path.parent}: {error.strerror}") from error
    try:
        if path.exists():
            drafts = shutil.ignore_patterns(_DRAFTS)
            shutil.copytree(path, draft, True, drafts, _link, dirs_exist_ok=True)
        yield draft
        for folder, _, _ in os.walk(draft):
            _sync(Path(folder))
        _exchange(draft, path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(descriptor)
    _sync(path.parent)


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Keeps a folder for this job while the context lasts.

    The lock, on the file `.lock` in the folder, ends with the process, however that ends: the next job takes the
    file that a killed job leaves, and removes it in the end. Where the file system has no locks, or nothing can be
    written, there is no lock.

    ```
    with files.locked("."):
        files.write("part-0", "no other job writes here meanwhile")
    ```

    Raises:
      BlockingIOError: another job has the folder.
    """
    try:
        path, descriptor = _take(Path(folder))
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        yield
        return
    try:
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _take(folder: Path) -> tuple[Path, int]:
    path = folder / ".lock"
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another job"
            os.close(descriptor)
            raise BlockingIOError(
                f"{folder} is being written by {holder}; expected a folder that no other job writes to"
            ) from None
        except OSError:  # a file system without locks
            return path, descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return path, descriptor
        os.close(descriptor)  # who had it before has removed it


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def _exchange(draft: Path, path: Path) -> None:
    """Gives a draft the name of a folder, and the folder, if there is one, the name of the draft."""
    try:
        draft.rename(path)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is not None and rename(here, os.fsencode(draft), here, os.fsencode(path), exchange) == 0:
        return
    older = path.rename(draft.with_suffix(".older"))
    draft.rename(path)
    older.rename(draft)


_DRAFTS = f".{'[0-9a-f]' * 16}.draft"


def _open_draft(folder: Path, flags: int, mode: int = 0o666, *, is_folder: bool = False) -> tuple[Path, int]:
    while True:
        draft = folder / f".{secrets.token_hex(8)}.draft"
        if is_folder:
            draft.mkdir()
        try:
            descriptor = os.open(draft, flags, mode)
        except FileNotFoundError:
            if is_folder:
                continue  # taken for abandoned, as below
            raise
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes drafts there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if draft.exists():
            return draft, descriptor
        os.close(descriptor)  # it was taken for abandoned before it was locked


def _remove_abandoned(folder: Path) -> None:
    for draft in folder.glob(_DRAFTS):
        with contextlib.suppress(OSError):
            descriptor = os.open(draft, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(draft) if draft.is_dir() else draft.unlink()
            finally:
                os.close(descriptor)


def _sync(folder: Path) -> None:
    """Writes the names in a folder to the disk: only then does a new name survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # a file system that cannot; the names are in place for everybody who is running
        pass
    finally:
        os.close(descriptor)
