"""A chat model over plain transformers, for comparison: the whole prompt is computed every time,
greedily decoded.
"""

from collections.abc import Iterator
from typing import Any

import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

ROLES = {"human": "user", "ai": "assistant", "system": "system"}


class PlainTransformers(BaseChatModel):
    """`net` is a causal LM, `tokenizer` its tokenizer with a chat template."""

    net: Any
    tokenizer: Any
    max_tokens: int = 64

    @property
    def _llm_type(self) -> str:
        return "plain-transformers"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        text = "".join(str(chunk.message.content) for chunk in self._stream(messages))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    @torch.no_grad()
    def _stream(
        self, messages: list[BaseMessage], *_: Any, **__: Any
    ) -> Iterator[ChatGenerationChunk]:
        said = [
            {"role": ROLES[message.type], "content": str(message.content)} for message in messages
        ]
        ids = self.tokenizer.apply_chat_template(
            said, add_generation_prompt=True, return_dict=False
        )
        ends = self.net.generation_config.eos_token_id
        answer = []
        text = ""
        past = None
        while len(answer) < self.max_tokens:
            out = self.net(
                torch.tensor([ids]), past_key_values=past, use_cache=True, logits_to_keep=1
            )
            token = int(out.logits[0, -1].argmax())
            past = out.past_key_values
            if token == ends or (isinstance(ends, list) and token in ends):
                return
            answer = [*answer, token]
            ids = [token]
            whole = self.tokenizer.decode(answer, skip_special_tokens=True)
            yield ChatGenerationChunk(message=AIMessageChunk(whole[len(text) :]))
            text = whole
