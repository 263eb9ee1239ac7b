"""Prompt layout: the four runs of a chat template, or the plain layout."""

from typing import Any

import pytest
import torch

from ragkv.errors import InputError, UnsupportedModelError
from ragkv.prompt.template import TemplateRuns, template_runs
from ragkv.runtime.outside import token_ids
from tests.toy_tokenizers import BOS, byte_tokenizer

CHATML = """{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

HEADERS = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

NO_SYSTEM = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('!') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + m['content'] | trim }}
{{- '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

SILENT_ABOUT_SYSTEM = """{% for m in messages if m['role'] != 'system' %}
{{- m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""

INSTRUCTIONS = """{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}
{%- if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}
{%- elif m['role'] == 'user' %}{{ '[INST] ' + (ns.system if loop.index0 <= 1 else '') + m['content'] + ' [/INST]' }}
{%- else %}{{ ' ' + m['content'] | trim + eos_token }}{% endif %}{% endfor %}"""

FORGETS_REASONING = """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}
{%- if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' + m['content'] }}
{%- else %}{{ m['content'].split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LAST_ANSWER_OPEN = """{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}
{%- if not loop.last %}{{ '<|eot_id|>' }}{% elif m['role'] == 'assistant' %}{{ '<|im_end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|eot_id|>assistant: ' }}{% endif %}"""

TEMPLATES = {
    "chatml with a default system text": CHATML,
    "header ids": HEADERS,
    "instructions": INSTRUCTIONS,
    "forgets reasoning": FORGETS_REASONING,
    "leaves the last answer open": LAST_ANSWER_OPEN,
}
NO_SYSTEM_TEMPLATES = {
    "refuses a system role": NO_SYSTEM,
    "drops a system message": SILENT_ABOUT_SYSTEM,
}


def rendered(tokenizer: Any, *contents: str, system: str = "") -> list[int]:
    """The ids of a whole conversation, user first, as the template itself renders it."""
    roles = ["user", "assistant"] * len(contents)
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=False)
    ]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def joined(runs: TemplateRuns, tokenizer: Any, *contents: str) -> list[int]:
    """The same conversation from the four runs."""
    ids = list(runs.before_documents)
    for number, text in enumerate(contents):
        answered = (*runs.after_answer, *runs.before_next_turn)
        # by the model itself
        written = " " + text if number % 2 and tokenizer.chat_template == INSTRUCTIONS else text
        ids += [*token_ids(tokenizer, written), *(answered if number % 2 else runs.after_question)]
    return ids


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_runs_joined_with_ids_equal_the_rendered_template(template: str, system: str) -> None:
    tokenizer = byte_tokenizer(template)
    runs = template_runs(tokenizer, None, system)
    for turns in (["Why?"], ["Why?", "So.", "And?"], ["Why?", "So.", "And?", "Yes.", "Oh?"]):
        assert joined(runs, tokenizer, *turns) == rendered(tokenizer, *turns, system=system)
    if system:
        assert system in tokenizer.decode(runs.before_documents)


@pytest.mark.parametrize("template", NO_SYSTEM_TEMPLATES.values(), ids=NO_SYSTEM_TEMPLATES)
def test_without_a_system_role_the_system_text_starts_the_first_user_turn(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    runs = template_runs(tokenizer, None, "Be brief. ")
    wanted = rendered(tokenizer, "Be brief. Why?", "So.", "And?")
    assert joined(runs, tokenizer, "Why?", "So.", "And?") == wanted


def test_the_end_of_an_answer_and_the_start_of_a_turn_are_separate_runs() -> None:
    tokenizer = byte_tokenizer(CHATML)
    runs = template_runs(tokenizer, None, "")
    assert tokenizer.decode(runs.after_answer) == "<|im_end|>\n"
    assert tokenizer.decode(runs.before_next_turn) == "<|im_start|>user\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "always the same",
        "{{ messages[0]['content'] + messages[0]['content'] }}",
    ],
    ids=["raises", "drops content", "doubles content"],
)
@pytest.mark.parametrize("system", ["", "Be brief."])
def test_a_template_that_cannot_be_split_is_refused_with_a_workaround(
    template: str, system: str
) -> None:
    with pytest.raises(UnsupportedModelError, match="chat_template to None"):
        template_runs(byte_tokenizer(template), None, system)


class TestPlainLayout:
    """Without a template: only BOS, if any, and the system text."""

    def test_the_plain_layout_of_a_tokenizer_is_bos_and_system_text(self) -> None:
        tokenizer = byte_tokenizer()
        assert template_runs(tokenizer, None, "") == TemplateRuns((BOS,))
        assert template_runs(tokenizer, 99, "Hi") == TemplateRuns(
            (BOS, *token_ids(tokenizer, "Hi"))
        )

    def test_the_plain_layout_without_a_tokenizer_is_the_models_bos(self) -> None:
        assert template_runs(None, 1, "") == TemplateRuns((1,))
        assert template_runs(None, None, "") == TemplateRuns(())

    def test_system_text_needs_a_tokenizer(self) -> None:
        with pytest.raises(InputError, match="no tokenizer"):
            template_runs(None, 1, "Hi")


class TestEncode:
    def test_text_becomes_ids_without_special_tokens(self) -> None:
        tokenizer = byte_tokenizer()
        assert tokenizer.decode(token_ids(tokenizer, "a b")) == "a b"
        assert token_ids(tokenizer, "") == ()

    def test_any_integer_sequence_is_accepted_as_ids(self) -> None:
        assert (
            token_ids(None, [5, 6])
            == token_ids(None, torch.tensor([5, 6]))
            == token_ids(None, range(5, 7))
            == (5, 6)
        )

    @pytest.mark.parametrize("wrong", [[1.5], ["a"], [None], 7, None, [[1]]])
    def test_input_that_is_neither_text_nor_integers_is_refused(self, wrong: Any) -> None:
        with pytest.raises(InputError, match="token ids"):
            token_ids(None, wrong)
