"""Guess a word of five letters, with marks after each guess.

The marks show the letters that are in place or elsewhere; with hints, the game shows those in place and one
more. An ordinary `verifiers` v1 package with an Env of its own; it needs draws.py. The hash of a word assigns
it to one split permanently.
"""

# A hook must name the library's bare types, which are generic, and states are known at run time only.
# pyright: reportMissingTypeArgument=false, reportUnknownParameterType=false
# pyright: reportAttributeAccessIssue=false, reportInvalidTypeArguments=false

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from string import ascii_lowercase
from typing import Literal

import verifiers.v1 as vf
from pydantic import Field

from .draws import Draws, is_held_out

LETTERS = 5
IN_PLACE, ELSEWHERE, ABSENT = "G", "Y", "-"
WORDS = (
    "about above actor adapt admit adult after again agree ahead alarm album alert alike alive allow "
    "alone along alter amber amend angel anger angle ankle apart apple apply apron arena argue arise "
    "armor array arrow aside atlas attic audio avoid awake award aware bacon badge baker basic basin "
    "batch beach beard beast began begin being below bench berry birth black blade blame blank blast "
    "blaze blend bless blind block bloom board boast bonus boost booth bound brain brake brand brave "
    "bread break breed brick bride brief bring broad brook broom brown brush build bunch burst cabin "
    "cable camel canal candy cargo carry carve catch cause cedar chain chair chalk charm chart chase "
    "cheap check cheek cheer chess chest chief child choir claim class clean clear clerk cliff climb "
    "clock close cloth cloud coach coast color comet coral couch count court cover crack craft crane "
    "crash crate cream creek crisp crowd crown cruel crush curve cycle daily dairy dance debut delay "
    "dense depth diary digit diner dizzy donor doubt dough draft drain drama dream dress drift drill "
    "drink drive eager eagle early earth eight elbow elect empty enemy enjoy enter entry equal error "
    "essay event exact exist extra fable faith false fancy feast fence fever fiber field fifth fight "
    "final first flame flash fleet float flock flood floor flour fluid flute focus force forge forth "
    "forum found frame fresh front frost fruit funny ghost giant given glass globe glory glove grace "
    "grade grain grand grant grape graph grass grave great green greet grief group guard guess guest "
    "guide habit happy harsh haste heart heavy hedge hello hobby honey honor horse hotel house human "
    "humor ideal image index inner input ivory jewel joint judge juice knife knock known label labor "
    "large laser later laugh layer learn leave lemon level light limit linen liver local logic loose "
    "lower loyal lucky lunar lunch magic major maker maple march match mayor medal media melon mercy "
    "merit metal meter minor model money month moral motor mount mouse mouth movie music naval nerve "
    "never night noble noise north novel nurse ocean offer olive onion opera orbit order organ other "
    "ought outer owner paint panel paper party pasta patch pause peace pearl pedal phase phone photo "
    "piano piece pilot pinch pitch pizza place plain plane plant plate plaza point polar porch pound "
    "power press price pride prime print prize proof proud pulse punch pupil queen quest quick quiet "
    "quilt quote radar radio raise ranch range rapid ratio reach ready realm rebel refer relax reply "
    "rider ridge right rival river roast robin robot rocky rough round route royal rural salad sauce "
    "scale scene scent scope score scout serve seven shade shaft shake shape share sharp sheep sheet "
    "shelf shell shift shine shirt shock shore short shout sight silly since skill slate sleep slice "
    "slide slope small smart smile smoke snake solar solid solve sound south space spare spark speak "
    "speed spell spend spice spoon sport stack staff stage stair stamp stand start state steam steel "
    "stick still stone store storm story stove straw style sugar suite sunny sweet swift sword table "
    "taste teach tenth thank theme thick thing think third throw tiger tight timer title toast today "
    "token topic torch total touch tower track trade trail train treat trend trial tribe trick truck "
    "truly trust truth tulip twice uncle under unity until upper upset urban usage usual valid value "
    "vapor video virus visit vital vivid vocal voice wagon waist watch water weave wheat wheel where "
    "while white whole width windy woman world worry worth wound wrist write wrong yacht yield young "
    "youth zebra"
).split()
"""Secret words; a guess may be any five letters."""


class WordGameConfig(vf.TasksetConfig):
    """Options of the game."""

    seed: int = 0
    split: Literal["train", "eval"] = "train"
    max_guesses: int = Field(default=6, ge=1, le=32)
    hints: bool = False
    """Whether to show the letters in place and one more after each guess, not marks: easier to use."""
    demonstration_skill: float = Field(default=1.0, ge=0.0, le=1.0)
    """Share of a demonstration's guesses that are words and fit the answers; the others are random."""


class WordGameData(vf.TaskData):
    """One secret word."""

    secret: str
    max_guesses: int
    hints: bool
    replies: tuple[str, ...]
    """Game for SFT warm-up, by a player that only knows the answers."""


class WordGameState(vf.State):
    """The guesses so far, in lower case; an empty one if a reply had none."""

    guesses: tuple[str, ...] = ()


class WordGameTask(vf.Task[WordGameData, WordGameState]):
    """One game."""

    @vf.reward(weight=1.0)
    async def solved(self, trace: vf.Trace) -> float:
        """Return 1.0 if the last guess is the secret, else 0.0."""
        return float(trace.state.guesses[-1:] == (self.data.secret,))

    @vf.reward(weight=0.2)
    async def closeness(self, trace: vf.Trace) -> float:
        """Return the share of letters in place in the best guess; one elsewhere counts half."""
        return max(
            (_closeness(marks(guess, self.data.secret)) for guess in trace.state.guesses),
            default=0.0,
        )

    @vf.metric
    async def guesses(self, trace: vf.Trace) -> float:
        """Count the guesses, replies without one included."""
        return float(len(trace.state.guesses))

    @vf.metric
    async def invalid(self, trace: vf.Trace) -> float:
        """Count the replies without a guess."""
        return float(trace.state.guesses.count(""))


def read_guess(reply: str) -> str:
    """Return the five letters in a reply's last square brackets, in lower case; else empty."""
    guesses = re.findall(r"\[\s*([A-Za-z]+)\s*\]", reply)
    return guesses[-1].lower() if guesses and len(guesses[-1]) == LETTERS else ""


def marks(guess: str, secret: str) -> str:
    """Mark each letter: G in place, Y elsewhere, - absent.

    A letter gets at most as many marks G and Y as the secret has of it.
    """
    if not guess:
        return ABSENT * LETTERS
    pairs = list(zip(guess, secret, strict=True))
    elsewhere = Counter(right for letter, right in pairs if letter != right)
    letter_marks: list[str] = []
    for letter, right in pairs:
        if letter == right:
            letter_marks.append(IN_PLACE)
        elif elsewhere[letter]:
            elsewhere[letter] -= 1
            letter_marks.append(ELSEWHERE)
        else:
            letter_marks.append(ABSENT)
    return "".join(letter_marks)


def _closeness(text: str) -> float:
    return (text.count(IN_PLACE) + 0.5 * text.count(ELSEWHERE)) / LETTERS


class WordGameEnv(vf.SingleAgentEnv):
    """Env that answers each guess, until one is right or none is left."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        """Play one game."""
        secret, guesses_left = task.data.secret, task.data.max_guesses
        async with agents.agent.interaction(task) as interaction:
            segment = await interaction.turn()
            while True:
                guess = read_guess(segment.last_reply)
                interaction.trace.state.guesses += (guess,)
                guesses_left -= 1
                if segment.terminated or guess == secret or not guesses_left:
                    return
                guesses = interaction.trace.state.guesses
                if task.data.hints:
                    answer = f"{guesses_left} left: {known(guesses, secret)}"
                else:
                    answer = answer_to(guess, secret, guesses_left)
                segment = await interaction.turn(answer)


def known(guesses: Sequence[str], secret: str) -> str:
    """Return the letters that any guess had in place, and one hint per guess; dashes for others.

    The hint is the first missing letter, but never the last missing one. A reply without a guess gives none.
    """
    pattern = [ABSENT] * LETTERS
    for guess in filter(None, guesses):
        for place, letter in enumerate(guess):
            if letter == secret[place]:
                pattern[place] = letter
        if pattern.count(ABSENT) > 1:
            place = pattern.index(ABSENT)
            pattern[place] = secret[place]
    return "".join(pattern)


def answer_to(guess: str, secret: str, guesses_left: int) -> str:
    """Describe which letters of a guess are in place or elsewhere, and the guesses left."""
    rest = f"{guesses_left} {'guess' if guesses_left == 1 else 'guesses'} left."
    if not guess:
        return f"That was no guess: write a word of {LETTERS} letters in square brackets. {rest}"
    return f"{' '.join(guess.upper())}\n{' '.join(marks(guess, secret))}\n{rest}"


class WordGameTaskset(vf.Taskset[WordGameTask, WordGameConfig]):
    """Endless taskset; task number i is made directly, without iterating from 0."""

    INFINITE = True

    def load(self) -> Iterator[WordGameTask]:
        """Yield all tasks in order."""
        return map(self.task_at, itertools.count())

    def task_at(self, index: int) -> WordGameTask:
        """Return task number `index` (from 0), a function of seed, split, options and index alone."""
        config = self.config
        words = [word for word in WORDS if is_held_out(word) == (config.split == "eval")]
        draws = Draws("word-game", config.seed, config.split, index)
        secret = draws.choice(words)
        rules = _HINTED_RULES if config.hints else _RULES
        values = {
            "idx": index,
            "prompt": rules.format(letters=LETTERS, guesses=config.max_guesses),
            "secret": secret,
            "replies": tuple(f"[{guess}]" for guess in _shown_game(draws, words, secret, config)),
            "max_guesses": config.max_guesses,
            "hints": config.hints,
        }
        return WordGameTask(WordGameData.model_validate(values), config.task)


def _shown_game(
    draws: Draws, words: Sequence[str], secret: str, config: WordGameConfig
) -> Iterator[str]:
    """Yield guesses up to the secret; the skilled ones are from `words`."""
    guesses, fitting = list[str](), words
    for guesses_left in reversed(range(config.max_guesses)):
        is_skilled = draws.below(1000) < 1000 * config.demonstration_skill
        letters = "".join(draws.choice(ascii_lowercase) for _ in range(LETTERS))
        guesses.append(draws.choice(fitting) if is_skilled else letters)
        yield guesses[-1]
        if guesses[-1] == secret or not guesses_left:
            return
        if config.hints:
            pattern = known(guesses, secret)
            fitting = [word for word in words if fits(word, pattern)]
        else:
            pattern = marks(guesses[-1], secret)
            fitting = [word for word in fitting if marks(guesses[-1], word) == pattern]


def fits(word: str, pattern: str) -> bool:
    """Return whether a word has all letters that are known."""
    return all(letter in (mark, ABSENT) for mark, letter in zip(word, pattern, strict=True))


_RULES = (
    "Guess a secret English word of {letters} letters. You have {guesses} guesses. After each one "
    f"every letter gets a mark: {IN_PLACE} if it is in its place, {ELSEWHERE} if it is elsewhere in "
    f"the word, {ABSENT} if it is not in it. Write each guess in square brackets, such as [crane]."
)

_HINTED_RULES = "Guess a word of {letters} letters in [ ]. {guesses} left."


__all__ = ["WordGameEnv", "WordGameTaskset"]
