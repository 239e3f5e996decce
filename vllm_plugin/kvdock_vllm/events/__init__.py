"""KV events: what the server has for this engine, through vLLM's own publisher.

Two halves that never meet. :class:`EventDescriber` says of each chunk that is stored what vLLM's
events say of its blocks; it travels with the chunk to the server. :class:`Relay` follows the
server's log and turns it into vLLM's events again: for everything that this engine could load,
whoever stored it, and for everything that went. There is one relay an engine, in the scheduler, so
the number of ranks plays no part; and what is published is what the server has, so a lost
connection, a restarted server or a cleared cache are nothing special: the difference is
published.

Consumers know a block by its hash. A hash is published as stored when the first part that has it
comes and as removed when the last one goes. Hashes that another engine made in another way are not
this engine's and are left out, and so is what cannot be told exactly as vLLM tells it: a consumer
would take a block for another prompt's.
"""

from kvdock_vllm.events.describer import EventDescriber
from kvdock_vllm.events.relay import Relay, publishes_events

__all__ = ["EventDescriber", "Relay", "publishes_events"]
