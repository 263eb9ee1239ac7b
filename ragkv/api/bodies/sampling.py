"""The request fields that say how tokens are chosen: those of OpenAI, and `top_k`, `min_p` and `repetition_penalty`.

The ranges are those of the engine's `Sampling`, which has the rules.
"""

from typing import Annotated, cast

from pydantic import Field, StringConstraints

from ragkv.model.decode.sampling import LEAST_REPETITION, MOST_BIASES, MOST_REPETITION
from ragkv.prompt import AnswerOptions

from .documents import Strict

TokenId = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
Biases = Annotated[
    dict[TokenId, Bias], Field(max_length=MOST_BIASES, json_schema_extra={"additionalProperties": False})
]


class SamplingFields(Strict):
    """Fields of a request whose answer is decoded."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0, description="Above 0: samples. 0: greedy.")
    top_p: float | None = Field(default=None, gt=0.0, le=1.0, description="Below 1: samples.")
    top_k: int | None = Field(default=None, ge=0, lt=2**31, description="Above 0: samples, the likeliest tokens only.")
    min_p: float | None = Field(default=None, ge=0.0, le=1.0, description="Above 0: samples.")
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63, description="The same seed samples the same answer.")
    presence_penalty: float | None = Field(
        default=None, ge=-2.0, le=2.0, description="Subtracted from the logits of tokens that the answer has."
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2.0, le=2.0, description="The same, for each time that the answer has the token."
    )
    repetition_penalty: float | None = Field(
        default=None,
        ge=LEAST_REPETITION,
        le=MOST_REPETITION,
        description="Divides the logits of tokens of the prompt and the answer.",
    )
    logit_bias: Biases | None = Field(
        default=None,
        description="Added to the logits of these token ids.",
        examples=[{"5": 1.0}],
    )

    @property
    def sampling_options(self) -> AnswerOptions:
        """The engine's options for these fields; what was left out is not among them."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        options = {name: value for name, value in given.items() if value is not None}
        if self.logit_bias is not None:
            options["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        return cast("AnswerOptions", options)
