"""Every table of names: each row is in its order, and leads to what its contract asks for."""

from collections.abc import Mapping
from pkgutil import resolve_name
from typing import Any

import pytest

from ragkv import registry
from ragkv.config import EngineConfig, StoreConfig
from ragkv.errors import ConfigError
from ragkv.fusion import Selector
from ragkv.retrieval.documents.formats import FORMATS
from ragkv.store.codecs import Codec
from ragkv.store.policies import Policy
from ragkv.store.tiers import Tier

TABLES = {
    name: table
    for name, table in vars(registry).items()
    if name.isupper() and isinstance(table, Mapping)
}
CONTRACTS: dict[str, type] = {"SELECTORS": Selector, "CODECS": Codec, "POLICIES": Policy}
SETTINGS = {
    "SELECTORS": "fusion.selector",
    "CODECS": "store.codec",
    "POLICIES": "store.policy",
    "DISCARDING_LISTS": "session.discard",
}


def rows_of(table: str) -> dict[str, str]:
    """Where each name of a table leads."""
    return {
        name: row.opener if isinstance(row, registry.TierRow) else row
        for name, row in TABLES[table].items()
    }


@pytest.mark.parametrize("table", TABLES)
def test_each_row_leads_to_what_its_contract_asks_for(table: str) -> None:
    for name, place in rows_of(table).items():
        found: Any = resolve_name(place)
        if table in CONTRACTS:
            assert issubclass(found, CONTRACTS[table])
            assert getattr(found, "name", name) == name  # as reports and files have it
        else:
            assert callable(found) or all(map(callable, found))


@pytest.mark.parametrize("table", sorted(set(TABLES) - {"TIERS"}))
def test_names_are_in_alphabetical_order_but_for_tiers(table: str) -> None:
    assert list(TABLES[table]) == sorted(TABLES[table])


def test_every_tier_has_a_setting_that_asks_for_it() -> None:
    for row in registry.TIERS.values():
        getattr(StoreConfig(), row.setting)


def test_a_tier_of_the_store_is_opened_by_a_function_in_the_file_of_its_class() -> None:
    for kind, row in registry.TIERS.items():
        opener = resolve_name(row.opener)
        assert opener.__name__ == f"open_{kind}"
        if row.opener.startswith("ragkv.store."):
            module = resolve_name(opener.__module__)
            classes = [one for one in vars(module).values() if isinstance(one, type)]
            own = [one for one in classes if one.__module__ == module.__name__]
            assert any(issubclass(one, Tier) for one in own)


def test_the_endings_of_documents_lead_to_loaders() -> None:
    for place in set(FORMATS.values()):
        assert callable(resolve_name(f"ragkv.retrieval.documents.{place}"))


@pytest.mark.parametrize("table", SETTINGS)
def test_a_setting_takes_the_names_of_its_table_and_refuses_others_by_listing_them(
    table: str,
) -> None:
    group, _, setting = SETTINGS[table].partition(".")
    more = {"xi_tokens": 512} if table == "POLICIES" else {}
    for name in TABLES[table]:
        EngineConfig.from_dict({group: {setting: name, **more}})
    known = ", ".join(TABLES[table])
    with pytest.raises(ConfigError, match=f"{group}.{setting} is 'bogus'; .* one of: {known}"):
        EngineConfig.from_dict({group: {setting: "bogus"}})
