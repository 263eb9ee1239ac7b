"""Shared fixtures: one thread, no network, tiny models."""

import math
import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import pytest_socket
import torch

from ragkv import Engine
from ragkv.control import controller, profile_in_use, profiler
from ragkv.model.cpu import product_speed
from tests.cluster.servers import RedisServer, S3Server, with_credentials
from tests.reader import READER

os.environ.setdefault("RAGKV_MODEL", READER)  # where a test names no model

# Neither a busy machine nor a rare case fails a run by chance: each run tries the same cases,
# however long they take.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")


@pytest.fixture(autouse=True, scope="session")
def _speeds_apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured speeds in a folder of the tests, not in the user's."""
    folder = tmp_path_factory.mktemp("speeds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_speed, "cache_folder", lambda _: folder)
        patch.setattr(profile_in_use, "cache_folder", lambda _: folder / "profiles")
        yield


@pytest.fixture(autouse=True, scope="session")
def _profiles_on_demand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No engine measures a profile by itself while a test waits, or finds one that the user's
    engines or other runs have kept: it would decide otherwise then.

    And prompts of a few tokens are fused, though they gain nothing.
    """
    profiles = tmp_path_factory.mktemp("profiles")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_in_use, "cache_folder", lambda kind: profiles / kind)
        patch.setattr(profiler, "QUIET_S", 3600.0)
        patch.setattr(controller, "MOST_ROWS", math.inf)
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A Redis server that tests share, each with its own prefix: none may stop or empty it."""
    pytest_socket.enable_socket()  # this fixture runs before the mark of the test takes effect
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """A server of objects that tests share, each with its own prefix."""
    pytest_socket.enable_socket()
    with_credentials()
    with S3Server() as server:
        yield server


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine on a tiny llama, with all settings as they are by default; many modules have one of
    their own.
    """
    from tests.engine.helpers import engine_of  # what it imports takes long to load

    with engine_of() as engine:
        yield engine


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """A Redis server of one test alone, which may stop it."""
    pytest_socket.enable_socket()
    with RedisServer() as server:
        yield server
