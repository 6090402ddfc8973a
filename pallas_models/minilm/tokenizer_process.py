"""A process that tokenizes: `tokenizing.Processes` runs this file, which imports no more than it needs.

It reads pickles from standard input: first the tokenizer as JSON, which it answers with None when it is ready,
then (texts, limit) after (texts, limit). It answers each with the token ids of all texts, one after another, and
how many each has, as the bytes of int32; or with the error that was raised.
"""

import array
import gc
import itertools
import os
import pickle
import sys
from typing import IO


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers until the requests end."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(pickle.load(requests))
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
            tokenizer.enable_truncation(limit)
            ids = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
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
