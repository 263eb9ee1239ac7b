"""Calls of tools: where tools stand in a prompt, and how calls are found in an answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ragkv import FusionConfig, Session
from ragkv.chat import (
    ChatAnswer,
    ChatDocument,
    ChatEngine,
    ChatInput,
    ChatPrompt,
    PlainMessage,
    ToolCall,
    required_form,
)
from ragkv.chat.tools import CallFilter, find_calls
from ragkv.errors import SchemaError
from tests.engine.helpers import text_engine
from tests.toy_tokenizers import CHATML

HERMES = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% "
    "endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{%- for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' "
    "}}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% "
    "endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}{%- if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>\n' + m['content'] + '\n</tool_response><|im_end|>\n' }}"
    "{%- elif m.tool_calls %}{{ '<|im_start|>assistant' }}{% if m['content'] %}{{ '\n' + "
    "m['content'] }}{% endif %}"
    "{%- for call in m.tool_calls %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif "
    "%}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Two templates that refuse a user's message after a call. In the second one nothing stands between
# a result and its answer, as in Mistral's.
TAKING_TURNS = (
    "{%- set turns = namespace(user=true) %}{%- for m in messages %}"
    "{%- if m['role'] == 'system' %}{{ raise_exception('There is no system role.') }}{% endif %}"
    "{%- if m['role'] != 'tool' and not m.tool_calls %}"
    "{%- if (m['role'] == 'user') != turns.user %}{{ raise_exception('Take turns.') }}{% endif %}"
    "{%- set turns.user = not turns.user %}{% endif %}{% endfor %}"
    "{%- if tools %}{{ 'TOOLS ' + tools | tojson + '\n' }}{% endif %}{%- for m in messages %}"
    "{%- if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}"
    "{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{%- for call in m.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('An id has nine characters.') }}{% endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}' }}{% endfor %}{{ ']</s>' }}"
    "{%- elif m['role'] == 'tool' %}{{ 'RESULT ' + m['content'] + '[/INST]' }}"
    "{%- else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
UNTAILED = TAKING_TURNS.replace("+ '[/INST]' }}{%- else", "+ '\n' }}{%- else")
QUERY = {
    "type": "object",
    "properties": {"query": {"enum": ["mill", "port"]}},
    "required": ["query"],
}
PARAMETERS = {**QUERY, "additionalProperties": False}
FUNCTION = {"name": "search", "description": "Finds passages.", "parameters": PARAMETERS}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}
CALL = ToolCall("search", '{"query": "mill"}', "abc123def")
TURNS = (
    PlainMessage("user", "Who built the mill?"),
    PlainMessage("assistant", "", (CALL,)),
    PlainMessage("tool", "Ada.", call_id=CALL.id),
)

FORMS = {
    "hermes": (
        'Let me see.\n<tool_call>\n{"name": "search", "arguments": {"query": '
        '"mill"}}\n</tool_call>',
        1,
    ),
    "hermes, twice": (
        '<tool_call>{"name": "search", "arguments": {"query": "mill"}}</tool_call>' * 2,
        2,
    ),
    "hermes, not closed": ('<tool_call>{"name": "search", "arguments": {"query": "mill"}}', 1),
    "mistral": ('[TOOL_CALLS] [{"name": "search", "arguments": {"query": "mill"}}]', 1),
    "mistral, without its token": ('[{"name": "search", "arguments": {"query": "mill"}}]', 1),
    "llama 3": ('{"name": "search", "parameters": {"query": "mill"}}', 1),
    "llama 3, twice": (
        '{"name": "search", "parameters": {"query": "mill"}}; {"name": "search", "parameters": {}}',
        2,
    ),
    "plain": ('{"function": {"name": "search", "arguments": {"query": "mill"}}}', 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_found_in_every_form_that_families_write(form: str) -> None:
    text, count = FORMS[form]
    content, calls = find_calls(text, ["search"])
    assert find_calls(text, ["search"], "length").calls[0].arguments == calls[0].arguments
    assert [call.name for call in calls] == ["search"] * count
    assert json.loads(calls[0].arguments) == {"query": "mill"} and "{" not in content
    assert len({call.id for call in calls}) == count and all(len(call.id) == 9 for call in calls)


WHOLE = '{"name": "search", "arguments": {"query": "mill"}}'


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (f"Well. <tool_call>\n{WHOLE}\n</tool_call>\n<tool_call>\n{WHOLE}", ("Well.", 2)),
        (f"[TOOL_CALLS] [{WHOLE}, {WHOLE}", ("", 2)),
        (f"{WHOLE}; {WHOLE.replace('arguments', 'parameters')}", ("", 2)),
        ('{"type": "function", "function": ' + WHOLE + "}", ("", 1)),
        ("The mill of Marl [1].", ("The mill of Marl [1].", 0)),
    ],
)
def test_a_call_that_is_cut_is_left_out_and_complete_ones_before_it_stay(
    written: str, expected: tuple[str, int]
) -> None:
    text, most = expected
    for end in range(len(written) + 1):
        found = find_calls(written[:end], ["search"], "length")
        assert text.startswith(found.text.rstrip("<[ ")) and len(found.calls) <= most
        filtered = CallFilter(["search"])
        filtered.add(written[:end])
        assert (filtered.sent + found.behind(filtered.sent)).rstrip() == found.text.rstrip()
    assert len(find_calls(written, ["search"], "length").calls) == most


@pytest.mark.parametrize(
    "text",
    [
        "The mill.",
        '{"name": "other", "arguments": {}}',
        '{"name": "search", "arguments": [1]}',
        '<tool_call>{"name": "search", </tool_call>',
        '[{"name": "search"}, 3]',
        '{"year": 1832}',
        "[1]",
    ],
)
def test_an_answer_that_calls_no_tool_of_the_request_is_text(text: str) -> None:
    assert find_calls(text, ["search"]) == (text, ())


@pytest.mark.parametrize("size", [1, 3, 100])
def test_streamed_text_passes_until_it_may_be_a_call(size: int) -> None:
    for text, certain in (
        ("See: a < b.", "See: a < b."),
        ("Well.\n<tool_call>\n{}", "Well.\n"),
        ('{"name"', ""),
        ("[TO", ""),
    ):
        filtered = CallFilter(["search"])
        pieces = [filtered.add(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(pieces) == certain == filtered.sent
    assert CallFilter(["search"], True).add("anything") == ""


def test_tools_stand_where_the_chat_template_puts_them() -> None:
    with text_engine(HERMES) as engine:
        chat = ChatEngine(engine)
        template = chat.template_for((TOOL,))
        assert template.knows_tools and template.call_syntax == "tagged"
        prompt = chat.build_prompt(ChatInput(TURNS, (), (TOOL,)))
        assert '"name": "search"' in prompt.text and "<|im_start|>tool\nAda." in prompt.text
        assert CALL.as_text in prompt.text
        plain = chat.build_prompt(ChatInput(TURNS[:1], ()))
        assert "search" not in plain.text
        assert chat.template_for((TOOL,)) is template, "it is made once for the same tools"


def test_a_required_call_is_constrained_and_a_wrong_schema_is_named() -> None:
    form = required_form([TOOL], "search", "tagged", True)
    with text_engine(CHATML) as engine:
        answer = engine.answer("Call it.", response_format=form, max_new_tokens=120)
        content, (call,) = find_calls(answer.text, ["search"])
        assert content == "" and json.loads(call.arguments)["query"] in ("mill", "port")
        bad = {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"a": {"not": {}}}}},
        }
        with pytest.raises(SchemaError, match=r'"not".*tool f') as refused:
            engine.answer("x", response_format=required_form([bad], None, "tagged", True))
        assert refused.value.param == "tools"


def test_chunks_behind_tools_are_fused_and_never_exact() -> None:
    facts = ["The mill of Marl makes paper and rope.", "The port of Marl is deep."]
    alone = FusionConfig(
        stored_kv="alone"
    )  # exact right behind the prefix, as expected KV never is
    with text_engine(QWEN, fusion=alone) as engine:
        chat = ChatEngine(engine)
        chat.catalogue.ingest([ChatDocument(fact, {}) for fact in facts])
        turns = (PlainMessage("user", f"{facts[0]}\n\n{facts[1]} Who built the mill?"),)
        states = {}
        for name, tools in (("without", ()), ("with", (TOOL,))):
            prompt = chat.build_prompt(ChatInput(turns, (), tools))
            engine.prefill(prompt.question, prompt.pieces)
            spans = engine.prefill(prompt.question, prompt.pieces, ratio=0.0).spans
            states[name] = [span.state for span in spans if span.kind == "chunk"]
            exact = engine.prefill(prompt.question, prompt.pieces, reuse="prefix")
            full = engine.prefill(prompt.question, prompt.pieces, reuse="none")
            assert (exact.logits - full.logits).abs().max() < 1e-3
            whole = engine.prefill(prompt.question, prompt.pieces, ratio=1.0)
            assert (whole.logits - full.logits).abs().max() < 1e-3
        assert states == {"without": ["exact", "fused"], "with": ["fused", "fused"]}


def test_a_dialogue_goes_on_from_a_tools_result_where_the_template_writes_it_as_a_users_turn() -> (
    None
):
    with text_engine(QWEN) as engine:
        chat = ChatEngine(engine)
        form = required_form([TOOL], "search", chat.template_for((TOOL,)).call_syntax, False)
        prompt = chat.build_prompt(ChatInput(TURNS[:1], (), (TOOL,)))
        assert prompt.conversation is not None
        session = prompt.conversation.session
        answer = engine.answer(
            prompt.question, prompt.pieces, session, response_format=form, max_new_tokens=120
        )
        text, calls = find_calls(answer.text, ["search"])
        chat.save_turn(prompt, answer, text, calls)
        turns = (
            TURNS[0],
            PlainMessage("assistant", text, calls),
            PlainMessage("tool", "Ada.", call_id=calls[0].id),
        )
        following = chat.build_prompt(ChatInput(turns, (), (TOOL,)))
        assert following.conversation is not None and following.conversation.turns == 1
        session = following.conversation.session
        going_on = engine.prefill(following.question, following.pieces, session=session)
        assert going_on.reuse.exact > len(answer.token_ids)
        full = engine.prefill(following.question, following.pieces, session=session, reuse="none")
        assert (going_on.logits - full.logits).abs().max() < 1e-3


@pytest.mark.parametrize("template", [TAKING_TURNS, UNTAILED], ids=["tail", "no tail"])
class TestATemplateThatRefusesAUserAfterACall:
    @pytest.fixture
    def chat(self, template: str) -> Iterator[ChatEngine]:
        with text_engine(template, context_length=4096) as engine:
            yield ChatEngine(engine)

    def ask(
        self,
        chat: ChatEngine,
        *turns: PlainMessage,
        calls: bool = False,
        session: Session | None = None,
    ) -> tuple[ChatPrompt, ChatAnswer]:
        """The prompt and the answer, which is a call or a short text."""
        syntax = chat.template_for((TOOL,)).call_syntax
        prompt = chat.build_prompt(ChatInput(turns, (), (TOOL,)), session is None, session)
        form = required_form([TOOL], "search", syntax, False) if calls else None
        events = chat.engine.stream(
            prompt.question,
            prompt.pieces,
            prompt.session,
            response_format=form,
            max_new_tokens=120 if calls else 4,
            separator="",
        )
        *_, last = chat.follow(prompt, events, ["search"], calls)
        assert isinstance(last, ChatAnswer)
        return prompt, last

    def dialogue(self, answer: ChatAnswer) -> tuple[PlainMessage, ...]:
        (call,) = answer.found.calls
        said = PlainMessage("assistant", answer.text, (call,))
        return TURNS[0], said, PlainMessage("tool", "Ada.", call_id=call.id, name="search")

    def test_the_call_and_the_answer_to_its_result_arrive(self, chat: ChatEngine) -> None:
        _, called = self.ask(chat, TURNS[0], calls=True)
        turns = self.dialogue(called)
        prompt, told = self.ask(chat, *turns)
        assert prompt.text.endswith("[/INST]") and "Ada." in prompt.text
        assert told.answer.token_ids
        said = PlainMessage("assistant", told.text)
        following, _ = self.ask(chat, *turns, said, PlainMessage("user", "And the port?"))
        assert following.conversation is not None and following.conversation.turns >= 1

    def test_two_results_of_two_rounds_are_answered(self, chat: ChatEngine) -> None:
        _, called = self.ask(chat, TURNS[0], calls=True)
        turns = self.dialogue(called)
        _, again = self.ask(chat, *turns, calls=True)
        prompt, told = self.ask(chat, *turns, *self.dialogue(again)[1:])
        assert told.answer.token_ids and prompt.text.count("Ada.") == 2

    @pytest.mark.parametrize("sends", ["everything", "the result"])
    def test_a_named_session_goes_on_from_a_result(self, chat: ChatEngine, sends: str) -> None:
        session = chat.engine.session("named")
        _, called = self.ask(chat, TURNS[0], calls=True, session=session)
        turns = self.dialogue(called)
        sent = turns if sends == "everything" else turns[2:]
        prompt, told = self.ask(chat, *sent, session=session)
        assert told.answer.token_ids and session.turns == 2
        question = chat.engine.tokenizer.decode(prompt.question)
        assert "Ada." in question and "Who built" not in question, "the history has it"

    def test_a_new_session_begins_with_a_whole_dialogue(self, chat: ChatEngine) -> None:
        session = chat.engine.session("new")
        prompt, told = self.ask(chat, *TURNS, session=session)
        assert told.answer.token_ids and session.turns == 1
        assert all(word in prompt.text for word in ("Who built", "mill", "Ada."))
