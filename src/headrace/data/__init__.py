"""Text and conversations on their way to the trainer.

Corpora become documents, documents become token stores on disk, stores become packed rows in a
deterministic, resumable order. No torch here: a row is numpy arrays, whoever trains on them.
"""
