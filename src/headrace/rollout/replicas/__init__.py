"""Several engines as one: who serves which session, who is well, and what outlives a replica."""
