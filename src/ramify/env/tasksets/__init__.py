"""The built-in tasksets. Each is a small plugin that uses only the public API."""
