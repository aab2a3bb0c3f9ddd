"""prime-rl's `reverse-text`: reverse the texts of a data set of the hub, in tags.

Prompt, tags, columns and the score are those of the environment of that name in the repository of `verifiers`;
rows are those of hub_rows.py. The bundled `reverse-text` is another task: short random strings, without tags.
"""

# A hook must name the library's bare Trace, which is generic.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false

import difflib
import re
from collections.abc import Iterator

import verifiers.v1 as vf

from .hub_rows import HubRowsConfig

SYSTEM = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."
TAGGED = re.compile(r"<reversed_text>(.*?)</reversed_text>", re.DOTALL)


class ReverseTextHubConfig(HubRowsConfig):
    """Options of the data set."""

    dataset_name: str = "PrimeIntellect/Reverse-Text-RL"


class ReverseTextHubData(vf.TaskData):
    """One text, its reverse, and a right reply."""

    reverse: str
    answer: str


class ReverseTextHubTask(vf.Task[ReverseTextHubData]):
    """Task of one turn: the first tagged text of the reply is compared with the reverse."""

    @vf.stop
    async def answered(self, trace: vf.Trace) -> bool:
        """End the conversation after one reply."""
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def lcs(self, trace: vf.Trace) -> float:
        """Return difflib's ratio of the tagged text and the reverse, 0.0..1.0.

        As there, difflib leaves frequent characters out of account from 200 characters on.
        """
        text = _tagged(trace.last_reply)
        return difflib.SequenceMatcher(None, text, self.data.reverse).ratio()

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1.0 if the tagged text is the reverse, else 0.0."""
        return float(_tagged(trace.last_reply) == self.data.reverse)


def _tagged(reply: str) -> str:
    match = TAGGED.search(reply)
    return match.group(1).strip() if match else ""


class ReverseTextHubTaskset(vf.Taskset[ReverseTextHubTask, ReverseTextHubConfig]):
    """Taskset with one task for each row."""

    def load(self) -> Iterator[ReverseTextHubTask]:
        """Yield the tasks of all rows in order. Raises ValueError for a row without a text."""
        for index, row in enumerate(self.config.rows()):
            text = row.get("prompt")
            if not isinstance(text, str):
                raise ValueError(
                    f"row {index} of {self.config.dataset_name} has no text in its column prompt: "
                    "give another dataset_name"
                )
            values = {
                "idx": index,
                "prompt": text,
                "system_prompt": SYSTEM,
                "reverse": text[::-1],
                "answer": f"<reversed_text>\n{text[::-1]}\n</reversed_text>",
            }
            yield ReverseTextHubTask(ReverseTextHubData.model_validate(values), self.config.task)


__all__ = ["ReverseTextHubTaskset"]
