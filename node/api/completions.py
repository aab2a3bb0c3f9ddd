"""POST /v1/completions: prompts as text, as several texts, or as token ids."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
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
from .faces import Body, ending, head, named_beside, names, policy, usage
from .fields import Fields
from .ids import new_id
from .text import Text

DEFAULT_TOKENS = 16
"""OpenAI's."""
KIND = "text_completion"


class CompletionFace:
    """Implements Face."""

    route = "/v1/completions"
    chat = False

    async def read(self, body: Body, served: Served, text: Text) -> Asked:
        """See Face."""
        fields = Fields(body)
        check_model(fields, served)
        sampling = read_sampling(
            fields, served, default_tokens=DEFAULT_TOKENS, lengths=("max_tokens",)
        )
        stream, counted = read_stream(fields)
        prompt, told = fields.take("prompt"), _logprobs(fields)
        asked = Asked(
            prompts=(),
            sampling=replace(sampling, top=told or 0),
            stream=stream,
            usage_in_stream=counted,
            logprobs=told is not None,
            token_ids=fields.switch("return_token_ids"),
            names_as_ids=fields.switch("return_tokens_as_token_ids"),
            request_id=new_id("cmpl"),
        )
        fields.finish()
        prompts = await _prompts(prompt, served, text, sampling.n)
        return replace(asked, prompts=prompts)

    def whole(
        self, asked: Asked, choices: Sequence[Choice], served: Served, text: Text
    ) -> dict[str, Any]:
        """See Face."""
        answer = head(asked, KIND, served)
        answer["choices"] = [
            self._choice(asked, choice, choice.everything(), text) for choice in choices
        ]
        answer["usage"] = usage(asked, choices)
        answer["policy_version"] = policy(choices)
        return answer

    def opening(self, asked: Asked, choice: Choice, served: Served) -> dict[str, Any] | None:
        """See Face: nothing."""
        return None

    def chunk(
        self, asked: Asked, choice: Choice, news: News, served: Served, text: Text
    ) -> dict[str, Any]:
        """See Face."""
        return head(asked, KIND, served) | {"choices": [self._choice(asked, choice, news, text)]}

    def closing(self, asked: Asked, choices: Sequence[Choice], served: Served) -> dict[str, Any]:
        """See Face."""
        return head(asked, KIND, served) | {"choices": [], "usage": usage(asked, choices)}

    def _choice(self, asked: Asked, choice: Choice, news: News, text: Text) -> dict[str, Any]:
        made: dict[str, Any] = {"index": choice.index, "text": news.text, **ending(choice)}
        made["logprobs"] = _rows(asked, choice, news, text) if asked.logprobs else None
        if asked.token_ids:
            made["token_ids"] = list(news.token_ids)
            if news.first == 0:
                made["prompt_token_ids"] = list(choice.wanted.prompt)
        return made


def _logprobs(fields: Fields) -> int | None:
    """How many tokens to tell beside each, with the logprobs of all; None: no logprobs."""
    value = fields.take("logprobs")
    if value is None or value is False:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_TOLD:
        raise bad("logprobs", f"give a whole number of 0 to {MOST_TOLD}")
    return value


def _rows(asked: Asked, choice: Choice, news: News, text: Text) -> dict[str, Any]:
    start = len(text.decode(choice.token_ids[: news.first], special=asked.sampling.special))
    lengths = [len(text.token(token)) for token in news.token_ids]
    offsets = list(accumulate(lengths, initial=start))[:-1]
    tokens = [one.name for one in names(news.token_ids, text, as_ids=asked.names_as_ids)]
    drawn = zip(tokens, news.logprobs, strict=True)
    beside = named_beside(news, text, as_ids=asked.names_as_ids)
    # as OpenAI does it: the drawn token is among them, also where it is none of the likeliest
    tops = (
        [
            {one.name: told for one, told in row} | dict([own])
            for row, own in zip(beside, drawn, strict=True)
        ]
        if beside
        else None
    )
    return {
        "tokens": tokens,
        "token_logprobs": list(news.logprobs),
        "top_logprobs": tops,
        "text_offset": offsets,
    }


async def _prompts(value: Any, served: Served, text: Text, n: int) -> tuple[tuple[int, ...], ...]:
    """A string, a list of strings, token ids, or a list of those. Raises ApiError."""
    many: list[Any] = [value]
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        many = value
    if len(many) * n > served.api.max_choices:
        raise bad("prompt", f"n times the prompts is more than {served.api.max_choices}")
    found: list[tuple[int, ...]] = []
    for one in many:
        if isinstance(one, str):
            tokens = await text.encode(one)
        elif isinstance(one, list):
            tokens = token_list(one, "prompt")
        else:
            raise bad("prompt", "give a string, a list of strings, or token ids")
        found.append(check_prompt(tokens, served, "prompt"))
    return tuple(found)
