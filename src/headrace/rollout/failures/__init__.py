"""What goes wrong with rollouts, what is done about it, and what must stop a run."""
