"""Corpora: sentences from files, and their embeddings to files.

`reading` yields the sentences of files, `writing` writes arrays, and `manifest` lists the files of a folder. `job`
reads, embeds and writes, and continues where it was stopped. `command` is the command line.
"""
