"""Inference servers (vLLM, SGLang, other headrace engines) as engines, over HTTP."""
