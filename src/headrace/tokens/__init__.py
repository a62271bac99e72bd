"""Text to token ids and back: tokenizer training and loading, chat rendering, bridging and parsing.

Imports no model code and no torch, so that the process that holds it starts quickly and stays
small. Nothing here does any I/O beyond reading and writing a tokenizer's own directory.
"""
