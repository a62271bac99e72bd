"""The trainer. It sees batches of token sequences, never sessions, HTTP or tasks."""
