"""What `serving.run` runs: each scenario stores chunks with ragkv, starts vLLM over the store, and
compares.
"""

import itertools
import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig
from ragkv.errors import ConfigError
from ragkv.vllm.front.salts import SECRET_VARIABLE, proof
from ragkv.vllm.interface import check_interface

from . import models

NEW_TOKENS = 12
RATIOS = (0.0, 0.05, 0.15, 1.0)
Prompt = tuple[list[tuple[int, ...]], tuple[int, ...]]


class Setup:
    """A model and a store in a folder, ragkv's own answers, and vLLM with the connector."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder = folder
        self.model = folder / "model"
        models.save(family, self.model)
        self.config = EngineConfig(
            dtype="float32", packed_bytes=0, fusion=FusionConfig(floor_tokens=0)
        )

    def engine(self, tenant: str = "") -> Engine:
        """ragkv alone, writing to the store of a tenant."""
        home = self.folder / "home" / "tenants" / tenant if tenant else self.folder / "home"
        store = StoreConfig(directory=str(home / "kv"), tenant=tenant)
        return Engine.from_pretrained(self.model, replace(self.config, store=store))

    def stored(
        self, prompts: Sequence[Prompt], *ways: dict[str, Any], length: int = NEW_TOKENS
    ) -> list[list[list[int]]]:
        """Store the chunks of all prompts. Returns ragkv's own tokens: for each way to ask, those
        of each prompt.
        """
        with self.engine() as engine:
            for chunks, _ in prompts:
                engine.entries.encode(chunks)
            return [[_own(engine, prompt, length, **way) for prompt in prompts] for way in ways]

    def vllm(self, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        """vLLM with the connector."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="RagKVConnector",
            kv_connector_module_path="ragkv.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={
                "home": str(self.folder / "home"),
                "fusion": {"floor_tokens": 0},
                "refresh_s": 0.2,
                **(extra or {}),
            },
        )
        settings = dict(
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="float32",
            max_model_len=1024,
            block_size=models.BLOCK_TOKENS,
            enable_prefix_caching=True,
            max_num_seqs=4,
            kv_transfer_config=transfer,
        )
        return LLM(str(self.model), **{**settings, **options})


def ids(
    prompt: Prompt, before: Sequence[int] = (models.BOS,), after: Sequence[int] = ()
) -> list[int]:
    """A prompt as ragkv lays it out: BOS, the chunks, the question; the template's tokens where
    there is one.
    """
    chunks, question = prompt
    return [*before, *(token for chunk in chunks for token in chunk), *question, *after]


def asked(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    wishes: Sequence[dict[str, Any] | None],
    salts: Sequence[str | None] | None = None,
    **sampling: Any,
) -> Any:
    """vLLM's outputs of all prompts, sent at once; each with its wish and a salt, given or
    its own.
    """
    from vllm import SamplingParams

    settings = {
        "max_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "detokenize": False,
        "ignore_eos": True,
        **sampling,
    }
    params = [
        SamplingParams(
            **settings, extra_args=None if wish is None else {"kv_transfer_params": {"ragkv": wish}}
        )
        for wish in wishes
    ]
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    for one, wish, salt in zip(
        given, wishes, salts or [uuid.uuid4().hex for _ in given], strict=True
    ):
        if salt and wish is not None:
            one["cache_salt"] = salt  # type: ignore[assignment]
    return llm.generate(given, params, use_tqdm=False)


def generated(output: Any) -> list[int]:
    """The tokens of an output, until the end token, after which ragkv stops."""
    tokens = list(output.outputs[0].token_ids)
    return tokens[: tokens.index(2)] if 2 in tokens else tokens


def report(output: Any) -> dict[str, Any]:
    """ragkv's report in an output, with what was reused; empty if ragkv had nothing to do
    with it.
    """
    found = (output.kv_transfer_params or {}).get("ragkv", {})
    reuse = found.get("reuse", {})
    return {**reuse, **found, "notes": [*reuse.get("notes", ()), *found.get("notes", ())]}


def named(prompt: Prompt) -> dict[str, Any]:
    """The wish of a request that names its chunks."""
    ends = list(itertools.accumulate((len(chunk) for chunk in prompt[0]), initial=1))
    return {"ratio": 0.0, "chunks": [list(pair) for pair in itertools.pairwise(ends)]}


def tokens(folder: Path, family: str) -> Any:
    """For each ratio: how many of 20 prompts gave ragkv's own tokens, and how many were fused and
    differ from full.
    """
    setup = Setup(folder, family)
    prompts = [models.prompt(seed) for seed in range(20)]
    answers = setup.stored(prompts, *({"ratio": ratio} for ratio in RATIOS))
    wanted = dict(zip(RATIOS, answers, strict=True))
    llm = setup.vllm()
    found = {}
    for ratio in RATIOS:
        outputs = asked(llm, [ids(prompt) for prompt in prompts], [{"ratio": ratio}] * len(prompts))
        found[str(ratio)] = {
            "equal": _equal(outputs, wanted[ratio]),
            "fused": sum(report(output).get("fused", 0) > 0 for output in outputs),
            "promised": sum(
                report(output)["promised_tokens"] == output.num_cached_tokens for output in outputs
            ),
            "differ": sum(
                one != full for one, full in zip(wanted[ratio], wanted[1.0], strict=True)
            ),
        }
    full = asked(llm, [ids(prompt) for prompt in prompts], [{"reuse": "none"}] * len(prompts))
    cached = sum(output.num_cached_tokens for output in full)
    return {**found, "full": {"equal": _equal(full, wanted[1.0]), "cached": cached}}


def never_wrong(folder: Path) -> Any:
    """What follows fused requests: exact ones, preempted ones, aborted ones, damage, and chunks
    stored later.
    """
    setup = Setup(folder, "llama")
    prompts = [models.prompt(seed) for seed in range(20, 26)]
    late = models.prompt(40)
    length = 150
    fused, full = setup.stored(prompts, {"ratio": 0.15}, {"reuse": "none"}, length=length)
    # 24 blocks hold two of the prompts with their answers, so that vLLM preempts some of the four
    # it admits.
    llm = setup.vllm(
        {"timeout_s": 20.0}, num_gpu_blocks_override=24, max_model_len=512, disable_log_stats=False
    )
    given = [ids(prompt) for prompt in prompts]
    found: dict[str, Any] = {"prompts": len(prompts)}
    wishes: list[Any] = [{"ratio": 0.15}, {"reuse": "none"}] * 3
    outputs = asked(llm, given, wishes, max_tokens=length)
    wanted = [(fused, full)[index % 2][index] for index in range(len(prompts))]
    found["mixed"] = _equal(outputs, wanted)
    outputs = asked(llm, given, [{"reuse": "none"}] * len(given), max_tokens=length)
    found["exact after fused"] = _equal(outputs, full)
    found["promised to exact ones"] = sum(output.num_cached_tokens for output in outputs)
    found["fused differ from full"] = sum(
        one != other for one, other in zip(fused, full, strict=True)
    )
    _abort(llm, given)
    found["fused after an abort"] = _equal(
        asked(llm, given, [{"ratio": 0.15}] * len(given), max_tokens=length), fused
    )
    found["preemptions"] = _metric(llm, "vllm:num_preemptions")
    with setup.engine() as engine:  # another process's part: vLLM only reads the directory
        engine.entries.encode(late[0])
        wanted = [_own(engine, late, NEW_TOKENS, ratio=0.15)]
    found["fused when stored later"] = 0
    for _ in range(40):
        time.sleep(0.25)
        outputs = asked(llm, [ids(late)], [{"ratio": 0.15}])
        found["fused when stored later"] = int(report(outputs[0]).get("fused", 0) > 0)
        if found["fused when stored later"]:
            break
    found["stored later"] = _equal(outputs, wanted)
    return found


def mixed(folder: Path, family: str, rounds: str, prompts_each: str) -> Any:
    """Fused, exact and plain requests of two tenants, eight at once; then attacks on one
    of them.
    """
    os.environ[SECRET_VARIABLE] = "of both servers"
    setup = Setup(folder, family)
    count = int(prompts_each)
    prompts = {
        tenant: [models.prompt(seed + at, family) for seed in range(count)]
        for at, tenant in ((200, ""), (300, "one"))
    }
    wanted: dict[tuple[str, int, float | None], list[int]] = {}
    for tenant, chosen in prompts.items():
        with setup.engine(tenant) as engine:
            runs = engine.parts.intake.runs
            around = runs.before_documents, runs.after_question
            for number, prompt in enumerate(chosen):
                engine.entries.encode(prompt[0])
                for ratio in (0.15, 1.0) if tenant else (0.0, 0.15, 1.0):
                    wanted[tenant, number, ratio] = _own(engine, prompt, NEW_TOKENS, ratio=ratio)
    with setup.engine("two"):
        pass
    # Plain ones begin alike in pairs, with other texts than those that are stored.
    begins = [
        models.tokens(3 * models.BLOCK_TOKENS + 5, 900 + number, family) for number in range(4)
    ]
    plain = [
        ids(([begins[number % 4]], models.tokens(9 + number, 950 + number, family)), *around)
        for number in range(12)
    ]
    batches = [[plain[(3 * number + at) % 12] for at in range(3)] for number in range(int(rounds))]
    alone = setup.vllm(kv_transfer_config=None, max_num_seqs=8)
    references = [asked(alone, batch, [None] * 3) for batch in batches]
    alone.llm_engine.engine_core.shutdown()
    llm = setup.vllm(max_num_seqs=8)
    equal = Counter[str]()
    sent = Counter[str]()
    hits = [0, 0]
    for number, (batch, reference) in enumerate(zip(batches, references, strict=True)):
        given = list(batch)
        wishes = [None] * 3
        salts = [None] * 3
        answers = [generated(one) for one in reference]
        kinds = ["plain"] * 3
        for at in range(5):
            tenant = ("", "one")[at % 2]
            which = (number + at) % count
            ratio = (0.0, 0.15, 0.15, 1.0, None)[at]
            # four rounds share their salts: fused blocks are found again
            salt = f"{number // 4} {which}"
            wish: Any = {"reuse": "none"} if ratio is None else {"ratio": ratio}
            given.append(ids(prompts[tenant][which], *around))
            wishes.append(wish | _proved(tenant, salt))
            salts.append(salt)
            answers.append(wanted[tenant, which, 1.0 if ratio is None else ratio])
            kinds.append("exact" if ratio in (None, 1.0) else "fused")
        outputs = asked(llm, given, wishes, salts)
        for kind, output, answer in zip(kinds, outputs, answers, strict=True):
            sent[kind] += 1
            equal[kind] += generated(output) == answer
        hits[0] += sum(one.num_cached_tokens for one in reference)
        hits[1] += sum(one.num_cached_tokens for one in outputs[:3])
    return {
        "sent": sent,
        "equal": equal,
        "hits alone": hits[0],
        "hits": hits[1],
        **_attacked(llm, prompts, wanted, around),
    }


def _attacked(llm: Any, prompts: Any, wanted: Any, around: Any) -> dict[str, Any]:
    """What a tenant gets that sends another's texts, with the other's salt: its own proof, a forged
    one, or none.
    """
    found = {"attacks": 0, "reused": 0, "different": 0}
    for which, prompt in enumerate(prompts["one"]):
        salt = f"attacked {which}"
        given = [ids(prompt, *around)]
        (victim,) = asked(llm, given, [{"ratio": 0.15} | _proved("one", salt)], [salt])
        assert generated(victim) == wanted["one", which, 0.15] and victim.num_cached_tokens
        forged = {"tenant": "one", "proof": _proved("two", salt)["proof"]}
        claims: list[Any] = [_proved("two", salt), forged, {"tenant": "one"}, {}]
        wishes = [
            {**claim, **way} for claim in claims for way in ({"ratio": 0.15}, {"reuse": "none"})
        ]
        for wish in wishes:  # one after another: each might find what the last one left
            (output,) = asked(llm, given, [wish], [salt])
            found["attacks"] += 1
            found["reused"] += output.num_cached_tokens
            found["different"] += generated(output) != wanted["one", which, 1.0]
    return found


def _proved(tenant: str, salt: str) -> dict[str, str]:
    return {"tenant": tenant, "proof": proof(b"of both servers", tenant, salt)} if tenant else {}


def shared(folder: Path, family: str) -> Any:
    """vLLM with plain matrices, as on a GPU: the fusor's weights are views of them, and the tokens
    are ragkv's own.
    """
    from torch.nn.functional import linear
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def keep_plain(_: Any, layer: Any) -> None:
        layer.cpu_linear = linear

    # the CPU build would repack and delete them
    UnquantizedLinearMethod.process_weights_after_loading = keep_plain
    setup = Setup(folder, family)
    prompts = [models.prompt(seed) for seed in range(60, 66)]
    fused, full = setup.stored(prompts, {"ratio": 0.15}, {"reuse": "none"})
    llm = setup.vllm()
    outputs = asked(llm, [ids(prompt) for prompt in prompts], [{"ratio": 0.15}] * len(prompts))
    core = llm.llm_engine.engine_core.engine_core
    views = core.scheduler.connector._prompts._engine.model.adapter.model
    theirs = core.model_executor.driver_worker.worker.model_runner.model
    held = {parameter.untyped_storage().data_ptr() for parameter in theirs.parameters()}
    return {
        "prompts": len(prompts),
        "equal": _equal(outputs, fused),
        "fused": sum(report(output).get("fused", 0) > 0 for output in outputs),
        "fused differ from full": sum(one != other for one, other in zip(fused, full, strict=True)),
        "parameters": sum(1 for _ in views.parameters()),
        "views": sum(one.untyped_storage().data_ptr() in held for one in views.parameters()),
    }


def damaged(folder: Path) -> Any:
    """Every stored file has flipped bits: the tokens are those of a full prefill, and no request
    fails.
    """
    setup = Setup(folder, "llama")
    prompts = [models.prompt(seed) for seed in range(4)]
    (full,) = setup.stored(prompts, {"reuse": "none"})
    llm = setup.vllm()
    for path in (folder / "home" / "kv" / "entries").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            for at in range(len(data) // 2, len(data), 997):
                data[at] ^= 1
            path.write_bytes(data)
    outputs = asked(llm, [ids(prompt) for prompt in prompts], [named(prompt) for prompt in prompts])
    return {
        "equal": _equal(outputs, full),
        "fused": sum(report(output).get("fused", 0) for output in outputs),
        "notes": [note for output in outputs for note in report(output)["notes"]],
    }


def interface(_: Path) -> Any:
    """What is said of a list with names that vLLM does not have; it has all of the connector's own
    list.
    """
    check_interface()
    try:
        check_interface(
            "vllm.config:CacheConfig cache_dtype gone vllm.config:Gone parts vllm.gone:It"
        )
    except ConfigError as error:
        return str(error)
    return ""


def refused(folder: Path, option: str, value: str) -> Any:
    """What vLLM says at start if it is configured with `option`."""
    setup = Setup(folder, "llama")
    setup.stored([])
    try:
        setup.vllm(**{option: json.loads(value)})
    except Exception as error:
        return str(error)
    return ""


def _own(engine: Engine, prompt: Prompt, length: int, **options: Any) -> list[int]:
    """ragkv's own tokens."""
    chunks, question = prompt
    return list(
        engine.answer(question, chunks, max_new_tokens=length, separator="", **options).token_ids
    )


def _equal(outputs: Any, wanted: Sequence[Sequence[int]]) -> int:
    return sum(generated(output) == list(one) for output, one in zip(outputs, wanted, strict=True))


def _abort(llm: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Send prompts and abort them: some wait for their KV, others decode."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=100, temperature=0.0, detokenize=False, ignore_eos=True)
    names = [f"aborted-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        llm.llm_engine.add_request(
            name, {"prompt_token_ids": list(prompt), "cache_salt": name}, params
        )
    for _ in range(8):
        llm.llm_engine.step()
    llm.llm_engine.abort_request(names)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def _metric(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == name)


def printed(result: Any) -> None:
    """Print what a scenario returned, for `serving.run`."""
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        printed(globals()[sys.argv[1]](Path(made), *sys.argv[2:]))
