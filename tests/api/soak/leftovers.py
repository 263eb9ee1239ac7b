"""What is stored at the end, listed against what lives: no KV of a deleted text or conversation may
be left.

Each uploaded document holds a word that no other text holds, so the token ids of an entry say whose
it is. A block of a conversation must be in the history of a conversation that the Redis server has.
"""

import json
import os
import re
import time
from collections.abc import Iterator

import redis
from transformers import AutoTokenizer

from ragkv.config import RedisConfig, StoreConfig
from ragkv.store.entry import EntryInfo
from ragkv.store.opening import open_store
from tests.reader import READER

from .world import LETTERS, SECRET, World

SETTLE_S = 30.0  # within this time after the last deletion every replica has followed it
WORD = re.compile(rf"\bw[{LETTERS}]{{12}}\b")


def check_leftovers(world: World) -> None:
    """Record a failure for every entry of something deleted that a replica that runs, or Redis,
    still has.
    """
    until = time.monotonic() + SETTLE_S
    while (left := list(_left(world))) and time.monotonic() < until:
        time.sleep(1.0)
    for one in left:
        world.findings.fail(one)


def _left(world: World) -> Iterator[str]:
    tokenizer = AutoTokenizer.from_pretrained(READER)
    listed = 0
    for tenant in world.headers:
        words = _live_words(world, tenant)
        keys = _live_blocks(world)
        for place, entry in _stored(world, tenant):
            listed += 1
            deleted = (
                set()
                if entry.group
                else set(WORD.findall(tokenizer.decode(entry.token_ids))) - words
            )
            # What a killed replica wrote to Redis for a turn that did not end expires there.
            if entry.group and entry.key.to_text() not in keys and place != "redis":
                yield f"{place}: {entry.key}: block of no conversation, of {entry.group}"
            if deleted:
                yield f"{place}: {entry.key}: KV of deleted texts: {sorted(deleted)}"
    if not listed:
        yield "no entry was listed at the end: nothing was checked"


def _live_words(world: World, tenant: str) -> set[str]:
    """The words in the texts of all documents of a tenant."""
    words: set[str] = set()
    with world.serving[0].process.client(headers=world.headers[tenant]) as client:
        for collection in client.get("/v1/collections").json()["data"]:
            path = f"/v1/collections/{collection['name']}/documents"
            for document in client.get(path, params={"limit": 1000}).json()["data"]:
                words |= set(WORD.findall(client.get(f"{path}/{document['id']}").json()["text"]))
    return words


def _live_blocks(world: World) -> set[str]:
    """The keys of the blocks of all conversations, as Redis has them."""
    assert world.redis is not None
    with redis.Redis(unix_socket_path=world.redis.server.socket) as client:
        summaries = [
            row
            for name in client.scan_iter("ragkv:sessions:*:summaries")
            for row in client.hvals(name)
        ]
    return {key for row in summaries for key in json.loads(row)["keys"]}


def _stored(world: World, tenant: str) -> Iterator[tuple[str, EntryInfo]]:
    """Where each entry of a tenant is: on the disk of a replica that runs, or on Redis."""
    assert world.redis is not None
    os.environ[SECRET] = world.secret
    server = RedisConfig(
        url=f"unix://{world.redis.server.socket}", secret_variable=SECRET, timeout_s=30.0
    )
    places = {"redis": StoreConfig(memory_bytes=0, redis=server, tenant=tenant)}
    for replica in world.serving:
        folder = replica.kv / "tenants" / tenant / "kv"
        if folder.is_dir():
            places[replica.name] = StoreConfig(
                memory_bytes=0, directory=str(folder), read_only=True
            )
    for place, config in places.items():
        with open_store(config) as store:
            for info in store.contents.infos():
                yield place, info
