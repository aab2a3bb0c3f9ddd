"""Where strings end a reply, and replies that are generated up to there."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.chat_model import IM_END, make_chat_model
from tokenizers import Tokenizer, decoders, models

from primerl.node.environments.chat import ChatFormat
from primerl.node.environments.policies import Exchange
from primerl.node.environments.stop_strings import FIRST_PART, StopStrings, generate_until
from primerl.node.inference.engine import Completion, GenerateRequest
from primerl.node.models.support import pack_support, support_fault

TEXT = b"an answer: <b>42</b> and more" * 40


def spelled(token: int) -> bytes:
    """Two letters are one token, above the bytes."""
    return bytes([token]) if token < 256 else bytes([token >> 8, token & 255])


@pytest.mark.parametrize(
    ("strings", "tokens", "end"),
    [
        (["c"], b"abcabc", 3),
        (["bc", "ab"], b"abcabc", 2),  # the one that is complete first
        (["abc", "bc"], b"abcabc", 3),
        (["x"], b"abc", 0),
        (["ca"], [97, 98 << 8 | 99, 97 << 8 | 98], 3),  # across tokens: the text goes on behind it
        (["\u00e9"], "caf\u00e9!".encode(), 5),  # a character of two tokens
        (["a"], b"", 0),
    ],
)
def test_a_reply_ends_with_the_first_token_that_completes_a_string(
    strings: list[str], tokens: Sequence[int], end: int
) -> None:
    assert StopStrings(strings, spelled).end(tokens) == end


def test_tokens_have_the_space_before_them_where_texts_begin_without_it(tmp_path: Path) -> None:
    """As SentencePiece's: the first word of a text loses its space, and each token is a first one alone."""
    make_chat_model(tmp_path)
    words = {"<unk>": 0, "a": 1, "\u2581the": 2, "\u2581": 3, "<|im_end|>": 4}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4}')
    chat = ChatFormat.load(tmp_path)
    assert chat.text([2]) == "the"
    assert chat.piece(2) == b" the"
    assert StopStrings([" the"], chat.piece).end([1, 2]) == 2


def test_pieces_of_bytes_are_bytes(tmp_path: Path) -> None:
    chat = ChatFormat.load(make_chat_model(tmp_path))
    assert [chat.piece(one) for one in "\u00e9".encode()] == [b"\xc3", b"\xa9"]
    assert chat.piece(IM_END) == b"<|im_end|>"


class Writer:
    """An engine that writes TEXT, in which each token's logprob, proof and route say its place."""

    def __init__(self, *, version_at: int = 10**9, length: int = 10**9) -> None:
        self.parts: list[int] = []
        self._version_at, self._length = version_at, length

    async def generate(self, request: GenerateRequest) -> Completion:
        start = len(request.prompt) - 1
        end = min(start + request.max_tokens, self._length)
        self.parts.append(end - start)
        places = range(start, end)
        versions = [int(place >= self._version_at) for place in places]
        new = versions.index(1) if 1 in versions else 0
        return Completion(
            token_ids=list(TEXT[start:end]),
            logprobs=[-float(place) for place in places],
            finish="length",
            policy_first=versions[0],
            policy_last=versions[-1],
            spans=((0, 0), (new, 1)) if versions[0] != versions[-1] else (),
            proof=b"".join(place.to_bytes(8, "big") for place in places),
            boundaries=(b"".join(place.to_bytes(8, "big") for place in places),),
            plan=b"plan",
            routes=b"".join(place.to_bytes(3, "big") for place in places),
            support=pack_support(
                np.array(
                    [[TEXT[at], *range(300, 300 + at % 5), *[-1] * 5][:6] for at in places],
                    np.int32,
                ),
                list(TEXT[start:end]),
            ),
        )


REQUEST = GenerateRequest((7,), 600, 1.0, 5, (IM_END,))


@pytest.mark.parametrize("version_at", [0, 30, FIRST_PART, 150, 10**9])
@pytest.mark.parametrize("stop", [b"</b>", TEXT[170:200], TEXT[120:135], b"nowhere"])
async def test_parts_are_what_one_generation_up_to_the_string_would_be(
    stop: bytes, version_at: int
) -> None:
    stops = StopStrings([stop.decode()], spelled)
    engine = Writer(version_at=version_at)
    found = await generate_until(engine.generate, REQUEST, stops)
    whole = await Writer(version_at=version_at).generate(REQUEST)
    assert found == stops.cut(whole)
    count = len(found.token_ids)
    assert (count, found.finish) == (
        (TEXT.find(stop) + len(stop), "stop") if stop in TEXT else (600, "length")
    )
    assert [len(found.logprobs), len(found.proof), len(found.routes)] == [
        count,
        8 * count,
        3 * count,
    ]
    assert support_fault(found.support, found.token_ids, 305, 0, 0.5) == ""
    assert sum(engine.parts) < 2 * count + FIRST_PART


async def test_a_reply_that_the_engine_ends_is_not_continued() -> None:
    engine = Writer(length=100)
    found = await generate_until(engine.generate, REQUEST, StopStrings(["nowhere"], spelled))
    assert (len(found.token_ids), found.finish, len(engine.parts)) == (100, "length", 2)


async def test_without_strings_a_reply_is_one_request() -> None:
    engine = Writer()
    await generate_until(engine.generate, REQUEST, None)
    assert engine.parts == [600]


async def test_an_episode_gets_no_more_than_up_to_the_string() -> None:
    """Whatever the policy sends: also of an engine that knows no strings, as in an evaluation."""
    engine = Writer()

    async def policy(prompt: Sequence[int], turn: int) -> Completion:
        return await engine.generate(replace(REQUEST, prompt=tuple(prompt)))

    stops = StopStrings(["</b>"], spelled)
    exchange = Exchange(policy, max_tokens=600, stop_token_ids=(IM_END,), deadline=9.0, stops=stops)
    found = await exchange.sample([7])
    assert bytes(found.token_ids) == b"an answer: <b>42</b>"
    assert (found.finish, len(found.proof)) == ("stop", 8 * 20)
