"""The KVDock server: keeps KV-cache chunks in host memory and moves them to and from engines.

rpc/        servicers: proto in, one call, proto out
service/    what waits: stores, retrieves, device memory, inline bytes; no protobuf
core/       sessions, leases, reservations: each call happens as a whole; nothing waits
index/      namespaces, chunks, eviction: pure, no I/O
tiers/      where bytes are kept; host: shared segment, slots
transfer/   copies between the pool and device memory
"""

__version__ = "0.1.0"
