"""Compiled code that is kept between processes, in `$XDG_CACHE_HOME/pallas_models/compilation` or a given folder.

XDG_CACHE_HOME is `~/.cache` where it is not set. A program may turn on JAX's own persistent cache there for all
its compiled code: `enable`. A library call must not, as JAX has one such setting for the whole process. `Encoder`
therefore keeps its compiled programs itself: `Executables`. To read a program back takes neither tracing nor
lowering.

Compiled code is code, and a program that another user has written would run as this user. So nothing is read from
a folder or a file that does not belong to the user, or that others can write; a warning says so, and programs are
compiled. New folders and files are the user's alone.
"""

import contextlib
import errno
import functools
import hashlib
import os
import pickle
import platform
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable

from pallas_models import files, target, tuning
from pallas_models._options import add_arguments, default_folder

__all__ = ["Executables", "add_arguments", "default_folder", "enable", "jax_has_one", "jax_setting"]

_PACKAGE = Path(__file__).parent


def enable(folder: Path | None) -> None:
    """Turns on JAX's persistent cache for this process, unless the folder is None or JAX has been given one.

    For programs alone: it changes JAX's global settings. A folder that others can have written to, or that holds a
    link or a file that they can have written, is passed over with a warning. `add_arguments` has an example.
    """
    if folder is None or jax_has_one():
        return
    try:
        _make(folder)
        status = folder.stat()
        _check(folder, status)
        for entry in folder.iterdir():  # JAX gives them the mode of the umask: no matter where nobody else enters
            _check(entry, entry.lstat(), is_reached=bool(status.st_mode & 0o011))
    except OSError as error:
        _pass_over(str(error))
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # many small programs add up


def jax_has_one() -> bool:
    """Whether JAX's own persistent cache is on.

    ```
    where = jax.config.jax_compilation_cache_dir if compilation_cache.jax_has_one() else None
    ```
    """
    return bool(jax_setting("jax_compilation_cache_dir") and jax_setting("jax_enable_compilation_cache"))


def jax_setting(name: str) -> Any:
    """A setting of JAX in this thread, with the context managers that are in force.

    ```
    with jax.default_matmul_precision("highest"):
        precision = compilation_cache.jax_setting("jax_default_matmul_precision")  # "highest"
    ```
    """
    return getattr(jax.config, name)


class Executables:
    """Programs for one device, a file each. A file that cannot be read or written is passed over; it warns."""

    def __init__(self, folder: str | os.PathLike[str], device: jax.Device):
        self._folder, self._device = Path(folder), device
        self._warned = False

    def name(self, *key: object) -> str | None:
        """The name of the program that `key` describes, under the circumstances of the calling thread.

        None where JAX's own cache is on: XLA cannot serialise a program from that cache, and one cache is enough.
        """
        if jax_has_one():
            return None
        try:
            full = repr((_circumstances(), _describe(self._device), _jax_settings(), key))
        except OSError as error:
            self._warn(f"what programs depend on cannot be read: {error}")
            return None
        return f"{hashlib.sha256(full.encode()).hexdigest()}.executable"

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program that was saved under this name, or None."""
        path = self._folder / name
        try:
            content = _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{path} is not read: {error}")
            return None
        digest, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != digest:
            self._warn(f"{path} is corrupt")
            return None
        target.start()  # loads the libraries with which Mosaic's kernels are linked
        try:
            serialized, in_tree, out_tree = pickle.loads(payload)
            return serialize_executable.deserialize_and_load(
                serialized, in_tree, out_tree, self._device.client, [self._device]
            )
        except Exception as error:  # XLA and JAX raise errors of many kinds for a program that they cannot run
            self._warn(f"{path} cannot be used: {type(error).__name__}: {error}")
            return None

    def save(self, name: str, compiled: jax.stages.Compiled) -> None:
        """Writes a program."""
        path = self._folder / name
        try:
            _make(self._folder)
            with _opened(self._folder):  # nothing is written that would be refused when it is read
                payload = pickle.dumps(serialize_executable.serialize(compiled))
                content = hashlib.sha256(payload).digest() + payload
                files.write(path, content, follow_links=False, mode=0o600)
        except Exception as error:
            self._warn(f"{path} cannot be written: {type(error).__name__}: {error}")

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            _pass_over(message)


def _pass_over(message: str) -> None:
    warnings.warn(f"compilation cache passed over: {message}", stacklevel=3)


_HAS_OWNERS = hasattr(os, "geteuid")  # Windows has neither such owners nor such modes


def _make(folder: Path) -> None:
    """Makes a folder and those above it, each for the user alone."""
    for place in (*reversed(folder.parents), folder):
        if not place.exists():
            place.mkdir(exist_ok=True, mode=0o700)


def _read(path: Path) -> bytes:
    """The content of an entry; OSError, before any of it is read, if others can have written it."""
    if not _HAS_OWNERS:
        return path.read_bytes()
    with _opened(path.parent) as folder:
        try:  # in the folder that was checked, and without waiting for a pipe
            descriptor = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise PermissionError(f"{path} is a link; expected a file") from error
            raise
    with os.fdopen(descriptor, "rb") as file:
        _check(path, os.fstat(descriptor))
        return file.read()


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder; OSError unless it is the user's, and others cannot write to it."""
    if not _HAS_OWNERS:
        yield -1
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _check(folder, os.fstat(descriptor))
        yield descriptor
    finally:
        os.close(descriptor)


def _check(path: Path, status: os.stat_result, *, is_reached: bool = True) -> None:
    """Raises PermissionError where others than the user can have written the file or folder with this status."""
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(f"{path} is a link; expected a file")
    if _HAS_OWNERS and status.st_uid != os.geteuid():
        raise PermissionError(
            f"{path} belongs to user {status.st_uid}; expected what belongs to {os.geteuid()}, who runs this"
        )
    if _HAS_OWNERS and is_reached and status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{path} can be written by others (mode {mode:04o}): chmod go-w {path}")


@functools.cache
def _circumstances() -> tuple[object, ...]:
    """Any program depends on these: versions, this package's code, tables of tiles, XLA's flags."""
    found = [*_PACKAGE.rglob("*.py"), *_PACKAGE.rglob("*.json"), *tuning.cache_path("").parent.glob("*.json")]
    digest = hashlib.sha256()
    for file in sorted(found):
        content = file.read_bytes()
        digest.update(f"{file} {len(content)}\n".encode() + content)
    prefixes = ("XLA_", "MOSAIC_", "TRITON_")
    flags = sorted(item for item in os.environ.items() if item[0].startswith(prefixes))
    return jax.__version__, jaxlib.__version__, digest.hexdigest(), flags


@functools.cache
def _describe(device: jax.Device) -> tuple[object, ...]:
    host: tuple[object, ...] = ()
    if device.platform == "cpu":  # its code is for this processor alone
        host = (platform.machine(), platform.processor(), _cpu_features())
    client = device.client
    return device.platform, device.device_kind, device.id, client.platform_version, *host


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _jax_settings() -> list[tuple[str, str]]:
    return sorted((name, repr(getattr(jax.config, name, value))) for name, value in jax.config.values.items())
