"""`ragkv keys`: adds, lists and revokes the API keys of a server. A running server needs no
restart.
"""

import datetime
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.errors import InputError

from . import output
from .options import HOME, AsJson, Home, command_group
from .output import console, print_json

if TYPE_CHECKING:
    from ragkv.api import Key, KeyFile

DAY_S = 86_400.0

keys = command_group("API keys of `ragkv serve`: add, list, revoke.", name="keys")

File = Annotated[
    Path | None,
    typer.Option("--file", help="The file of keys.", show_default="keys.json in the home"),
]
Id = Annotated[str, typer.Argument(help="The key's id, as `ragkv keys list` shows it.")]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="A name for the key, such as its owner's.")],
    home: Home = HOME,
    file: File = None,
    tenant: Annotated[
        str | None,
        typer.Option(help="Share this tenant's documents and KV.", show_default="its own"),
    ] = None,
    disk_bytes: Annotated[
        int | None, typer.Option(min=0, help="Documents and KV of the tenant on disk, together.")
    ] = None,
    memory_bytes: Annotated[
        int | None, typer.Option(min=0, help="KV that the tenant may keep in memory.")
    ] = None,
    documents: Annotated[
        int | None, typer.Option(min=0, help="Documents that the tenant may have.")
    ] = None,
    sessions: Annotated[
        int | None, typer.Option(min=0, help="Conversations that the tenant may have.")
    ] = None,
    collections: Annotated[
        int | None, typer.Option(min=0, help="Collections that the tenant may have.")
    ] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests per minute.")] = None,
    tpm: Annotated[
        int | None, typer.Option(min=1, help="Tokens per minute, of prompts and answers.")
    ] = None,
    days: Annotated[
        float | None, typer.Option(min=0, help="Days until it expires.", show_default="never")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and show it once. The keys of a tenant share its quota; a quota given here
    replaces the old one.
    """
    from ragkv.api import Quota, RateLimit

    quota = Quota(disk_bytes, memory_bytes, documents, sessions, collections)
    lifetime_s = None if days is None else days * DAY_S
    secret, key = _key_file(home, file).add(name, tenant, quota, RateLimit(rpm, tpm), lifetime_s)
    _show_new(secret, key, as_json)


@keys.command("list")
def list_(home: Home = HOME, file: File = None, as_json: AsJson = False) -> None:
    """List the keys without their secrets."""
    from ragkv.api import Quota

    book = _key_file(home, file).read()
    quotas = {key.id: asdict(book.quotas.get(key.tenant, Quota())) for key in book.keys}
    if as_json:
        print_json([{**_without_digest(key), "quota": quotas[key.id]} for key in book.keys])
        return
    if not book.keys:
        console.print("No keys.")
    for key in book.keys:
        limits = {**quotas[key.id], **asdict(key.rate)}
        limited = "".join(
            f", {name} {value}" for name, value in limits.items() if value is not None
        )
        ends = "" if key.expires is None else f", until {_day(key.expires)}"
        ended = "" if key.is_valid(time.time()) else " (expired)"
        line = (
            f"{key.id}  {key.name}, tenant {key.tenant}, made "
            f"{_day(key.created)}{ends}{ended}{limited}"
        )
        console.print(line)


@keys.command()
def revoke(key_id: Id, home: Home = HOME, file: File = None) -> None:
    """Refuse a key from now on. The data of its tenant stays."""
    key = _key_file(home, file).revoke(key_id)
    console.print(f"Revoked {key.id} ({key.name}).")


def _key_file(home: Path, file: Path | None) -> "KeyFile":
    from ragkv.api import KeyFile

    if file is None and home.exists() and not home.is_dir():
        raise InputError(f"{home} is not a folder.")
    return KeyFile(file or home / "keys.json")


def _show_new(secret: str, key: "Key", as_json: bool) -> None:
    """Print the key alone on standard output, so that it can be piped, and the explanation on
    standard error.
    """
    if as_json:
        print_json({**_without_digest(key), "key": secret})
        return
    note = (
        f"Key {key.id} ({key.name}) of tenant {key.tenant}. It is not stored and cannot be "
        "shown again:"
    )
    output.errors.print(note)
    console.print(secret)


def _without_digest(key: "Key") -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name != "digest"}


def _day(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
