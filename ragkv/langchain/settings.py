"""Settings of a call, in LangChain's words and the engine's, to the arguments of `Engine.stream`."""

from collections.abc import Mapping
from typing import Any

from ragkv.errors import InputError, UnsupportedError

# Beside temperature, which decides whether to sample at all.
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
FUSION = ("ratio", "selector", "reuse")
OWN = ("model", "temperature", "max_tokens", "seed", "documents", "session_id", *FUSION, *SAMPLING)
NOT_OFFERED = {
    "tools": "tools",
    "tool_choice": "tools",
    "functions": "tools",
    "response_format": "structured output",
}
_LANGCHAIN = ("ls_structured_output_format", "stream_usage")  # bookkeeping that LangChain passes along


def refuse_unknown(call: Mapping[str, Any]) -> None:
    """Raises `InputError` for a setting that would be ignored, `UnsupportedError` for one that is not offered."""
    for name, value in call.items():
        if name in NOT_OFFERED and value:
            raise UnsupportedError(f"{name} was given, but {NOT_OFFERED[name]} is not offered yet; leave it out.")
    unknown = sorted(call.keys() - set(OWN) - set(NOT_OFFERED) - set(_LANGCHAIN))
    if unknown:
        raise InputError(f"Unknown settings of a call: {', '.join(unknown)}. Known: {', '.join(sorted(OWN))}.")


def engine_arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What `Engine.stream` takes beside question and chunks; what is `None` is left to the engine."""
    arguments = {
        name: settings[name] for name in ("seed", "selector", "reuse", *SAMPLING) if settings[name] is not None
    }
    if settings["ratio"] is not None:
        arguments["ratio"] = None if settings["ratio"] == "auto" else settings["ratio"]
    if temperature := settings["temperature"]:
        arguments |= {"do_sample": True, "temperature": float(temperature)}
    else:
        for name in ("top_p", "top_k", "min_p"):
            arguments.pop(name, None)  # they choose among samples, and there are none
    return {**arguments, "max_new_tokens": settings["max_tokens"]}
