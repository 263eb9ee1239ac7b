"""The child processes of `test_sharing.py`: they write, read and delete on a shared server, until they are killed."""

import itertools
import random

from ragkv.config import RedisConfig, StoreConfig
from ragkv.store import Store
from tests.store.entries import IDENTITY, read_all, same

from .writing import entry_of

NUMBERS = 40


def config_of(url: str, prefix: str) -> StoreConfig:
    """Entries of many layer groups, so that a kill often comes in the middle of one."""
    redis = RedisConfig(url=url, prefix=prefix, timeout_s=5.0, group_bytes=16 * 1024)
    return StoreConfig(memory_bytes=0, redis=redis)


def use_for_ever(url: str, prefix: str, seed: int) -> None:
    """Ends with an error if wrong bytes are served."""
    choose = random.Random(seed)
    with Store.open(config_of(url, prefix)) as store:
        for _ in itertools.count():
            entry = entry_of(choose.randrange(NUMBERS))
            action = choose.random()
            if action < 0.4:
                store.put_durably(entry)
            elif action < 0.5:
                store.delete(entry.info.key)
            else:
                serve(store, entry.info.token_ids[0] // 1000)


def serve(store: Store, number: int) -> bool:
    """Whether the entry was served; wrong bytes fail."""
    from ragkv.errors import EntryDamagedError

    entry = entry_of(number)
    lease = store.lease(IDENTITY, entry.info.token_ids)
    if lease is None:
        return False
    with lease:
        try:
            found = read_all(lease)
        except EntryDamagedError:  # another process deleted or evicted it meanwhile
            return False
    assert same(found, entry), "wrong bytes were served"
    return True
