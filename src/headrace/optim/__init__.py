"""Optimizers for the trainer."""
