"""What goes with the weights of a sentence encoder: the tokenizer, the length it was made for, and the pooling."""

from pathlib import Path
from typing import TYPE_CHECKING

from weights.checkpoint import CheckpointError, read_json, shown

if TYPE_CHECKING:
    import tokenizers


def read_tokenizer(folder: Path) -> "tokenizers.Tokenizer":
    """Reads tokenizer.json; FileNotFoundError or CheckpointError naming the file."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: text is tokenized as the model's tokenizer.json says")
    _check_ids(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error


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


def stated_max_length(folder: Path) -> int | None:
    """`max_seq_length` of sentence_bert_config.json; None where nothing is stated."""
    path = folder / "sentence_bert_config.json"
    stated = read_json(path).get("max_seq_length") if path.is_file() else None
    if stated is not None and (type(stated) is not int or stated < 2):
        raise CheckpointError(f"{path}: max_seq_length is {stated!r}; expected an integer of at least 2")
    return stated


def check_pooling(folder: Path) -> None:
    """NotImplementedError where 1_Pooling/config.json asks for anything but the mean of the tokens."""
    path = folder / "1_Pooling" / "config.json"
    if not path.is_file():
        return
    modes = {key for key, value in read_json(path).items() if key.startswith("pooling_mode_") and value is True}
    if modes != {"pooling_mode_mean_tokens"}:
        raise NotImplementedError(f"{path} asks for {sorted(modes)}; only pooling_mode_mean_tokens is implemented")
