"""The client of a vLLM server."""

import socket
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import uvicorn

from ragkv.errors import AnswerServerError
from ragkv.runtime import no_check
from ragkv.vllm.front import VllmServer

pytest.importorskip("openai")


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    import pytest_socket

    pytest_socket.enable_socket()
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(60)
def test_a_thread_that_waits_for_a_token_goes_on_when_the_client_is_closed(silent: str) -> None:
    with VllmServer(silent) as server:
        stream = server.stream((1, 2), {})
        server.close()
        with pytest.raises(AnswerServerError, match="closed"):
            stream.next(no_check)


class Between(Future[int]):
    """It ends between the end of a wait and a look whether it has ended."""

    def done(self) -> bool:
        self.set_result(7)
        return True


def test_what_comes_as_a_wait_ends_is_no_timeout(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Between()
    monkeypatch.setattr(VllmServer, "submit", lambda *_: answer)
    with VllmServer(silent) as server:
        assert server.wait(None, check=answer.done) == 7  # type: ignore[arg-type]


def test_an_idle_connection_is_given_up_long_before_vllm_closes_it() -> None:
    with VllmServer("http://127.0.0.1:1") as server:  # vLLM has uvicorn's default
        assert (
            2 * server._http._transport._pool._keepalive_expiry
            <= uvicorn.Config("app").timeout_keep_alive
        )
