"""The client as coroutines: the names, arguments, results and errors of the blocking one.

    async with kvdock.aio.Client() as client:
        async with await client.session() as session:
            hit = await session.lookup("my-namespace", keys)

A Client belongs to the event loop in which it is made.
"""

from kvdock.aio.client import Client
from kvdock.aio.session import Session

__all__ = ["Client", "Session"]
