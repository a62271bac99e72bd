"""Isolation: small private file trees in which untrusted commands run.

`open_provider` picks the strongest kind this machine offers, `probe` says which kinds work and why
others do not, and types.py holds the interface users see. Names are loaded on first use because the
sandbox server (server.py) imports this package and must start in milliseconds.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.sandbox.provider import ServerProvider, ServerSandbox, open_provider, probe

__all__ = ["ServerProvider", "ServerSandbox", "open_provider", "probe"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from headrace.sandbox import provider

        return getattr(provider, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
