"""Token-in token-out generation: continuous batching, prefix reuse, versioned weights."""
