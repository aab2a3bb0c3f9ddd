"""POST /inference/v1/generate: token ids in, token ids and logprobs out; body and answer are vLLM's.

Two clients read the logprobs in two ways: `renderers` wants every token called `token_id:N`, and so it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..engines.requests import MOST_TOLD
from .asked import (
    Asked,
    Served,
    check_model,
    check_prompt,
    read_sampling,
    read_stream,
    token_list,
)
from .choice import Choice, News
from .errors import bad
from .faces import Body, ending, head, logprob_rows, named_beside, names, policy, usage
from .fields import Fields
from .ids import new_id
from .text import Text

DEFAULT_TOKENS = 16
"""vLLM's."""
LONGEST_ID = 256


class GenerateFace:
    """Implements Face."""

    route = "/inference/v1/generate"
    chat = False

    async def read(self, body: Body, served: Served, text: Text) -> Asked:
        """See Face."""
        fields = Fields(body)
        check_model(fields, served)
        request_id = fields.text("request_id", LONGEST_ID) or new_id("gen")
        if not request_id.isascii() or not request_id.isprintable():
            raise bad("request_id", "give printable ASCII: it is sent back in a header")
        stream, counted = read_stream(fields)
        prompt = token_list(fields.take("token_ids"), "token_ids")
        drawing = fields.section("sampling_params")
        told = _logprobs(drawing)
        sampling = read_sampling(
            drawing, served, default_tokens=DEFAULT_TOKENS, lengths=("max_tokens",)
        )
        asked = Asked(
            prompts=(check_prompt(prompt, served, "token_ids"),),
            sampling=replace(sampling, top=told or 0),
            stream=stream,
            usage_in_stream=counted,
            logprobs=told is not None,
            token_ids=fields.switch("return_token_ids"),
            names_as_ids=True,
            request_id=request_id,
        )
        drawing.finish()
        fields.finish()
        return asked

    def whole(
        self, asked: Asked, choices: Sequence[Choice], served: Served, text: Text
    ) -> dict[str, Any]:
        """See Face."""
        answer = _head(asked, served)
        answer["choices"] = [
            _choice(asked, choice, choice.everything(), text) for choice in choices
        ]
        answer["usage"] = usage(asked, choices)
        answer["policy_version"] = policy(choices)
        if asked.token_ids:
            answer["prompt_token_ids"] = list(asked.prompts[0])
        return answer

    def opening(self, asked: Asked, choice: Choice, served: Served) -> dict[str, Any] | None:
        """See Face: the prompt, where it is wanted."""
        if not asked.token_ids or choice.index:
            return None
        return _head(asked, served) | {"choices": [], "prompt_token_ids": list(asked.prompts[0])}

    def chunk(
        self, asked: Asked, choice: Choice, news: News, served: Served, text: Text
    ) -> dict[str, Any]:
        """See Face."""
        return _head(asked, served) | {"choices": [_choice(asked, choice, news, text)]}

    def closing(self, asked: Asked, choices: Sequence[Choice], served: Served) -> dict[str, Any]:
        """See Face."""
        return _head(asked, served) | {"choices": [], "usage": usage(asked, choices)}


def _head(asked: Asked, served: Served) -> dict[str, Any]:
    named = head(asked, "", served)
    return {
        "request_id": asked.request_id,
        "model": named["model"],
        "created": named["created"],
        "output_mode": "tokens",
    }


def _choice(asked: Asked, choice: Choice, news: News, text: Text) -> dict[str, Any]:
    made: dict[str, Any] = {"index": choice.index, "token_ids": list(news.token_ids)}
    made |= ending(choice)
    made["logprobs"] = None
    if asked.logprobs:
        tokens = names(news.token_ids, text, as_ids=True)
        beside = named_beside(news, text, as_ids=True)
        made["logprobs"] = logprob_rows(tokens, news.logprobs, beside)
    if choice.finish:
        made["weight_versions"] = _versions(choice)
    return made


def _versions(choice: Choice) -> list[dict[str, Any]]:
    """Which policy version drew which tokens: start <= index < end."""
    starts = [start for start, _ in choice.spans] + [len(choice.token_ids)]
    return [
        {"version": str(version), "start": start, "end": end}
        for (start, version), end in zip(choice.spans, starts[1:], strict=True)
    ]


def _logprobs(fields: Fields) -> int | None:
    """How many tokens to tell beside each, 0 and 1 for none; None: no logprobs."""
    value = fields.take("logprobs")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOLD:
        raise bad(fields.name("logprobs"), f"give a whole number of 0 to {MOST_TOLD}")
    return value if value > 1 else 0
