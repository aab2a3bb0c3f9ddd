"""POST /v1/chat/completions: a conversation in, what the model says to it out; with calls of tools, and its
reasoning, where the server knows how the model writes them (replies.py)."""

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
)
from .choice import Choice, News
from .errors import bad
from .faces import Body, ending, head, logprob_rows, named_beside, names, policy, usage
from .fields import Fields
from .ids import new_id
from .messages import messages
from .replies import Reader, Reply, call_rows, reasoning_fields
from .template_options import read_options
from .text import Text
from .tools import read_tools

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
        logprobs = fields.switch("logprobs")
        asked = Asked(
            prompts=(),
            sampling=replace(sampling, top=_top(fields, logprobs=logprobs)),
            stream=stream,
            usage_in_stream=counted,
            logprobs=logprobs,
            token_ids=fields.switch("return_token_ids"),
            names_as_ids=fields.switch("return_tokens_as_token_ids"),
            request_id=new_id("chatcmpl"),
            tools=read_tools(fields, readable=text.reader is not None),
            one_call=not fields.switch("parallel_tool_calls", True),
        )
        options = read_options(fields, text.options)
        fields.finish()
        prompt = check_prompt(await text.prompt(said, asked.tools, options), served, "messages")
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
        delta: dict[str, Any] = {"content": news.text} if news.text or not choice.finish else {}
        made: dict[str, Any] = {"index": choice.index, "delta": delta, **ending(choice)}
        if text.reader is not None:
            made |= _part(asked, choice, text.reader)
        self._add(made, asked, news, text)
        event["choices"] = [made]
        return event

    def closing(self, asked: Asked, choices: Sequence[Choice], served: Served) -> dict[str, Any]:
        """See Face."""
        counted = usage(asked, choices)
        return head(asked, CHUNK, served) | {"choices": [], "usage": counted}

    def _choice(self, asked: Asked, choice: Choice, text: Text) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
        }
        made: dict[str, Any] = {"index": choice.index, "message": message, **ending(choice)}
        if text.reader is not None:
            reply = _read(asked, choice, text.reader)
            message |= {"content": reply.content, **reasoning_fields(reply.reasoning)}
            if reply.calls:
                message["content"] = reply.content or None
                message["tool_calls"] = call_rows(reply.calls)
            made |= _finish(choice, reply)
        made["logprobs"] = None
        self._add(made, asked, choice.everything(), text)
        return made

    def _add(self, made: dict[str, Any], asked: Asked, news: News, text: Text) -> None:
        if asked.logprobs:
            named = names(news.token_ids, text, as_ids=asked.names_as_ids)
            beside = named_beside(news, text, as_ids=asked.names_as_ids)
            made["logprobs"] = logprob_rows(named, news.logprobs, beside)
        if asked.token_ids:
            made["token_ids"] = list(news.token_ids)


def _top(fields: Fields, *, logprobs: bool) -> int:
    """How many tokens to tell beside each."""
    top = fields.integer("top_logprobs", 0, 0, MOST_TOLD)
    if top and not logprobs:
        raise bad("top_logprobs", "needs logprobs = true")
    return top


def _read(asked: Asked, choice: Choice, reader: Reader) -> Reply:
    """What a choice says so far."""
    reply = reader.read(
        choice.spoken,
        prompt=choice.wanted.prompt,
        tools=asked.tools,
        done=bool(choice.finish),
    )
    if asked.one_call:
        reply = replace(reply, calls=reply.calls[:1])
    if isinstance(choice.stop_reason, str):
        sampling = asked.sampling
        return reply.until(
            choice.stop_reason, included=sampling.include_stop, last=sampling.least > 0
        )
    return reply


def _part(asked: Asked, choice: Choice, reader: Reader) -> dict[str, Any]:
    """Delta and end of a chunk; a form that does not flow is told when the choice is made."""
    done = bool(choice.finish)
    if not done and (not reader.flows or choice.telling.early(len(choice.token_ids))):
        return {"delta": {}}
    reply = _read(asked, choice, reader)
    delta = choice.telling.delta(reply, stops=asked.sampling.stops, done=done)
    return {"delta": delta, **_finish(choice, reply)}


def _finish(choice: Choice, reply: Reply) -> dict[str, str]:
    """Why it ended, if that was to call."""
    return {"finish_reason": "tool_calls"} if reply.calls and choice.finish == "stop" else {}
