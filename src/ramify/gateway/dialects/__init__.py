"""The three API dialects of clients. Each parses a body to a `ModelRequest` and formats a `ModelReply`."""
