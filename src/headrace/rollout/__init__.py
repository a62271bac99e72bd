"""From tickets to batches: rollouts in flight, the record of them, and what of it may train."""
