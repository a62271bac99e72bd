"""The engine's own HTTP surface: tokens in, tokens out, weights, metrics."""
