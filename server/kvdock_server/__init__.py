"""The KVDock server: keeps KV-cache chunks in host memory and moves them to and from engines.

rpc/        turns messages into calls, and errors into status codes
service/    calls that wait: stores, retrieves, device memory, inline bytes; knows no protobuf
core/       sessions, leases, reservations: each call happens as a whole, and nothing waits
index/      namespaces, chunks, eviction: pure, no I/O
events/     the log of KV events, and its readers
tiers/      where bytes are kept: the shared-memory segment, and its slots
transfer/   copies between the pool and device memory
"""

__version__ = "0.1.0"
