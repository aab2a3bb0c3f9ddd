"""The fields of a request body, taken one by one; what is left at the end is refused by name.

A field that this server cannot honour may be sent as long as its value asks for nothing (`null`, 0, an empty
list): clients fill in defaults.
"""

from collections.abc import Mapping
from typing import Any

from .errors import ApiError, bad

GUIDED = "output is not constrained to a format"
TOOLS = "only /v1/chat/completions knows tools, by its field tools"

NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "length_penalty": ((1,), "there is no beam search"),
    "bad_words": (([],), "use logit_bias, which knows tokens"),
    "allowed_token_ids": ((), "use logit_bias, up to 100"),
    "logits_processors": (([],), "no code is run for a request"),
    "tools": (([],), TOOLS),
    "functions": (([],), TOOLS),
    "tool_choice": (("none", "auto"), TOOLS),
    "function_call": (("none", "auto"), TOOLS),
    "parallel_tool_calls": ((True, False), TOOLS),
    "response_format": (({"type": "text"},), GUIDED),
    "guided_json": ((), GUIDED),
    "guided_regex": ((), GUIDED),
    "guided_choice": ((), GUIDED),
    "guided_grammar": ((), GUIDED),
    "structured_outputs": ((), GUIDED),
    "top_logprobs": ((0,), "only chats have it; a completion has logprobs = N"),
    "prompt_logprobs": ((), "only logprobs of what is sampled are known"),
    "echo": ((False,), "the prompt is not sent back"),
    "suffix": (("",), "there is no completion in the middle of a text"),
    "best_of": ((1,), "use n, and choose"),
    "use_beam_search": ((False,), "there is no beam search: use temperature 0"),
    "modalities": ((["text"],), "only text goes in and out"),
    "audio": ((), "only text goes in and out"),
    "prediction": ((), "leave it out"),
    "include_reasoning": ((True,), "reasoning is told where it can be told apart"),
    "features": ((), "only text goes in and out"),
    "content_parts": (([],), "only text goes in and out"),
    "mm_processor_kwargs": (({},), "only text goes in and out"),
    "documents": (([],), "put them into the messages"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "only chats have a template"),
    "add_generation_prompt": ((True,), "a reply is always the model's"),
    "continue_final_message": ((False,), "use /v1/completions with the rendered text"),
    "add_special_tokens": ((False,), "nothing is added to a prompt"),
    "truncate_prompt_tokens": ((), "a prompt is never cut"),
    "spaces_between_special_tokens": ((True,), "leave it out"),
    "detokenize": ((True, False), "leave it out"),
    "cache_salt": (("",), "cached prefixes are shared by all requests to this server"),
    "priority": ((0,), "requests are served as they come"),
    "reasoning_effort": ((), "only chats have a template that could be told"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is kept"),
    "web_search_options": ((), "there is no search"),
    "output_mode": (("tokens",), "use /v1/completions for text"),
    "kv_transfer_params": ((), "there is one engine"),
}
"""Field -> the values that ask for nothing, and why others are refused."""
WITHOUT_EFFECT = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key"),
    "routed_experts_prompt_start",  # says where something begins that is never sent
)
"""Names for the caller's own books, and what `verifiers` always sends: they cannot change an answer."""


class Fields:
    """The fields of one object; `null` is as good as absent."""

    def __init__(self, values: Mapping[str, Any], *, within: str = "") -> None:
        """`within` is the object's own name, for messages."""
        self._left = {name: value for name, value in values.items() if value is not None}
        self._within = within

    def name(self, name: str) -> str:
        """A field's name as messages show it."""
        return f"{self._within}.{name}" if self._within else name

    def take(self, name: str) -> Any:
        """The value as it is; None where there is none."""
        return self._left.pop(name, None)

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number of low..high."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise bad(self.name(name), f"give a whole number of {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number of low..high."""
        value = self.take(name)
        if value is None:
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not good or not low <= value <= high:  # NaN is in no range
            raise bad(self.name(name), f"give a number of {low} to {high}")
        return float(value)

    def switch(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad(self.name(name), "give true or false")
        return value

    def text(self, name: str, longest: int) -> str | None:
        """A string."""
        value = self.take(name)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > longest:
            raise bad(self.name(name), f"give a string of at most {longest} characters")
        return value

    def section(self, name: str) -> "Fields":
        """An object of its own; empty where there is none."""
        value = self.take(name)
        if not isinstance(value, dict | None):
            raise bad(self.name(name), "give an object")
        return Fields(value or {}, within=self.name(name))

    def finish(self) -> None:
        """Refuse what nobody has taken. Raises ApiError."""
        for name, value in self._left.items():
            if name in WITHOUT_EFFECT:
                continue
            if name not in NEUTRAL:
                raise ApiError(
                    400,
                    f"{self.name(name)}: unknown field",
                    param=self.name(name),
                    code="unknown_parameter",
                )
            allowed, why = NEUTRAL[name]
            if not any(value == one for one in allowed):
                raise bad(self.name(name), f"not supported ({why})", code="unsupported_parameter")
