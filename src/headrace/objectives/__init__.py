"""Objectives: pure functions from tensors to (loss, metrics). No model, no I/O, no state."""
