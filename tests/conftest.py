"""Shared fixtures: one thread, no network, tiny models. Tests of generated cases have no time limit of their own."""

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import pytest_socket
import torch

from tests.store.remote.servers import RedisServer

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine must not fail a test
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis server that tests share, each with its own prefix: none may stop or empty it."""
    pytest_socket.enable_socket()  # this fixture runs before the mark of the test takes effect
    server = RedisServer()
    yield server
    server.remove()
