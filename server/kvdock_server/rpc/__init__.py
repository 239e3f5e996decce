"""gRPC: servicers that turn messages into calls of the core, and its errors into status codes."""
