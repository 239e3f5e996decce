"""The log of what became cached and what ceased to be, and who reads it."""
