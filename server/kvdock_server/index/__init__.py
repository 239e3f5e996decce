"""Namespaces, chunks, leases and eviction: pure Python without I/O, testable alone."""
