"""httpx's client, with every failure of the network as one of httpx's errors.

The libraries below httpx translate what a socket raises, but not what they trip over themselves
when the other side is gone between two of their steps: anyio asks a connection that was reset
while it opened for its address (AttributeError), uvloop refuses to write to a closed one
(RuntimeError). A server that is killed does both.
"""

from typing import Any

import httpx


class HttpClient(httpx.AsyncClient):
    """For servers that may die under a request. Arguments are `httpx.AsyncClient`'s."""

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """See `httpx.AsyncClient`.

        Raises:
            httpx.HTTPError: no connection, no answer, or this client is closed.
        """
        try:
            return await super().send(request, **options)
        except (AttributeError, RuntimeError) as error:
            raise httpx.NetworkError(f"the connection is closed ({error})") from error
