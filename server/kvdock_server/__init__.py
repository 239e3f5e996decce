"""The KVDock server: keeps KV-cache chunks in host memory and moves them to and from engines.

rpc/        servicers: proto in, domain call, proto out
service/    what waits: stores, retrieves, device memory; no protobuf
core.py     the verbs, over index, pool and sessions; knows no gRPC
index/      namespaces, chunks, leases, eviction: pure, no I/O
pool/       host memory: shared segment, slots
transfer/   copies between the pool and device memory
"""

__version__ = "0.1.0"
