"""POST /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .asked import (
    Asked,
    Served,
    check_model,
    check_prompt,
    read_sampling,
    read_stream,
)
from .choice import Choice, News
from .faces import Body, ending, head, logprob_rows, names, policy, usage
from .fields import Fields
from .ids import new_id
from .text import Text, messages

CHUNK = "chat.completion.chunk"


class ChatFace:
    """Implements Face."""

    route = "/v1/chat/completions"
    chat = True

    async def read(self, body: Body, served: Served, text: Text) -> Asked:
        """See Face."""
        fields = Fields(body)
        check_model(fields, served)
        sampling = read_sampling(
            fields, served, default_tokens=None, lengths=("max_tokens", "max_completion_tokens")
        )
        stream, counted = read_stream(fields)
        said = messages(fields.take("messages"))
        asked = Asked(
            prompts=(),
            sampling=sampling,
            stream=stream,
            usage_in_stream=counted,
            logprobs=fields.switch("logprobs"),
            token_ids=fields.switch("return_token_ids"),
            names_as_ids=fields.switch("return_tokens_as_token_ids"),
            request_id=new_id("chatcmpl"),
        )
        fields.finish()
        prompt = check_prompt(await text.prompt(said), served, "messages")
        return replace(asked, prompts=(prompt,))

    def whole(
        self, asked: Asked, choices: Sequence[Choice], served: Served, text: Text
    ) -> dict[str, Any]:
        """See Face."""
        answer = head(asked, "chat.completion", served)
        answer["choices"] = [self._choice(asked, choice, text) for choice in choices]
        answer["usage"] = usage(asked, choices)
        answer["policy_version"] = policy(choices)
        if asked.token_ids:
            answer["prompt_token_ids"] = list(asked.prompts[0])
        return answer

    def opening(self, asked: Asked, choice: Choice, served: Served) -> dict[str, Any] | None:
        """See Face: the role."""
        event = head(asked, CHUNK, served)
        delta = {"role": "assistant", "content": ""}
        event["choices"] = [{"index": choice.index, "delta": delta, "finish_reason": None}]
        if asked.token_ids:
            event["prompt_token_ids"] = list(asked.prompts[0])
        return event

    def chunk(
        self, asked: Asked, choice: Choice, news: News, served: Served, text: Text
    ) -> dict[str, Any]:
        """See Face."""
        event = head(asked, CHUNK, served)
        delta = {"content": news.text} if news.text or not choice.finish else {}
        made: dict[str, Any] = {"index": choice.index, "delta": delta, **ending(choice)}
        self._add(made, asked, news.token_ids, news.logprobs, text)
        event["choices"] = [made]
        return event

    def closing(self, asked: Asked, choices: Sequence[Choice], served: Served) -> dict[str, Any]:
        """See Face."""
        counted = usage(asked, choices)
        return head(asked, CHUNK, served) | {"choices": [], "usage": counted}

    def _choice(self, asked: Asked, choice: Choice, text: Text) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        made: dict[str, Any] = {"index": choice.index, "message": message, **ending(choice)}
        made["logprobs"] = None
        self._add(made, asked, choice.token_ids, choice.logprobs, text)
        return made

    def _add(
        self,
        made: dict[str, Any],
        asked: Asked,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        text: Text,
    ) -> None:
        if asked.logprobs:
            named = names(token_ids, text, as_ids=asked.names_as_ids)
            made["logprobs"] = logprob_rows(named, logprobs)
        if asked.token_ids:
            made["token_ids"] = list(token_ids)
