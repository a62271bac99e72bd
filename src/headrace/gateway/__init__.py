"""The OpenAI-compatible door in front of the engines, which records every token that passes.

`gateway.Gateway` is the whole behaviour without HTTP; `app` and `server` put it on a port.
"""
