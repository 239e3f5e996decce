"""Namespaces, chunks, hits and eviction: pure Python without I/O, testable alone."""
