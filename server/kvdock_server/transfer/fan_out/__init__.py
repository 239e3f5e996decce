"""Loads for several workers: from the host to one device, and from there to the others."""
