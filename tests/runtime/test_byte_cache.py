"""A cache counts bytes: many small values stay, and large ones push each other out."""

from ragkv.runtime import ByteCache, cached_by_bytes
from ragkv.runtime.byte_cache import OVERHEAD_BYTES


def test_values_stay_until_their_bytes_are_too_many_and_the_oldest_go_first() -> None:
    cache = ByteCache[str, int](10 * (90 + OVERHEAD_BYTES))
    for number in range(10):
        cache.put(str(number), number, 90)
    assert cache.get("0") == 0
    cache.put("large", -1, 90)
    assert cache.get("1") is None and cache.get("0") == 0
    assert cache.used_bytes == 10 * (90 + OVERHEAD_BYTES)


def test_a_value_that_is_larger_than_the_cache_is_not_kept_and_pushes_nothing_out() -> None:
    cache = ByteCache[str, int](2000)
    cache.put("small", 1, 10)
    cache.put("huge", 2, 5000)
    assert cache.get("huge") is None and cache.get("small") == 1


def test_a_key_counts_with_its_bytes() -> None:
    made = list[str]()
    cached = cached_by_bytes(lambda key: made.append(key) or key, 100_000)  # type: ignore[func-returns-value]
    for _ in range(2):
        for letter in "abc":
            cached(letter * 20_000)
    assert len(made) == 6, "only one of three keys of 20 kB has a place at a time"
    cached("short")
    cached("short")
    assert made.count("short") == 1
