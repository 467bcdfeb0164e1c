"""The chat APIs of OpenAI and Anthropic: parse request bodies to messages, format replies, errors and event streams.

The gateway serves all three dialects from here; the engine's server shares the parts of OpenAI's Chat Completions.
"""
