"""The durable record of a run: what was sampled, how it ended, if it trained, and its audit."""
