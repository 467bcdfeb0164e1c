"""The built-in tasksets, each a small plugin that uses only the public API."""
