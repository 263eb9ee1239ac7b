"""Servers that are started once, for the tests that ask for them."""

from collections.abc import Iterator

import pytest
import pytest_socket

from .remote.servers import RedisServer, S3Server, with_credentials


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    pytest_socket.enable_socket()  # the first test that asks for this fixture may be one that forbids sockets
    server = RedisServer()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    pytest_socket.enable_socket()
    with_credentials()
    server = S3Server()
    yield server
    server.kill()
