"""Which task and which problem a rollout gets, and whether one should begin now."""
