"""A gateway on a port of this machine: its app, served, and its sessions closed before the port."""

from headrace.gateway.admin import add_admin_routes
from headrace.gateway.app import create_app
from headrace.gateway.gateway import Gateway
from headrace.http.server import ConnectionLimits, HttpServer


class GatewayServer:
    """A running HTTP server. `await GatewayServer.start(...)`, then `await server.stop()`."""

    def __init__(self, gateway: Gateway, server: HttpServer) -> None:
        self.gateway = gateway
        self._server = server

    @property
    def host(self) -> str:
        """Address it is bound to."""
        return self._server.host

    @property
    def port(self) -> int:
        """TCP port it listens on."""
        return self._server.port

    @property
    def base_url(self) -> str:
        """What an OpenAI client takes as its base URL."""
        return f"{self._server.url}/v1"

    @classmethod
    async def start(
        cls,
        gateway: Gateway,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        address: str | None = None,
        admin_key: str | None = None,
        limits: ConnectionLimits | None = None,
    ) -> "GatewayServer":
        """Serve `gateway`; returns once requests are accepted. See `HttpServer.start`.

        Args:
            admin_key: lets whoever has it open and close sessions over HTTP; None: nobody can.
            limits: of its connections.

        Raises:
            UserError: the port is in use or the address cannot be bound.
        """
        app = create_app(gateway)
        if admin_key is not None:
            add_admin_routes(app, gateway, admin_key)
        server = await HttpServer.start(
            app, host=host, port=port, address=address, name="gateway", limits=limits
        )
        return cls(gateway, server)

    async def stop(self) -> None:
        """Close the gateway's sessions, then the port. Safe to repeat."""
        await self.gateway.close()
        await self._server.stop()
