"""What is stored at the end, listed against what lives: no KV of a deleted text or conversation may be left.

Each uploaded document holds a word that no other text holds, so the token ids of an entry say whose it is. A block of a
conversation must be in the history of a conversation that the Redis server has.
"""

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import redis
from transformers import AutoTokenizer

from ragkv.config import RedisConfig, StoreConfig
from ragkv.model.loading import READER
from ragkv.store import EntryInfo, Store

from .findings import LEFT, OWN, Findings
from .uploaders import LETTERS
from .world import SECRET, Replica, World

SETTLE_S = 30.0  # SETTLE_S pass after the last deletion until every replica has followed it.
WORD = re.compile(rf"\bw[{LETTERS}]{{12}}\b")


def check_leftovers(world: World, findings: Findings) -> None:
    """Record a failure for every entry of something deleted that a replica that runs, or Redis, still has."""
    tokenizer = AutoTokenizer.from_pretrained(READER)
    until = time.monotonic() + SETTLE_S
    while True:
        left, listed = list[str](), 0
        for tenant, headers in world.headers.items():
            words, keys = _live_words(world.serving[0], headers), _live_blocks(world)
            for place, entry in _stored(world, tenant):
                listed += 1
                if entry.group:
                    # What a killed replica wrote to Redis for a turn that did not end expires there.
                    if entry.key.to_text() not in keys and place != "redis":
                        left.append(f"{place}: {entry.key}: block of no conversation, of {entry.group}")
                    continue
                deleted = set(WORD.findall(tokenizer.decode(entry.token_ids))) - words
                if deleted:
                    left.append(f"{place}: {entry.key}: KV of deleted texts: {sorted(deleted)}")
        if not left or time.monotonic() >= until:
            break
        time.sleep(1.0)
    findings.count("entries listed at the end", listed)
    if not listed:
        findings.fail(OWN, "no entry was listed at the end: nothing was checked")
    for one in left:
        findings.fail(LEFT, one)


def _live_words(replica: Replica, headers: dict[str, str]) -> set[str]:
    """The words in the texts of all documents of a tenant."""
    words: set[str] = set()
    with replica.process.client(headers=headers) as client:
        for collection in client.get("/v1/collections").json()["data"]:
            path = f"/v1/collections/{collection['name']}/documents"
            for document in client.get(path, params={"limit": 1000}).json()["data"]:
                words |= set(WORD.findall(client.get(f"{path}/{document['id']}").json()["text"]))
    return words


def _live_blocks(world: World) -> set[str]:
    """The keys of the blocks of all conversations, as Redis has them."""
    with redis.Redis(unix_socket_path=world.redis.server.socket) as client:
        summaries = [row for name in client.scan_iter("ragkv:sessions:*:summaries") for row in client.hvals(name)]
    return {key for row in summaries for key in json.loads(row)["keys"]}


def _stored(world: World, tenant: str) -> Iterator[tuple[str, EntryInfo]]:
    """Where each entry of a tenant is: on the disk of a replica that runs, or on Redis."""
    for replica in world.serving:
        folder = replica.kv / "tenants" / tenant / "kv"
        if folder.is_dir():
            yield from _entries(replica.name, StoreConfig(memory_bytes=0, directory=str(folder), read_only=True))
    os.environ[SECRET] = world.secret
    server = RedisConfig(url=f"unix://{Path(world.redis.server.socket)}", secret_variable=SECRET)
    yield from _entries("redis", StoreConfig(memory_bytes=0, redis=server, tenant=tenant))


def _entries(place: str, config: StoreConfig) -> Iterator[tuple[str, EntryInfo]]:
    with Store.open(config) as store:
        for info in store.infos():
            yield place, info
