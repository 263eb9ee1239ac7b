"""Commands ask the server that has a home. Its model is loaded already, so they need not load one.

Only a server on this machine is asked, and only if it needs no key. A key has documents of its own,
which are not those of the home. If anything goes wrong, the command reads the home itself. This
module loads neither torch nor `ragkv.rag`, because loading them takes most of a command's
time.
"""

import contextlib
import http.client
import importlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ragkv.errors import InputError
from ragkv.home import model_or_default
from ragkv.runtime import duration, server_file
from ragkv.store.writer_lock import check_unlocked
from ragkv.types import Answer, Citation, PromptSpan, Reuse, Timing

from .output import print_note

if TYPE_CHECKING:
    from ragkv.retrieval import Hit
    from ragkv.runtime.server_file import ServerAddress

LIVE_S = 2.0  # The longest wait for /readyz, which answers at once.
LOG = "server.log"  # What a server that a command started says, in its home.
POLL_S = 0.05  # until a server that is being started is asked again
ANSWER_S = 600.0  # The longest wait for an answer; the server's own deadline is shorter by default.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedAnswer:
    """An answer, with the fields of `RagAnswer`. Of a server's, token ids and the ids of passages
    are not known.
    """

    answer: Answer
    hits: "tuple[Hit, ...]"  # in prompt order


class Refused(Exception):
    """The server gave no answer; the text says why."""


class NotFound(Refused):
    """What the path names is not there."""


FAULTS = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, Refused)


def _is_there(address: "ServerAddress | None", pid: int) -> bool:
    """Whether the process answers at its address: it says where it will listen before it does."""
    if address is None or address.pid != pid:
        return False
    with contextlib.suppress(Refused):  # the question will say why
        try:
            is_ready(address)
        except OSError:
            return False
    return True


def server_of(home: Path, model: str) -> "ServerAddress | None":
    """Where the server of `home` listens.

    `None` if it has another model than the given one, or if its default collection is not the one
    that `ragkv ingest` fills.
    """
    address = server_file.load(home)
    if address is None or (home / "collections" / "default").exists():
        return None
    return address if model_or_default(model, address.model) == address.model else None


def living_server(home: Path) -> "ServerAddress | None":
    """Where the server of `home` listens, whatever it serves, if it answers."""
    address = server_file.load(home)
    return address if address is not None and _is_there(address, address.pid) else None


def ask_server(
    home: Path,
    model: str,
    path: str,
    body: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], T],
) -> T | None:
    """What `read` makes of the response to a POST at the server of `home`, with a note; `None` if
    it gives none.
    """
    if (address := server_of(home, model)) is None:
        return None
    # for `read`, meanwhile
    threading.Thread(target=importlib.import_module, args=("ragkv.retrieval",)).start()
    try:
        answered = read(_asked(address, "POST", path, body))
    except FAULTS as error:
        print_note(f"the server at {address.url} does not answer this question: {error}")
        return None
    print_note(
        f"the server at {address.url} (pid {address.pid}), which has this home, answered, with "
        "its settings."
    )
    return answered


def request(
    address: "ServerAddress",
    method: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    missing: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """The JSON of a response; `missing` for what is not there. Raises `InputError` for another
    error.
    """
    try:
        return _asked(address, method, path, body)
    except FAULTS as error:
        if isinstance(error, NotFound) and missing is not None:
            return missing
        raise InputError(f"The server at {address.url} says: {error}") from error


class KeptServer:
    """The server of a home, started when it is asked something while there is none."""

    def __init__(self, home: Path, model: str, settings: Path | None, idle_s: float) -> None:
        """The arguments are those of `start_server`."""
        self._how = (home, model, settings, idle_s)
        self._starting = threading.Lock()

    def send(self, method: str, path: str, body: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The JSON of a response. Raises `InputError` for one that is an error, and what
        `start_server` raises.
        """
        home, model, *_ = self._how
        with self._starting:
            if (address := server_of(home, model)) is None:
                start_server(*self._how)
                address = server_of(home, model)
        if address is None:
            raise InputError(f"The server of {home} ended at once; {home / LOG} says why.")
        return request(address, method, path, body)


def _asked(
    address: "ServerAddress", method: str, path: str, body: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What `send` gives, once the server has loaded its model."""
    while not is_ready(address):
        time.sleep(POLL_S)
    return send(address, method, path, body, ANSWER_S)


def is_ready(address: "ServerAddress") -> bool:
    """Whether a server has loaded its model. Raises `Refused` for one that could not."""
    try:
        send(address, "GET", "/readyz", None, LIVE_S)
    except Refused as error:
        if str(error) == server_file.LOADING:
            return False
        raise
    return True


def start_server(home: Path, model: str, settings: Path | None, idle_s: float) -> None:
    """Start a server of `home` that ends when it was idle for `idle_s`; returns when it is there,
    loading its model.

    Raises `StoreLockedError` if another process writes to the home, and `InputError` if the server
    does not start.
    """
    check_unlocked(home / "kv")
    options = [
        "--home",
        home,
        "--port",
        "0",
        "--idle",
        f"{idle_s}",
        *(["--model", model] if model else []),
    ]
    options += [] if settings is None else ["--config", settings]
    log = home / LOG
    with log.open("wb") as out:
        command = [sys.executable, "-m", "ragkv", "serve", *map(str, options)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    while not _is_there(server_of(home, model), process.pid):
        if process.poll() is not None:
            said = log.read_text("utf-8", "replace").strip().splitlines() or ["nothing"]
            raise InputError(f"The server did not start; {log} ends with: {said[-1]}")
        time.sleep(POLL_S)
    process.returncode = 0  # or Python warns that it goes on without this command
    print_note(
        "a server keeps the model for the next questions, and ends when it was idle for "
        f"{duration(idle_s)}."
    )


def send(
    address: "ServerAddress",
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_s: float,
) -> dict[str, Any]:
    """The JSON of a response. Raises `Refused` for an error, and if another process answers."""
    # past any proxy
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(
            method, path, data, {"content-type": "application/json", "accept": "application/json"}
        )
        response = connection.getresponse()
        if response.getheader("x-replica") != address.replica:
            raise Refused("another process listens there")
        found = json.loads(response.read())
        if response.status not in (200, 201):
            kind = NotFound if response.status == 404 else Refused
            raise kind(str(found["error"]["message"] if "error" in found else found["reason"]))
        return dict(found)
    finally:
        connection.close()


def served_answer(found: Mapping[str, Any]) -> ServedAnswer:
    """A response of `/v1/ask` as the values of the library."""
    reuse = {name: value for name, value in found["reuse"].items() if name != "tokens"}
    answer = Answer(
        text=found["answer"],
        token_ids=(),
        finish_reason=found["finish_reason"],
        timing=Timing(**found["timing"]),
        reuse=Reuse(
            **{**reuse, "notes": tuple(reuse["notes"]), "decision": tuple(reuse["decision"])}
        ),
        citations=tuple(
            Citation(
                one["number"] - 1,
                one["start"],
                one["end"],
                found["sources"][one["number"] - 1]["source"],
            )
            for one in found["citations"]
        ),
        spans=tuple(_span(one) for one in found["prompt"]),
    )
    return ServedAnswer(answer, hits_of(found["sources"]))


def hits_of(sources: Sequence[Mapping[str, Any]]) -> "tuple[Hit, ...]":
    """The sources of a response as hits, in their order."""
    from ragkv.retrieval import Hit, Passage

    hits = []
    scores = sorted((one["score"] for one in sources), reverse=True)
    for one in sources:
        metadata = {name: one[name] for name in ("title", "page") if one.get(name) is not None}
        place = ((one["start"], one["end"]), one["source"], metadata, one.get("page"))
        passage = Passage("", one["document_id"], one["text"], *place)
        hits.append(Hit(passage, one["score"], scores.index(one["score"]) + 1))
    return tuple(hits)


def _span(one: Mapping[str, Any]) -> PromptSpan:
    chunk = None if one["number"] is None else one["number"] - 1
    recomputed_at = tuple(one["recomputed_at"])
    return PromptSpan(
        one["kind"], one["start"], one["tokens"], one["state"], recomputed_at, chunk, one["why"]
    )
