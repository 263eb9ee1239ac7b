"""The child processes of `test_sharing.py`: they write, read and delete on a shared server, until
they are killed.
"""

import itertools
import random

from ragkv.config import RedisConfig, StoreConfig
from ragkv.store.opening import open_store
from tests.store.entries import served

from .writing import entry_of

NUMBERS = 40


def config_of(url: str, prefix: str) -> StoreConfig:
    """Entries of many layer groups, so that a kill often comes in the middle of one."""
    redis = RedisConfig(url=url, prefix=prefix, timeout_s=5.0, group_bytes=16 * 1024)
    return StoreConfig(memory_bytes=0, redis=redis)


def use_for_ever(url: str, prefix: str, seed: int) -> None:
    """Ends with an error if wrong bytes are served."""
    choose = random.Random(seed)
    with open_store(config_of(url, prefix)) as store:
        for _ in itertools.count():
            entry = entry_of(choose.randrange(NUMBERS))
            action = choose.random()
            if action < 0.4:
                store.durable.put(entry)
            elif action < 0.5:
                store.delete(entry.info.key)
            else:
                served(store, entry)
