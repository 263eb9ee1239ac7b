"""Bodies that no client should send; the requests name the collection `facts` and the model `reader`."""

import json
from typing import Any

JSON = {"content-type": "application/json"}
ASK = {"question": "x", "collection": "facts", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": "reader", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
MANY_KEYS = {f"k{number}": 1 for number in range(3000)}
LONG = list(range(5000))


def nested(levels: int) -> str:
    return "[" * levels + "1" + "]" * levels


ODD_BODIES = [
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": NaN}}'),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": 1e999}}'),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": ' + "9" * 5000 + "}}"),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": ' + nested(300) + "}}"),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"a": ' + nested(980) + "}}"),
    ("/v1/collections/facts/search", '{"query": "x", "filter": {"\\ud800": 1}}'),
    ("/v1/collections/facts/search", json.dumps({"query": "x", "retriever": "y" * 5000})),
    ("/v1/collections", json.dumps({"name": "a\n"})),
    ("/v1/collections", '{"name": "\\ud800"}'),
    ("/v1/collections/facts/documents", '{"documents": [{"text": "t", "metadata": {"k\\u0000": 1}}]}'),
    ("/v1/collections/facts/documents", '{"documents": [{"text": "t", "metadata": {"k": "a\\u0000b"}}]}'),
    ("/v1/collections/facts/documents", '{"documents": [{"text": "t", "metadata": {"k": "\\ud800"}}]}'),
    ("/v1/collections/facts/documents", '{"documents": [{"text": "t", "metadata": {"k": ' + nested(100) + "}}]}"),
    ("/v1/collections/facts/documents", '{"documents": [{"text": "t", "metadata": {"k": 1e999}}]}'),
    ("/v1/collections/facts/documents", json.dumps({"documents": [{"text": "t", "metadata": {"k": "x" * 30_000}}]})),
    ("/v1/collections/facts/documents", json.dumps({"documents": [{"id": "a\n", "text": "t"}]})),
    ("/v1/ask", json.dumps({**ASK, "u" * 100_000: 1})),
    ("/v1/ask", json.dumps({**ASK, **MANY_KEYS})),
    ("/v1/ask", json.dumps({**ASK, "session_id": "a\n"})),
    ("/v1/ask", json.dumps({**ASK, "max_tokens": 10**30})),
    ("/v1/chat/completions", json.dumps({**CHAT, "seed": 10**40})),
    ("/v1/chat/completions", json.dumps({**CHAT, "n": 10**400})),
    ("/v1/chat/completions", json.dumps({**CHAT, "messages": [1] * 100_000})),
    ("/v1/embeddings", json.dumps({"model": "hash", "input": [""] * 100_000})),
    ("/v1/embeddings", json.dumps({"model": "hash", "input": "x", "dimensions": 10**40})),
]
