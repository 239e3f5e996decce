"""Host memory: a shared-memory segment and the slots in it."""
