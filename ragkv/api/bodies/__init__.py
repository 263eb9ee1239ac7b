"""The bodies of requests and responses: OpenAI's shapes, and ragkv's own."""
