"""What traces cost: a request without a tracer provider, with one that samples nothing, and with one that records.

The three kinds take turns in one process on a tiny model, whose requests are so short that the cost shows. What a
request without a provider pays, one look for a provider, is timed by itself.
"""

import timeit
from collections.abc import Callable
from typing import Any

import torch
import transformers

from ragkv import Engine
from ragkv.runtime import tracing

from .report import alternate, parser, save, table

CHUNK, QUESTION = list(range(10, 60)), [5, 6, 7]


def main() -> None:
    """Measure and print."""
    given = parser(__doc__, quick="fewer runs", runs=300).parse_args()
    found = requests(runs=20 if given.quick else given.runs)
    look_us = timeit.timeit(tracing.tracer, number=100_000) * 10
    table(["tracer provider", "ms a request"], [[name, 1e3 * seconds] for name, seconds in found.items()])
    print(f"one look without a provider: {look_us:.2f} us")
    print("written:", save("tracing", {"seconds": found, "look_us": look_us}))


def requests(runs: int) -> dict[str, float]:
    """Median seconds of a request, by what the provider does."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    recording = TracerProvider()
    recording.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter()))
    kinds = {"none": None, "samples nothing": TracerProvider(sampler=ALWAYS_OFF), "records": recording}
    with _tiny() as engine:
        engine.warm([CHUNK])

        def ask(provider: Any) -> Callable[[], Any]:
            def run() -> None:
                trace._TRACER_PROVIDER = provider
                engine.answer(QUESTION, [CHUNK], max_new_tokens=4, min_new_tokens=4)

            return run

        try:
            return alternate({name: ask(provider) for name, provider in kinds.items()}, runs)
        finally:
            trace._TRACER_PROVIDER = None


def _tiny() -> Engine:
    torch.manual_seed(7)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, vocab_size=300)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048)
    return Engine(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **heads)).eval())


if __name__ == "__main__":
    main()
