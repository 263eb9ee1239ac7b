"""MCP's own client over standard streams and in the REST service: tools, refusals, and what guards
the HTTP side.
"""

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs mcp (extra mcp)")
pytest.importorskip("fastapi", reason="needs fastapi (extra api)")

import httpx
import httpx2
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from ragkv import Engine
from ragkv.api import ServeConfig, create_app
from ragkv.config import StoreConfig
from ragkv.integrations.mcp import mount
from ragkv.runtime import server_file
from ragkv.store.opening import open_store
from tests.api.helpers import BARE, on_port
from tests.api.serving import process
from tests.cli.conftest import Run, documents, model_folder, run  # noqa: F401 - fixtures
from tests.cli.test_two_processes import DRIVER

pytestmark = [pytest.mark.enable_socket, pytest.mark.timeout(600)]
TOOLS = {"search", "ask", "list_documents", "add_document"}


@pytest.fixture
def home(
    run: Run,  # noqa: F811
    documents: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    monkeypatch.setenv("RAGKV_FUSION__FLOOR_TOKENS", "0")
    assert run("ingest", documents).code == 0
    yield tmp_path / "home"
    if (left := server_file.load(tmp_path / "home")) is not None and left.pid != os.getpid():
        os.kill(left.pid, signal.SIGTERM)


def command(*more: str) -> list[str]:
    return [sys.executable, "-c", DRIVER, "mcp", *more]


@asynccontextmanager
async def stdio(log: Path, *more: str) -> AsyncIterator[Client]:
    """A client of `ragkv mcp` over standard streams. Its standard error goes to `log`."""
    program, *arguments = command(*more)
    with log.open("w") as errors:
        server = StdioServerParameters(command=program, args=arguments, env=dict(os.environ))
        async with Client(stdio_client(server, errlog=errors)) as client:
            yield client


async def call(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def refusal(client: Client, tool: str, **arguments: Any) -> str:
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)


async def check_tools(client: Client) -> None:
    """Everything that a client does with a corpus of two documents."""
    tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert tools.keys() == TOOLS and all(tool.description for tool in tools.values())
    assert (
        tools["ask"].annotations.read_only_hint
        and not tools["add_document"].annotations.read_only_hint
    )
    assert len((await call(client, "list_documents"))["documents"]) == 2
    found = (await call(client, "search", query="Who founded Marl?", k=1))["sources"]
    assert len(found) == 1 and "Ada Quill" in found[0]["text"] and found[0]["number"] == 1
    said = await call(client, "ask", question="Who founded Marl?", max_tokens=3)
    assert (
        len(said["sources"]) == 2
        and said["prompt_tokens"] > 20
        and said["finish_reason"] in ("stop", "length")
    )
    assert 0 < said["reused_tokens"] < said["prompt_tokens"]
    for quote in said["citations"]:
        assert (
            said["sources"][quote["number"] - 1]["text"][quote["start"] : quote["end"]]
            == quote["text"]
        )
    new = {"id": "rope", "text": "The rope of Marl was made by a quill ."}
    assert [(await call(client, "add_document", **new))["change"] for _ in range(2)] == [
        "added",
        "unchanged",
    ]
    assert (await call(client, "add_document", **{**new, "text": "Rope ."}))["change"] == "changed"
    page = await call(client, "list_documents", limit=2)
    rest = await call(client, "list_documents", limit=2, after=page["next"])
    assert [one["id"] for one in rest["documents"]] == ["rope"] and rest["next"] is None


async def check_refusals(client: Client) -> None:
    for tool, given, said in (
        ("ask", {"question": "  "}, "question"),
        ("ask", {"question": "x", "max_tokens": 9999}, "less than or equal to 4096"),
        ("search", {"query": "x", "k": 0}, "greater than or equal to 1"),
        ("search", {}, "query"),
        ("add_document", {"id": "x", "text": "a\0b"}, "text"),
        ("add_document", {"id": "a\nb", "text": "x"}, "id"),
    ):
        assert said in await refusal(client, tool, **given)


@pytest.mark.usefixtures("home")
async def test_over_standard_streams_a_client_uses_all_tools(tmp_path: Path) -> None:
    async with stdio(tmp_path / "log") as client:
        await check_tools(client)
        await check_refusals(client)
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.usefixtures("home")
async def test_read_only_offers_no_tool_that_adds(tmp_path: Path) -> None:
    async with stdio(tmp_path / "log", "--read-only") as client:
        assert {tool.name for tool in (await client.list_tools()).tools} == TOOLS - {"add_document"}
        assert "Unknown tool" in await refusal(client, "add_document", id="x", text="y")


async def test_clients_share_the_server_of_the_home(home: Path, tmp_path: Path) -> None:
    async with stdio(tmp_path / "log") as one, stdio(tmp_path / "other") as other:
        assert (await call(one, "add_document", id="x", text="The mill of Marl ."))[
            "change"
        ] == "added"
        pid = server_file.load(home).pid  # type: ignore[union-attr]
        assert len((await call(other, "list_documents"))["documents"]) == 3
        assert server_file.load(home).pid == pid  # type: ignore[union-attr]


async def test_a_home_that_another_process_writes_to_is_named_with_the_process(
    home: Path, tmp_path: Path
) -> None:
    with open_store(StoreConfig(directory=str(home / "kv"))):
        async with stdio(tmp_path / "log") as client:
            assert "is written by another process" in await refusal(client, "search", query="Marl")
    async with stdio(tmp_path / "log") as client:
        assert (await call(client, "search", query="Marl"))["sources"]


@pytest.fixture
def url(home: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:  # noqa: F811
    """A REST service over the home, with MCP mounted, on a port."""
    monkeypatch.setenv("RAGKV_FUSION__FLOOR_TOKENS", "0")
    engine = Engine.from_pretrained(model_folder, BARE)
    app = create_app(ServeConfig(home=str(home)), engine=engine)
    mount(app)
    with on_port(app) as url:
        yield url


async def test_over_http_a_client_uses_all_tools(url: str) -> None:
    async with Client(f"{url}/mcp") as client:
        await check_tools(client)
        await check_refusals(client)


async def test_with_keys_only_their_holders_are_served_each_with_its_own_documents(
    url: str,
    home: Path,
    run: Run,  # noqa: F811
) -> None:
    key = run("keys", "add", "ada", "--home", home).out.strip()
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": key}):
        response = httpx.post(f"{url}/mcp", json={}, headers=headers, trust_env=False)
        assert response.status_code == 401, response.text
    held = httpx2.AsyncClient(
        headers={"authorization": f"Bearer {key}"}, trust_env=False, timeout=60
    )
    async with (
        held as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
    ):
        assert (await call(client, "add_document", id="a", text="The mill of Marl ."))[
            "change"
        ] == "added"
        listed = (await call(client, "list_documents"))["documents"]
        assert [one["id"] for one in listed] == ["a"], (
            "the documents of the home belong to who needs no key"
        )


def test_another_host_and_a_foreign_page_are_refused_as_by_the_rest_service(url: str) -> None:
    for headers, code in (
        ({"host": "evil.example"}, "host_not_allowed"),
        ({"origin": "http://evil.example"}, "cross_origin"),
        ({"origin": "null"}, "cross_origin"),
    ):
        response = httpx.post(f"{url}/mcp", json={}, headers=headers, trust_env=False)
        assert response.status_code == 403 and response.json()["error"]["code"] == code
    assert (
        httpx.get(
            f"{url}/mcp", headers={"accept": "text/event-stream"}, trust_env=False
        ).status_code
        == 405
    )


@pytest.mark.usefixtures("home")
async def test_the_serving_command_mounts_mcp_where_it_is_asked_to() -> None:
    with process([sys.executable, "-c", DRIVER, "serve", "--port", "0", "--mcp"]) as served:
        served.wait_ready()
        async with Client(f"{served.url}/mcp") as client:
            assert len((await call(client, "list_documents"))["documents"]) == 2


def test_read_only_needs_ingested_documents(run: Run) -> None:  # noqa: F811
    ran = run("mcp", "--read-only")
    assert ran.code == 1 and "Nothing was ingested" in ran.err
