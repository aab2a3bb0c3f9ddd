"""Conversations for models behind an API, which take and give text: every character is a token.

So whatever plays tasks with token ids plays them with such a model, too. What is counted here is characters,
never the model's tokens.
"""

from collections.abc import Sequence

from .chat import Message
from .environment import EnvironmentFailed

CHARACTERS = 0x110000
"""Ids below are Unicode code points."""
END, CUT = CHARACTERS, CHARACTERS + 1
"""Close a message: complete, or cut off by a limit."""
ROLES = ("system", "user", "assistant", "tool")
"""The ids from CUT + 1 on open a message of these roles."""
ASSISTANT = CUT + 1 + ROLES.index("assistant")


class Transcript:
    """A Chat without a tokenizer or a template."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """See Chat."""
        return (END,)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """See Chat."""
        return [*(one for message in messages for one in _ids(message)), ASSISTANT]

    def continuation(self, messages: Sequence[Message], last_token: int) -> list[int]:
        """See Chat."""
        return [*([] if last_token in (END, CUT) else [CUT]), *self.prompt(messages)]

    def text(self, reply: Sequence[int]) -> str:
        """See Chat."""
        return "".join(chr(one) for one in reply if one < CHARACTERS)

    def reply(self, text: str) -> list[int]:
        """See Chat."""
        return [*map(ord, text), END]

    def messages(self, prompt: Sequence[int]) -> list[dict[str, str]]:
        """The conversation that leads to the reply that is asked for, as APIs take it."""
        found: list[tuple[str, list[int]]] = []
        for one in prompt:
            if one > CUT:
                found.append((ROLES[one - CUT - 1], []))
            elif one < CHARACTERS:
                found[-1][1].append(one)
        return [{"role": role, "content": self.text(ids)} for role, ids in found[:-1]]


def _ids(message: Message) -> list[int]:
    role, content = message["role"], message.get("content") or ""
    if role not in ROLES or not isinstance(content, str):
        raise EnvironmentFailed(
            f"a message of role {role!r} cannot be sent to an API: use a taskset of text messages"
        )
    return [CUT + 1 + ROLES.index(role), *map(ord, content), END]
