"""From logits to tokens: what changes logits, the draws, and what ends a request or binds it."""
