"""One HTTP transport for all of Tidemill's own clients: chat, batch, programs, benchmarks and
commands that ask a running server. The router has a transport of its own."""

from tidemill.client.address import Address
from tidemill.client.errors import BadResponse, Unreachable, WrongKey
from tidemill.client.transport import AsyncClient, Client

__all__ = ["Address", "AsyncClient", "BadResponse", "Client", "Unreachable", "WrongKey"]
