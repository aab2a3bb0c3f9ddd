"""Answer questions from pages: the model searches, reads a section, and answers. The pages lie beside this module."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import verifiers.v1 as vf

HERE = Path(__file__).parent
FOUND = 5
"""Most pages of a search."""
MOST_WORDS = 20
"""A longer answer earns nothing: it could list whatever it read."""


class WikiSearchConfig(vf.TasksetConfig):
    """Options, set by `environment.args` of a run."""

    seed: int = 0


class WikiSearchData(vf.TaskData):
    """One task: `prompt` is asked. `replies` are those of a good rollout, which a warm-up learns from."""

    answer: str
    replies: tuple[str, ...] = ()


class WikiSearchState(vf.State):
    """What a rollout remembers between its turns; each field needs a default."""

    read: tuple[str, ...] = ()


class WikiSearchToolset(vf.Toolset[vf.SharedToolsetConfig, WikiSearchState]):
    """The tools. Equal calls must have equal results: the trainer makes every call again."""

    TOOL_PREFIX = None

    @vf.tool
    async def search_pages(self, query: str) -> str:
        """Find pages by words."""
        return search(query)

    @vf.tool
    async def view_sections(self, page_id: str) -> str:
        """List the sections of a page."""
        return "\n".join(f"{page_id}:{name}" for name in page_of(page_id))

    @vf.tool
    async def read_section(self, section_id: str) -> str:
        """Read a section."""
        page_id, _, name = section_id.partition(":")
        sections = page_of(page_id)
        if name not in sections:
            raise ValueError(f"no such section; there are {', '.join(sections)}")
        self.state.read += (section_id,)
        return sections[name]


def rows(name: str) -> list[dict[str, Any]]:
    """The lines of a file beside this module."""
    text = (HERE / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines() if line.strip()]


@cache
def pages() -> dict[str, tuple[str, dict[str, str]]]:
    """WikiSearch and sections of each page, by id: pages.jsonl has `id`, `title` and `content`, which is Markdown."""
    return {row["id"]: (row["title"], sections(row["content"])) for row in rows("pages.jsonl")}


def sections(content: str) -> dict[str, str]:
    """The text of each section by its heading; what comes before the first is `top`."""
    parts = re.split(r"^#+ *(.*)$", content, flags=re.MULTILINE)
    named = [("top", parts[0]), *zip(parts[1::2], parts[2::2], strict=True)]
    return {"_".join(words(name)) or "top": text.strip() for name, text in named if text.strip()}


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


@cache
def index() -> dict[str, list[str]]:
    """The ids of the pages that have a word, by word."""
    found: dict[str, list[str]] = {}
    for page_id, (title, parts) in pages().items():
        for word in {*words(title), *words(" ".join(parts)), *words(" ".join(parts.values()))}:
            found.setdefault(word, []).append(page_id)
    return found


def search(query: str) -> str:
    """The pages with most of the query's words, where a rare word counts for more.

    By whole numbers, since a result has to be the same on every machine.
    """
    scores: Counter[str] = Counter()
    for word in sorted(set(words(query))):
        having = index().get(word, [])
        scores.update({page_id: 1000 * len(pages()) // len(having) for page_id in having})
    best = sorted(scores, key=lambda page_id: (-scores[page_id], page_id))[:FOUND]
    return "\n".join(f"{page_id} {pages()[page_id][0]}" for page_id in best) or "nothing found"


def page_of(page_id: str) -> dict[str, str]:
    """The sections of a page. What is raised here is what the model reads."""
    if page_id not in pages():
        raise ValueError("no such page; search for it")
    return pages()[page_id][1]


def is_right(reply: str, answer: str) -> bool:
    """Whether a short reply has the words of the answer, in their order."""
    said, right = words(reply), words(answer)
    starts = range(len(said) - len(right) + 1)
    return len(said) <= MOST_WORDS and any(said[at : at + len(right)] == right for at in starts)


class WikiSearchTask(vf.Task[WikiSearchData, WikiSearchState]):
    """Ends with the first reply that calls no tool, and scores it."""

    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(is_right(trace.last_reply, self.data.answer))

    @vf.metric
    async def sections_read(self, trace: vf.Trace) -> float:
        return float(len(trace.state.read))


class WikiSearchTaskset(vf.Taskset[WikiSearchTask, WikiSearchConfig]):
    """Task 7 is the eighth line of questions.jsonl: `question`, `answer` and, for a warm-up, `section`."""

    @classmethod
    def toolsets(cls, config: WikiSearchConfig) -> list[vf.Toolset]:
        """One toolset for all rollouts: what each of them remembers is in its state."""
        return [WikiSearchToolset(vf.SharedToolsetConfig())]

    def load(self) -> Iterator[WikiSearchTask]:
        index()  # made now, not in the first call of a tool, which has a deadline
        for row in rows("questions.jsonl"):
            values = {"prompt": row["question"], "answer": row["answer"], "replies": replies(row)}
            yield WikiSearchTask(WikiSearchData.model_validate(values), self.config.task)


def replies(row: dict[str, Any]) -> tuple[str, ...]:
    """A search for the page, the section that has the answer, the answer; nothing without a `section`."""
    if not (section := row.get("section")):
        return ()
    title = pages()[section.partition(":")[0]][0]
    calls = (("search_pages", {"query": title}), ("read_section", {"section_id": section}))
    made = (json.dumps({"name": name, "arguments": given}) for name, given in calls)
    return (*(f"<tool_call>{call}</tool_call>" for call in made), row["answer"])


__all__ = ["WikiSearchTaskset"]
