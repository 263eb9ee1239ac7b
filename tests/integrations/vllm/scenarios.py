"""What `serving.run` runs: each scenario stores chunks with ragkv, starts vLLM over the store, and compares."""

import json
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragkv import Engine, EngineConfig, FusionConfig, StoreConfig

from . import models

NEW_TOKENS = 12
RATIOS = (0.0, 0.05, 0.15, 1.0)
Prompt = tuple[list[tuple[int, ...]], tuple[int, ...]]


class Setup:
    """A model and a store in a folder, ragkv's own answers, and vLLM with the connector."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, self.model = folder, folder / "model"
        models.save(family, self.model)
        store = StoreConfig(directory=str(folder / "home" / "kv"))
        self.config = EngineConfig(store=store, dtype="float32", packed_bytes=0, fusion=FusionConfig(floor_tokens=0))

    def engine(self) -> Engine:
        """ragkv alone, writing to the store."""
        return Engine.from_pretrained(self.model, self.config)

    def vllm(self, extra: dict[str, Any] | None = None, **options: Any) -> Any:
        """vLLM with the connector."""
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="RagKVConnector",
            kv_connector_module_path="ragkv.integrations.vllm",
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


def ids(prompt: Prompt) -> list[int]:
    """A prompt as ragkv lays it out: BOS, the chunks, the question."""
    chunks, question = prompt
    return [models.BOS, *(token for chunk in chunks for token in chunk), *question]


def asked(
    llm: Any,
    prompts: Sequence[Sequence[int]],
    wishes: Sequence[dict[str, Any] | None],
    salts: Sequence[str | None] | None = None,
    **sampling: Any,
) -> Any:
    """vLLM's outputs of all prompts, sent at once; each with its wish about fusing, and a salt of its own or a given."""
    from vllm import SamplingParams

    settings = {"max_tokens": NEW_TOKENS, "temperature": 0.0, "detokenize": False, "ignore_eos": True, **sampling}
    params = [
        SamplingParams(**settings, extra_args=None if wish is None else {"kv_transfer_params": {"ragkv": wish}})
        for wish in wishes
    ]
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    for one, wish, salt in zip(given, wishes, salts or [uuid.uuid4().hex for _ in given], strict=True):
        if salt and wish is not None:
            one["cache_salt"] = salt  # type: ignore[assignment]
    return llm.generate(given, params, use_tqdm=False)


def generated(output: Any) -> list[int]:
    """The tokens of an output, until the end token, after which ragkv stops."""
    tokens = list(output.outputs[0].token_ids)
    return tokens[: tokens.index(2)] if 2 in tokens else tokens


def report(output: Any) -> dict[str, Any]:
    """ragkv's report in an output, with what was reused; empty if ragkv had nothing to do with it."""
    found = (output.kv_transfer_params or {}).get("ragkv", {})
    return {**found.get("reuse", {}), **found}


def tokens(folder: Path, family: str) -> Any:
    """For each ratio: how many of 20 prompts gave ragkv's own tokens, and how many were fused and differ from full."""
    setup = Setup(folder, family)
    prompts = [models.prompt(seed) for seed in range(20)]
    wanted: dict[float, list[list[int]]] = {ratio: [] for ratio in RATIOS}
    with setup.engine() as engine:
        for chunks, question in prompts:
            engine.warm(chunks)
            for ratio in RATIOS:
                answer = engine.answer(question, chunks, ratio=ratio, max_new_tokens=NEW_TOKENS)
                wanted[ratio].append(list(answer.token_ids))
    llm = setup.vllm()
    found = {}
    for ratio in RATIOS:
        outputs = asked(llm, [ids(prompt) for prompt in prompts], [{"ratio": ratio}] * len(prompts))
        found[str(ratio)] = {
            "equal": sum(generated(output) == one for output, one in zip(outputs, wanted[ratio], strict=True)),
            "fused": sum(report(output).get("fused", 0) > 0 for output in outputs),
            "promised": sum(report(output)["promised_tokens"] == output.num_cached_tokens for output in outputs),
            "differ": sum(one != full for one, full in zip(wanted[ratio], wanted[1.0], strict=True)),
        }
    full = asked(llm, [ids(prompt) for prompt in prompts], [{"reuse": "none"}] * len(prompts))
    found["full"] = {
        "equal": sum(generated(output) == one for output, one in zip(full, wanted[1.0], strict=True)),
        "cached": sum(output.num_cached_tokens for output in full),
    }
    return found


def never_wrong(folder: Path) -> Any:
    """What follows fused requests: exact ones, preempted ones, aborted ones, damage, and chunks stored later."""
    setup = Setup(folder, "llama")
    prompts, late = [models.prompt(seed) for seed in range(20, 26)], models.prompt(40)
    length = 150
    with setup.engine() as engine:
        for chunks, _ in prompts:
            engine.warm(chunks)
        fused = [_own(engine, prompt, length, ratio=0.15) for prompt in prompts]
        full = [_own(engine, prompt, length, reuse="none") for prompt in prompts]
    # 24 blocks hold two of the prompts with their answers, so that vLLM preempts some of the four it admits.
    llm = setup.vllm({"timeout_s": 20.0}, num_gpu_blocks_override=24, max_model_len=512, disable_log_stats=False)
    given = [ids(prompt) for prompt in prompts]
    found: dict[str, Any] = {"prompts": len(prompts)}
    wishes: list[Any] = [{"ratio": 0.15}, {"reuse": "none"}] * 3
    outputs = asked(llm, given, wishes, max_tokens=length)
    wanted = [(fused, full)[index % 2][index] for index in range(len(prompts))]
    found["mixed"] = _equal(outputs, wanted)
    outputs = asked(llm, given, [{"reuse": "none"}] * len(given), max_tokens=length)
    found["exact after fused"] = _equal(outputs, full)
    found["promised to exact ones"] = sum(output.num_cached_tokens for output in outputs)
    found["fused differ from full"] = sum(one != other for one, other in zip(fused, full, strict=True))
    _abort(llm, given)
    found["fused after an abort"] = _equal(asked(llm, given, [{"ratio": 0.15}] * len(given), max_tokens=length), fused)
    found["preemptions"] = _metric(llm, "vllm:num_preemptions")
    with setup.engine() as engine:  # another process's part: vLLM only reads the directory
        engine.warm(late[0])
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


def shared(folder: Path, family: str) -> Any:
    """vLLM with plain matrices, as on a GPU: the fusor's weights are views of them, and the tokens are ragkv's own."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def keep_plain(_: Any, layer: Any) -> None:
        layer.cpu_linear = linear

    UnquantizedLinearMethod.process_weights_after_loading = keep_plain  # the CPU build would repack and delete them
    setup, prompts = Setup(folder, family), [models.prompt(seed) for seed in range(60, 66)]
    with setup.engine() as engine:
        for chunks, _ in prompts:
            engine.warm(chunks)
        fused = [_own(engine, prompt, NEW_TOKENS, ratio=0.15) for prompt in prompts]
        full = [_own(engine, prompt, NEW_TOKENS, reuse="none") for prompt in prompts]
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
    """Every stored file has flipped bits: the tokens are those of a full prefill, and no request fails."""
    setup = Setup(folder, "llama")
    prompts = [models.prompt(seed) for seed in range(4)]
    with setup.engine() as engine:
        for chunks, _ in prompts:
            engine.warm(chunks)
        full = [_own(engine, prompt, NEW_TOKENS, reuse="none") for prompt in prompts]
    llm = setup.vllm()
    for path in (folder / "home" / "kv" / "entries").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            for at in range(len(data) // 2, len(data), 997):
                data[at] ^= 1
            path.write_bytes(data)
    outputs = asked(llm, [ids(prompt) for prompt in prompts], [{"ratio": 0.0}] * len(prompts))
    return {
        "equal": _equal(outputs, full),
        "fused": sum(report(output).get("fused", 0) for output in outputs),
        "notes": [note for output in outputs for note in report(output)["notes"]],
    }


def refused(folder: Path, option: str, value: str) -> Any:
    """What vLLM says at start if it is configured with `option`."""
    setup = Setup(folder, "llama")
    with setup.engine():
        pass
    try:
        setup.vllm(**{option: json.loads(value)})
    except Exception as error:
        return str(error)
    return ""


def _own(engine: Engine, prompt: Prompt, length: int, **options: Any) -> list[int]:
    """ragkv's own tokens."""
    chunks, question = prompt
    return list(engine.answer(question, chunks, max_new_tokens=length, **options).token_ids)


def _equal(outputs: Any, wanted: Sequence[Sequence[int]]) -> int:
    return sum(generated(output) == list(one) for output, one in zip(outputs, wanted, strict=True))


def _abort(llm: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Send prompts and abort them: some wait for their KV, others decode."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=100, temperature=0.0, detokenize=False, ignore_eos=True)
    names = [f"aborted-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
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
