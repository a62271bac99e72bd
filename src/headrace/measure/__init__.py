"""Measurements of a language model: bits per byte, retrieval, chat format.

`text`, `retrieval` and `format` compute; `worker` is the process a run asks.
"""
