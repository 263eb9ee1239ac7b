"""How much of a prompt is reused in ten templates over fifty documents, and whether anything is found in error.

    python -m benchmarks.templates [--quick]

For each template, ten prompts of five documents each, every document once. Shares are medians over the prompts, on the
first call and on the second. "Found" counts the documents that were recognised, "false" those that were recognised in
prompts of fifty other documents, which differ from the known ones in a number and a name. Answers at ratio 1 are
compared with those of a full recompute. The weights are random: recognition and shares do not depend on them.
"""

import random
import statistics
from typing import Any

import torch
import transformers

from benchmarks.report import parser, save, table
from ragkv import Engine, EngineConfig
from ragkv.api.chat import DialogueDocument, DialogueEngine, DialoguePrompt, DialogueRequest, Turn
from tests import tiny_models
from tests.dialogue.prompt_templates import TEMPLATES, passages
from tests.toy_tokenizers import VOCABULARY, byte_tokenizer

DOCUMENTS = 5  # in a prompt
ASK = "\n\nQuestion: who was the keeper?"
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    """Measure and print."""
    given = parser(__doc__, quick="two prompts a template").parse_args()
    rows = measured(2 if given.quick else len(passages()) // DOCUMENTS)
    headings = ("template", "first call", "second call", "found", "false", "answers equal")
    keys = ("template", "first", "second", "found", "false", "equal")
    table(headings, [[f"{row[key]:.0%}" if key in ("first", "second") else row[key] for key in keys] for row in rows])
    print("written:", save("templates", {"rows": rows}))


def measured(prompts: int) -> list[dict[str, Any]]:
    """One row a template, of so many prompts."""
    return [_row(name, prompts) for name in TEMPLATES]


def _row(name: str, prompts: int) -> dict[str, Any]:
    """A template's row, on a new store."""
    known = passages()
    order = random.Random(name).sample(range(len(known)), len(known))
    torch.manual_seed(7)
    config = tiny_models.config("llama", vocab_size=VOCABULARY, max_position_embeddings=8192)
    model = transformers.LlamaForCausalLM(config).eval()
    shares: dict[str, list[float]] = {"first": [], "second": []}
    found = false = equal = 0
    with Engine(model, byte_tokenizer(CHATML), EngineConfig()) as engine:
        dialogue = DialogueEngine(engine)
        dialogue.catalogue.ingest([DialogueDocument(text, {}) for text in known])
        for number in range(prompts):
            chosen = [known[at] for at in order[number * DOCUMENTS : (number + 1) * DOCUMENTS]]
            for call in shares:
                prompt = _prompt(dialogue, name, chosen)
                reuse = engine.prefill(prompt.question, prompt.chunks).reuse
                shares[call].append((reuse.exact + reuse.fused + reuse.recomputed) / reuse.tokens)
                engine.flush()
            found += len(prompt.documents)
            false += len(_prompt(dialogue, name, [_other(text) for text in chosen]).documents)
            answers = [_answer(engine, prompt, ratio=1.0), _answer(engine, prompt, reuse="none")]
            equal += answers[0] == answers[1]
    medians = {call: statistics.median(values) for call, values in shares.items()}
    counts = {"found": f"{found} of {prompts * DOCUMENTS}", "false": false, "equal": f"{equal} of {prompts}"}
    return {"template": name, **medians, **counts}


def _prompt(dialogue: DialogueEngine, template: str, texts: list[str]) -> DialoguePrompt:
    turns = (Turn("user", TEMPLATES[template](texts) + ASK),)
    return dialogue.build_prompt(DialogueRequest(turns, ()), find_conversation=False)


def _other(text: str) -> str:
    """A document that is not known: another year, another keeper."""
    return text.replace("In 1", "In 2", 1).replace("Tam ", "Bo ", 1)


def _answer(engine: Engine, prompt: DialoguePrompt, **options: Any) -> tuple[int, ...]:
    return engine.answer(prompt.question, prompt.chunks, max_new_tokens=8, **options).token_ids


if __name__ == "__main__":
    main()
