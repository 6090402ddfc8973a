"""From text to vectors: encoders of sentences and of pairs, with the values of sentence-transformers.

`encoder` and `cross_encoder` are the classes that people use, `text_model` has the parts that both share, and
`request` computes one call. A call goes through `tokenizing`, `packing` and `programs`, which `pipeline` runs side
by side. `heads` makes an embedding of hidden states, `similarity` and `quantization` take embeddings further.
`folders`, `classifiers` and `saving` read and write the folders of sentence-transformers and transformers: these
alone import `weights`, and are imported when a folder is read or written.
"""
