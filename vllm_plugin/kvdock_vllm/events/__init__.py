"""KV events: what the server has for this engine, published by vLLM's own publisher.

:class:`EventDescriber` describes the blocks of each stored chunk as vLLM's events would. The
description is stored with the chunk. :class:`Relay` follows the server's log and makes vLLM's
events of it: of everything that this engine could load, whoever stored it, and of everything that
is gone. An engine has one relay, in its scheduler, so the number of ranks plays no part. A lost
connection, a restarted server or a cleared cache are no special cases: the difference is published.

Consumers know a block by its hash. A hash is published as stored when the first part with it comes,
and as removed when the last one goes. Hashes that another engine made in another way are left out.
So is a block that cannot be told exactly as vLLM tells it: consumers would take it for another
prompt's.
"""

from kvdock_vllm.events.describer import EventDescriber
from kvdock_vllm.events.relay import Relay, publishes_events

__all__ = ["EventDescriber", "Relay", "publishes_events"]
