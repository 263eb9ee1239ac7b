"""What `serving.run` runs about stores that fail: Redis between two homes, its kill, and a disk
that stalls.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv import Engine, StoreConfig
from ragkv.config import RedisConfig
from tests.cluster.servers import RedisServer

from . import models
from .scenarios import NEW_TOKENS, Prompt, Setup, asked, generated, ids, named, printed, report

CHUNKS = 3
AGAIN_S = 120.0  # a generous limit for what comes back after an outage


def redis(folder: Path) -> Any:
    """One ingest fills Redis; a vLLM with a home of its own reads it; then Redis stalls, comes back
    and is killed.
    """
    setup = Setup(folder, "llama")
    prompts = [_prompt(seed) for seed in range(4)]
    with RedisServer() as server:
        wanted = [_wanted(setup, prompt) for prompt in prompts]
        store = StoreConfig(
            directory=str(folder / "ingest" / "kv"), redis=RedisConfig(url=server.url)
        )
        with Engine.from_pretrained(setup.model, replace(setup.config, store=store)) as engine:
            for chunks, _ in prompts:
                engine.entries.encode(chunks)
            engine.flush()
        llm = setup.vllm({"store": {"memory_bytes": 0, "redis": {"url": server.url}}})
        wishes = [named(prompt) for prompt in prompts]
        given = [ids(prompt) for prompt in prompts]
        found: dict[str, Any] = {"prompts": len(prompts)}

        outputs = asked(llm, given, wishes)
        found["fused from Redis"] = sum(
            generated(one) == own[()] for one, own in zip(outputs, wanted, strict=True)
        )
        found["bytes from Redis"] = sum(
            report(one)["bytes_by_tier"].get("redis", 0) > 0 for one in outputs
        )
        found["fused differ from full"] = sum(own[()] != own[(0, 1, 2)] for own in wanted)

        server.pause()
        outputs = asked(llm, given, wishes)
        found["right while Redis stalls"] = _right(outputs, wanted)
        server.resume()
        ends = time.monotonic() + AGAIN_S
        while True:
            outputs = asked(llm, given, wishes)
            found["fused again"] = sum(
                report(one).get("missed_chunks", CHUNKS) == 0 for one in outputs
            )
            if found["fused again"] == len(prompts) or time.monotonic() > ends:
                break
            time.sleep(0.5)
        found["right after the stall"] = _right(outputs, wanted)

        outputs = _killed_meanwhile(llm, server, given, wishes)
        found["right when Redis is killed"] = _right(outputs, wanted)
        outputs = asked(llm, given, wishes)
        found["right without Redis"] = _right(outputs, wanted)
        found["full without Redis"] = sum(report(one)["promised_tokens"] == 0 for one in outputs)
        return found


def stalled(folder: Path) -> Any:
    """The files of half of the prompts are pipes without a writer: opening them never ends."""
    setup = Setup(folder, "llama")
    prompts = [_prompt(seed) for seed in range(4)]
    setup.stored(prompts)
    wanted = [_wanted(setup, prompt) for prompt in prompts]
    llm = setup.vllm({"timeout_s": 2.0, "store": {"memory_bytes": 0}})
    given = [ids(prompt) for prompt in prompts]
    before = asked(llm, given, [{"ratio": 0.0}] * len(prompts))
    pipes = [path for path in (folder / "home" / "kv" / "entries").rglob("*") if path.is_file()]
    for path in pipes:
        path.unlink()
        os.mkfifo(path)
    during = asked(llm, given, [{"ratio": 0.0}] * len(prompts))
    found = {
        "prompts": len(prompts),
        "fused before": sum(
            generated(one) == own[()] for one, own in zip(before, wanted, strict=True)
        ),
        "full during": sum(
            generated(one) == own[(0, 1, 2)] for one, own in zip(during, wanted, strict=True)
        ),
        "fused differ from full": sum(own[()] != own[(0, 1, 2)] for own in wanted),
        "notes": [note for one in during for note in report(one)["notes"]],
    }
    _release(pipes)
    return found


def _prompt(seed: int) -> Prompt:
    chunks = [models.tokens(40 + 3 * index, 7000 + 10 * seed + index) for index in range(CHUNKS)]
    return chunks, models.tokens(5, 7000 + 10 * seed + 9)


def _wanted(setup: Setup, prompt: Prompt) -> dict[tuple[int, ...], list[int]]:
    """ragkv's own tokens, by the chunks that have no stored KV.

    At ratio 0: the scores that choose tokens depend on what an engine encoded before.
    """
    chunks, question = prompt
    found = {}
    for count in range(CHUNKS + 1):
        for missing in itertools.combinations(range(CHUNKS), count):
            with Engine.from_pretrained(
                setup.model, replace(setup.config, store=StoreConfig())
            ) as engine:
                engine.entries.encode(
                    [chunk for at, chunk in enumerate(chunks) if at not in missing]
                )
                answer = engine.answer(question, chunks, ratio=0.0, max_new_tokens=NEW_TOKENS)
                found[missing] = list(answer.token_ids)
    return found


def _right(outputs: Sequence[Any], wanted: Sequence[dict[tuple[int, ...], list[int]]]) -> int:
    """How many outputs have the tokens that belong to as many missed chunks as their
    reports say.
    """
    right = 0
    for output, own in zip(outputs, wanted, strict=True):
        missed = report(output)["missed_chunks"] if report(output)["promised_tokens"] else CHUNKS
        right += any(
            generated(output) == tokens for missing, tokens in own.items() if len(missing) == missed
        )
    return right


def _killed_meanwhile(
    llm: Any, server: RedisServer, prompts: Sequence[list[int]], wishes: Sequence[Any]
) -> list[Any]:
    """The outputs of prompts that were being fused when Redis was killed."""
    from vllm import SamplingParams

    names = [f"killed-{index}" for index in range(len(prompts))]
    for name, prompt, wish in zip(names, prompts, wishes, strict=True):
        extra = {"kv_transfer_params": {"ragkv": wish}}
        params = SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=0.0,
            detokenize=False,
            ignore_eos=True,
            extra_args=extra,
        )
        llm.llm_engine.add_request(
            name, {"prompt_token_ids": list(prompt), "cache_salt": name}, params
        )
    llm.llm_engine.step()
    server.kill()
    outputs: dict[str, Any] = {}
    while llm.llm_engine.has_unfinished_requests():
        outputs |= {one.request_id: one for one in llm.llm_engine.step() if one.finished}
    return [next(one for key, one in outputs.items() if key.startswith(name)) for name in names]


def _release(pipes: Sequence[Path]) -> None:
    """End the opening of every pipe, so that the process can end."""
    for path in pipes:
        path.rename(path.with_suffix(".old"))  # it is not opened again
    for path in pipes:
        try:
            os.close(os.open(path.with_suffix(".old"), os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            continue  # it was not being opened


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        printed({"redis": redis, "stalled": stalled}[sys.argv[1]](Path(made)))
