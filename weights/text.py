"""What goes with the weights of a sentence encoder: the tokenizer, the length it was made for, and the pooling."""

from pathlib import Path
from typing import TYPE_CHECKING

from weights.checkpoint import CheckpointError, read_json

if TYPE_CHECKING:
    import tokenizers


def read_tokenizer(folder: Path) -> "tokenizers.Tokenizer":
    """Reads tokenizer.json; FileNotFoundError or CheckpointError naming the file."""
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: text is tokenized as the model's tokenizer.json says")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{path} is not a readable tokenizer: {error}") from error


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
