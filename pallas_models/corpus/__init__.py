"""Corpora: sentences from files, and their embeddings to files.

`reading` yields the sentences of files, `writing` writes arrays, `manifest` says what a folder of them holds, and
`job` goes from one to the other and continues where it was stopped.
"""
