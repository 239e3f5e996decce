"""The log of KV events, and its readers."""
