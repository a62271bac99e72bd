"""What sequences computed, in blocks: who holds which, what prompts find there, its transfer."""
