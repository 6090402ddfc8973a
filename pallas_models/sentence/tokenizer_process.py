"""A process that tokenizes: `tokenizing.Processes` runs this file, which imports no more than it needs.

It reads pickles from standard input. The first is the tokenizer as JSON; the answer is None, once the process is
ready. Each further pickle is (texts, limit); the answer is the token ids of all texts, one after another, and the
number of tokens of each text, as the bytes of int32, or the error that was raised.
"""

import array
import gc
import itertools
import json
import os
import pickle
import re
import sys
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

_split: Callable[[str], list[str]] = re.compile(r"[0-9A-Za-z]+|[^0-9A-Za-z ]").findall
# The number of words whose ids are kept, in 10 MB: nearly all words of a text are among them.
_MOST_WORDS, _LONGEST_WORD = 2**15, 32


class Words(dict[str, list[int]]):
    """The token ids of plain texts, word by word: as the tokenizer gives them, in a sixth of its time.

    BERT's tokenizers tokenize each word and each punctuation mark by itself, so that it has the same ids in all
    texts. A text is plain if all its characters are printable and of ASCII, so that words have clear ends, and no
    added token, such as "[MASK]", begins with one of them.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer"):
        """Takes a tokenizer that does not truncate. For a tokenizer unlike BERT's, no text is plain."""
        super().__init__()
        self._tokenizer = tokenizer
        described = json.loads(tokenizer.to_str())
        self._lower = bool((described["normalizer"] or {}).get("lowercase"))
        self._before: list[int] = []
        self._after: list[int] = []
        self._is_plain: Callable[[str], object] = lambda text: False
        if _is_by_words(described):
            found = tokenizer.encode("a")
            first = found.special_tokens_mask.index(0)
            last = len(found) - found.special_tokens_mask[::-1].index(0)
            self._before, self._after = found.ids[:first], found.ids[last:]
            plain = set(map(chr, range(0x20, 0x7F))) - _beginnings(tokenizer, described["added_tokens"])
            self._is_plain = re.compile(f"[{re.escape(''.join(sorted(plain)))}]*").fullmatch

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(word, add_special_tokens=False).ids
        if len(self) < _MOST_WORDS and len(word) <= _LONGEST_WORD:
            self[word] = ids
        return ids

    def ids(self, text: str, limit: int) -> list[int] | None:
        """The ids of a text, at most `limit`, with special tokens; None where it is not plain."""
        room = limit - len(self._before) - len(self._after)
        if room < 0 or not self._is_plain(text):
            return None
        words = _split(text.lower() if self._lower else text)
        ids = list(itertools.chain.from_iterable(map(self.__getitem__, words)))
        del ids[room:]
        return self._before + ids + self._after


def _is_by_words(described: dict[str, Any]) -> bool:
    """Whether the JSON describes a tokenizer that works like BERT's."""
    names = ("normalizer", "pre_tokenizer", "model", "post_processor")
    *kinds, last = ((described[name] or {}).get("type") for name in names)
    by_words = kinds == ["BertNormalizer", "BertPreTokenizer", "WordPiece"]
    return by_words and last in ("TemplateProcessing", "BertProcessing") and described["padding"] is None


def _beginnings(tokenizer: "tokenizers.Tokenizer", added: list[dict[str, Any]]) -> set[str]:
    """The characters with which an added token begins, as it is or normalised, in a text of either case."""
    contents = [token["content"] for token in added]
    first = [content[:1] for content in (*contents, *map(tokenizer.normalizer.normalize_str, contents))]
    return {*map(str.lower, first), *map(str.upper, first)}


def encode(tokenizer: "tokenizers.Tokenizer", words: Words, texts: list[str], limit: int) -> list[list[int]]:
    """The ids of each text, at most `limit`."""
    found = [words.ids(text, limit) for text in texts]
    others = [text for text, ids in zip(texts, found, strict=True) if ids is None]
    tokenizer.enable_truncation(limit)
    try:
        rest = iter(tokenizer.encode_batch_fast(others))
    finally:
        tokenizer.no_truncation()
    return [next(rest).ids if ids is None else ids for ids in found]


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers until the requests end."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(pickle.load(requests))
    tokenizer.no_truncation()
    words = Words(tokenizer)
    gc.disable()  # nothing here is part of a cycle
    answer: object = None
    while True:
        pickle.dump(answer, answers)
        answers.flush()
        try:
            texts, limit = pickle.load(requests)
        except EOFError:
            return
        try:
            ids = encode(tokenizer, words, texts, limit)
            answer = tuple(
                array.array("i", numbers).tobytes()
                for numbers in (itertools.chain.from_iterable(ids), map(len, ids))
            )
        except Exception as error:
            answer = error


if __name__ == "__main__":
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:  # nobody is there for the answer
        os._exit(0)
