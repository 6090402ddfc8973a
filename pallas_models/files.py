"""How files are written: whole or not at all, even where a writer is killed or a disk is full.

What is written lies in a draft beside the file, `.<random>.draft`, and takes the file's name once it is on the
disk. A writer that fails removes its draft. A killed one leaves it behind, and the next writer in the folder
removes it: it can tell, as the lock on a draft ends with its writer.
"""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Opens a draft, which becomes the file `path` at the end of the context.

    Where an exception leaves the context, the file stays as it was. A link stays a link: the file that it names is
    replaced. What is no regular file, such as /dev/stdout, is written to directly.

    Raises:
      OSError: `path` is a folder, or its folder does not exist or cannot be written: raised at the beginning, so
        that no work is done in vain; or the disk is full.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; expected a file, or nothing there")
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            yield device
        return
    path = Path(os.path.realpath(path))
    _remove_abandoned(path.parent)
    try:
        draft, file = _open_draft(path.parent)
    except OSError as error:
        raise type(error)(f"{path} cannot be written: {path.parent}: {error.strerror}") from error
    with file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
    _sync(path.parent)


def write(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file as `replacing` does; text in UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def _open_draft(folder: Path) -> tuple[Path, IO[bytes]]:
    while True:
        draft = folder / f".{secrets.token_hex(8)}.draft"
        file = draft.open("xb")
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes drafts there
            fcntl.flock(file, fcntl.LOCK_EX)
        if draft.exists():
            return draft, file
        file.close()  # it was taken for abandoned before it was locked


def _remove_abandoned(folder: Path) -> None:
    for draft in folder.glob(f".{'[0-9a-f]' * 16}.draft"):
        with contextlib.suppress(OSError), draft.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def _sync(folder: Path) -> None:
    """Writes a folder's names to the disk: only then does a file survive a loss of power under its new one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # a file system that cannot; the names are in place for everybody who is running
        pass
    finally:
        os.close(descriptor)
