"""The tokenizer that goes with the weights of a sentence encoder."""

from pathlib import Path
from typing import TYPE_CHECKING

from weights.checkpoint import CheckpointError, read_json, shown

if TYPE_CHECKING:
    import tokenizers


def read_tokenizer(folder: Path, *, lower_case: bool = False) -> "tokenizers.Tokenizer":
    """Reads tokenizer.json; FileNotFoundError or CheckpointError naming the file.

    With `lower_case` sentences are lower-cased before all that it does.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: text is tokenized as the model's tokenizer.json says")
    _check_ids(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error
    if lower_case:
        before = [tokenizers.normalizers.Lowercase()]
        own = [tokenizer.normalizer] if tokenizer.normalizer else []
        tokenizer.normalizer = tokenizers.normalizers.Sequence(before + own)
    return tokenizer


def _check_ids(path: Path) -> None:
    """CheckpointError where a token's id is larger than the file: tokenizers takes memory up to the largest."""
    content, size = read_json(path), path.stat().st_size
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.items()) if isinstance(vocabulary, dict) else []
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict):
            ids.append((token.get("content"), token.get("id")))
    for token, found in ids:
        if type(found) is int and not 0 <= found <= size:
            raise CheckpointError(
                f"{path} gives {shown(token)} the id {shown(found)}; expected one below the number of its tokens"
            )
