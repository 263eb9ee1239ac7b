"""Processes that share a Redis server and are killed at random: wrong bytes are never served."""

import multiprocessing
import random
import time

import pytest

from ragkv.cluster import RemoteTier
from ragkv.store.opening import open_store
from tests.cluster.helpers import counted, unique_prefix
from tests.cluster.servers import RedisServer
from tests.scheduling.helpers import until
from tests.store.entries import served

from .sharing import NUMBERS, config_of, use_for_ever
from .writing import entry_of

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.stress.sharing"])


@pytest.mark.parametrize("kills", [6, pytest.param(100, marks=pytest.mark.slow)])
def test_three_processes_killed_at_random_leave_right_entries(
    redis_server: RedisServer, kills: int
) -> None:
    choose = random.Random(1)
    url = f"unix://{redis_server.socket}"
    prefix = unique_prefix()

    def start(seed: int) -> multiprocessing.process.BaseProcess:
        child = FORKSERVER.Process(target=use_for_ever, args=(url, prefix, seed), daemon=True)
        child.start()
        return child

    children = [start(seed) for seed in range(3)]
    with open_store(config_of(url, prefix)) as store:
        until(lambda: counted(store.tiers[0]).used_bytes >= 10**6, every_s=0.05)
    for kill in range(kills):
        time.sleep(0.5 * choose.random())
        victim = choose.randrange(3)
        assert children[victim].is_alive(), (
            f"a child ended without a kill, with {children[victim].exitcode}"
        )
        children[victim].kill()
        children[victim].join()
        children[victim] = start(3 + kill)
    for child in children:
        child.kill()
        child.join()

    with open_store(config_of(url, prefix)) as store:
        (tier,) = store.tiers
        assert isinstance(tier, RemoteTier)
        assert sum(served(store, entry_of(number)) for number in range(NUMBERS)) > 3
        for number in range(NUMBERS):  # an entry that was half written can be written again
            assert store.durable.put(entry_of(number))
            assert served(store, entry_of(number))
        assert counted(tier).entries == len(list(tier.infos())) == NUMBERS
