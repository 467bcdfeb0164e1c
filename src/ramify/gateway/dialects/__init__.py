"""The three ways clients speak of one conversation. Each reads a body to a `Request` and writes a `Reply`."""
