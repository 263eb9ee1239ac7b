"""`ragkv keys`: the keys of a server are made, listed, revoked and replaced. A running server needs no restart."""

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.errors import InputError

from . import output
from .options import HOME, AsJson, Home
from .output import console, print_json

if TYPE_CHECKING:
    from ragkv.api import Key, KeyFile

DAY_S, HOUR_S = 86_400.0, 3_600.0

keys = typer.Typer(help="API keys of `ragkv serve`: add, list, revoke, rotate.", no_args_is_help=True)

File = Annotated[Path | None, typer.Option("--file", help="The file of keys [default: keys.json in the home].")]
Id = Annotated[str, typer.Argument(help="The key's id, as `ragkv keys list` shows it.")]


@keys.command()
def add(
    name: Annotated[str, typer.Argument(help="What to call it: who it is for.")],
    home: Home = HOME,
    file: File = None,
    tenant: Annotated[str | None, typer.Option(help="Share a tenant's documents and KV [default: its own].")] = None,
    disk_bytes: Annotated[int | None, typer.Option(min=0, help="KV the tenant may keep on disk.")] = None,
    memory_bytes: Annotated[int | None, typer.Option(min=0, help="KV the tenant may keep in memory.")] = None,
    documents: Annotated[int | None, typer.Option(min=0, help="Documents the tenant may hold.")] = None,
    sessions: Annotated[int | None, typer.Option(min=0, help="Conversations the tenant may hold.")] = None,
    rpm: Annotated[int | None, typer.Option(min=1, help="Requests a minute.")] = None,
    tpm: Annotated[int | None, typer.Option(min=1, help="Tokens a minute, of prompts and answers.")] = None,
    days: Annotated[float | None, typer.Option(min=0, help="It is accepted for so long [default: for ever].")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and show it, this once. Keys of one tenant share its quota; giving it again changes it."""
    from ragkv.api import Quota, Rate

    quota = Quota(disk_bytes, memory_bytes, documents, sessions)
    lifetime_s = None if days is None else days * DAY_S
    secret, key = _file(home, file).add(name, tenant, quota, Rate(rpm, tpm), lifetime_s)
    _show_new(secret, key, as_json)


@keys.command("list")
def list_(home: Home = HOME, file: File = None, as_json: AsJson = False) -> None:
    """The keys there are, without what would let anyone in."""
    from ragkv.api import Quota

    book = _file(home, file).read()
    if as_json:
        quotas = {key.id: output.plain(book.quotas.get(key.tenant, Quota())) for key in book.keys}
        print_json([{**_plain(key), "quota": quotas[key.id]} for key in book.keys])
        return
    if not book.keys:
        console.print("No keys.")
    for key in book.keys:
        quota = book.quotas.get(key.tenant, Quota())
        limits = {**output.plain(quota), **output.plain(key.rate)}
        said = "".join(f", {what} {value}" for what, value in limits.items() if value is not None)
        ends = "" if key.expires is None else f", until {_day(key.expires)}"
        ended = "" if key.is_valid(time.time()) else " (past its time)"
        line = f"{key.id}  {key.name}, tenant {key.tenant}, made {_day(key.created)}{ends}{ended}{said}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


@keys.command()
def revoke(key_id: Id, home: Home = HOME, file: File = None) -> None:
    """Refuse a key from now on. What its tenant holds stays."""
    key = _file(home, file).revoke(key_id)
    console.print(f"Revoked {key.id} ({key.name}).", markup=False, highlight=False)


@keys.command()
def rotate(
    key_id: Id,
    home: Home = HOME,
    file: File = None,
    hours: Annotated[float, typer.Option(min=0, help="The old key is accepted for so long.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Make a key in place of another, for the same tenant at the same rate, and show it, this once."""
    secret, key = _file(home, file).rotate(key_id, hours * HOUR_S)
    _show_new(secret, key, as_json)


def _file(home: Path, file: Path | None) -> "KeyFile":
    from ragkv.api import KeyFile

    if file is None and home.exists() and not home.is_dir():
        raise InputError(f"{home} is not a folder.")
    return KeyFile(file or home / "keys.json")


def _show_new(secret: str, key: "Key", as_json: bool) -> None:
    """The key alone goes to standard output, so that it can be piped; what to do with it does not."""
    if as_json:
        print_json({**_plain(key), "key": secret})
        return
    output.errors.print(
        f"Key {key.id} ({key.name}) of tenant {key.tenant}. It is not kept and cannot be shown again:",
        markup=False,
        highlight=False,
    )
    console.out(secret, highlight=False)


def _plain(key: "Key") -> dict[str, Any]:
    shown = output.plain(key)
    shown.pop("digest")
    return dict(shown)


def _day(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
