"""The decoder and its checkpoints: tensors in, tensors out.

`decoder` is the one model; `config` chooses its attention and feed-forward kinds through `parts`.
`checkpoint` reads and writes Hugging Face directories; `gguf_import` makes one from a GGUF file.
Nothing here knows of HTTP, processes, sampling or training.
"""
