"""What the target is given to write or to read: nothing, prompts, or whole texts."""

import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.models import chat
from specjax.models.language_model import LanguageModel
from specjax.static import show, whole
from specjax.train.generate import Plan

WAIT = "\u241e"  # stands for the user's words while the chat template is taken apart
INSTEAD = "give existing text instead (--text FILE, specjax.train.Text)"

# How requests begin. Left alone a small model writes few kinds of them.
STARTERS = (
    "Summarize:", "Summarize the following text:", "Write a", "Write a short story about", "Write an email to",
    "Write a poem about", "Write a function that", "Translate", "Translate the following sentence into",
    "What is", "What are the", "What happens when", "Who was", "When did", "Where is", "Why do", "Why is", "How do I",
    "How many", "How does", "Explain", "Explain the difference between", "Solve", "Calculate", "If a", "Compare",
    "Describe", "List five", "Give me", "Give an example of", "Can you", "Could you help me", "I need", "I want to",
    "Rewrite", "Correct the grammar:", "Classify", "Create a", "Imagine you are", "Question:",
    "Read the text and answer:", "Tell me about", "Suggest", "Define", "In the year", "My friend",
)  # fmt: skip

ANSWERS = ((0.0, 0.4), (0.7, 0.35), (1.0, 0.25))


class SelfSynthesis(NamedTuple):
    """The target writes the user's turn and then answers it. Needs a chat template and nothing else."""

    turn_tokens: int = 48  # longest user's turn
    answer_tokens: int = 192  # longest answer
    temperatures: tuple[tuple[float, float], ...] = ANSWERS  # of answers: (temperature, share)
    turn_temperature: float = 1.0
    turn_top_p: float = 0.95
    started: float = 0.4  # share of turns whose first words are given
    starters: tuple[str, ...] = STARTERS


class Prompts(NamedTuple):
    """Prompts from a file, each answered once, in an order drawn by the seed.

    A ``.jsonl`` file has a string a line, or an object with ``prompt``, ``question`` or ``turns`` (the first counts);
    any other file is text with a prompt a line.
    """

    path: str
    answer_tokens: int = 192
    temperatures: tuple[tuple[float, float], ...] = ANSWERS


class Text(NamedTuple):
    """Texts that exist, only read: laws without generation.

    A ``.jsonl`` file has a string a line, or an object with ``text``; an ``.npz`` file is one of `train.texts`; any
    other file is one text. What is longer than a slot is cut.
    """

    path: str


class Planned(NamedTuple):
    """A source made ready for a target."""

    make: Callable[[int], Plan]  # the plan of conversation number n, a pure function
    count: int | None  # conversations, None: without end
    opening: tuple[int, ...]  # with which all begin
    middle: tuple[int, ...]
    answer: int
    left_out: int  # prompts that are too long
    facts: dict[str, Any]  # what decides the text, for the manifest


def ready(source: Any, target: LanguageModel, seed: int, slots: int) -> Planned:
    """The plans of a source.

    Raises:
      ValueError: no source; a broken line (names file and line); a target that cannot do it; nothing that fits.
    """
    kinds = {SelfSynthesis: _self_synthesis, Prompts: _prompts, Text: _texts}
    if type(source) not in kinds:
        raise ValueError(f"source={show(source)}: give SelfSynthesis(), Prompts(path) or Text(path)")
    planned = kinds[type(source)](source, target, seed, slots)
    facts: dict[str, Any] = {"kind": type(source).__name__, **source._asdict()}
    if "path" in facts:  # the content counts, not where it lies
        facts["path"], facts["sha256"] = pathlib.Path(source.path).name, _sha256(source.path)
    return planned._replace(facts=json.loads(json.dumps(facts)))


def _sha256(path: str) -> str:
    return hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()


def _drawn(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])


def _temperature(rng: np.random.Generator, temperatures: Sequence[tuple[float, float]]) -> float:
    values, shares = zip(*temperatures)
    total = float(sum(shares))
    return float(values[rng.choice(len(values), p=[share / total for share in shares])])


def _check_temperatures(temperatures: Any) -> None:
    try:
        fine = all(0 <= t < np.inf and 0 <= share < np.inf for t, share in temperatures)
        fine = fine and sum(share for _, share in temperatures) > 0
    except (TypeError, ValueError):
        fine = False
    if not fine:
        raise ValueError(f"temperatures={show(temperatures)}: give pairs (temperature, share), both 0 or more")


def taken_apart(target: LanguageModel) -> tuple[list[int], list[int]]:
    """Token ids of the chat template before and after the user's words.

    Raises:
      ValueError: no tokenizer or chat template, or one that does not show the words as they are.
    """
    if target.tokenizer is None or target.chat_template is None:
        missing = "tokenizer" if target.tokenizer is None else "chat template"
        raise ValueError(f"this target has no {missing} to write conversations with: {INSTEAD}")
    words = target.tokenizer
    ends = [str(getattr(words, name, "")) for name in ("bos_token", "eos_token")]
    parts = chat.render(target.chat_template, WAIT, bos_token=ends[0], eos_token=ends[1]).split(WAIT)
    if len(parts) != 2:
        raise ValueError(f"the chat template shows the user's words {len(parts) - 1} times, not once: {INSTEAD}")
    before, after = (_encode(target, part) for part in parts)
    return before, after


def _encode(target: LanguageModel, text: str) -> list[int]:
    words: Any = target.tokenizer
    try:
        return list(words.encode(text, add_special_tokens=False))
    except TypeError:  # a tokenizer that never adds any
        return list(words.encode(text))


def _self_synthesis(source: SelfSynthesis, target: LanguageModel, seed: int, slots: int) -> Planned:
    before, after = taken_apart(target)
    turn, answer = whole("turn_tokens", source.turn_tokens, 1), whole("answer_tokens", source.answer_tokens, 1)
    _check_temperatures(source.temperatures)
    if not before:
        raise ValueError("the chat template begins with the user's words: there is nothing to start from; give Prompts")
    starters = [_encode(target, text) for text in source.starters]
    room = slots - len(before) - turn - len(after) - 1
    starters = [ids for ids in starters if len(ids) <= room]
    if room < 0:
        raise ValueError(f"slots={slots}: the template, {turn} tokens of the user and an answer need {slots - room}")

    def make(number: int) -> Plan:
        rng = _drawn(seed, number)
        given = list(before)
        if starters and rng.random() < source.started:
            given += starters[rng.integers(len(starters))]
        temperature = _temperature(rng, source.temperatures)
        return Plan(number, given, slots, turn, temperature, source.turn_temperature, source.turn_top_p)

    return Planned(make, None, tuple(before[:-1]), tuple(after), answer, 0, {})


def _prompts(source: Prompts, target: LanguageModel, seed: int, slots: int) -> Planned:
    answer = whole("answer_tokens", source.answer_tokens, 1)
    _check_temperatures(source.temperatures)
    every = [target.encode_chat(text) for text in read_prompts(source.path)]
    fit = [ids for ids in every if len(ids) < slots]
    if not fit:
        raise ValueError(f"{source.path}: with the chat template no prompt is shorter than slots={slots}: give more")
    order = np.random.default_rng(seed).permutation(len(fit))

    def make(number: int) -> Plan:
        given = fit[order[number]]
        temperature = _temperature(_drawn(seed, number), source.temperatures)
        return Plan(number, given, min(slots, len(given) + answer), 0, temperature)

    return Planned(make, len(fit), _common(fit), (), answer, len(every) - len(fit), {})


def _texts(source: Text, target: LanguageModel, seed: int, slots: int) -> Planned:
    pieces = [
        (ids[begin : begin + slots], max(0, start - begin))
        for ids, start in read_texts(source.path, target)
        for begin in range(0, len(ids), slots)
    ]  # fmt: skip
    if not pieces:
        raise ValueError(f"{source.path} has no text in it")

    def make(number: int) -> Plan:
        tokens, start = pieces[number]
        return Plan(number, tokens, len(tokens), start=min(start, len(tokens)))

    return Planned(make, len(pieces), (), (), 1, 0, {})


def _common(texts: list[list[int]]) -> tuple[int, ...]:
    """What all begin with, short of the whole of any."""
    low, high = min(texts), max(texts)
    size = next((i for i, (a, b) in enumerate(zip(low, high)) if a != b), min(len(low), len(high)))
    return tuple(low[: min(size, min(map(len, texts)) - 1)])


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def _lines(path: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(_text(path).split("\n"), 1) if line.strip()]


def _of_json(path: str, number: int, line: str, keys: Sequence[str]) -> str:
    """The string of a line of JSON, or that of the first of ``keys`` it has."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error.msg}): {show(line)}") from None
    if isinstance(value, dict):
        value = next((value[key] for key in keys if key in value), None)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{path}, line {number}: give a string, or an object with {' or '.join(keys)}: {show(line)}")
    return value


def read_prompts(path: str) -> list[str]:
    """The prompts of a file, see `Prompts`.

    Raises:
      ValueError: a line that is none, with its number; a file without any.
    """
    lines = _lines(path)
    if pathlib.Path(path).suffix == ".jsonl":
        keys = ("prompt", "question", "turns")
        prompts = [_of_json(path, number, line, keys) for number, line in lines]
    else:
        prompts = [line for _, line in lines]
    if not prompts:
        raise ValueError(f"{path} has no prompt in it")
    return prompts


def read_texts(path: str, target: LanguageModel) -> list[tuple[list[int], int]]:
    """Token ids of the texts of a file, see `Text`, and the first of each that is to be learnt.

    Raises:
      ValueError: a line that is none, with its number; no tokenizer; ids outside the vocabulary.
    """
    suffix = pathlib.Path(path).suffix
    if suffix == ".npz":
        from specjax.train import texts

        found = texts.load(path)
        if found.tokens.size and not 0 <= found.tokens.min() <= found.tokens.max() < target.model.vocab_size:
            raise ValueError(f"{path} has ids outside 0..{target.model.vocab_size - 1}, the target's vocabulary")
        where = zip(found.offsets, found.lengths, found.starts, strict=True)
        return [(found.tokens[offset : offset + n].tolist(), int(start)) for offset, n, start in where if n]
    if target.tokenizer is None:
        raise ValueError("this target has no tokenizer: give token ids in an .npz file of train.texts")
    if suffix == ".jsonl":
        found = [_of_json(path, number, line, ("text",)) for number, line in _lines(path)]
    else:
        found = [_text(path)]
    return [(ids, 0) for ids in (list(target.tokenizer.encode(text)) for text in found) if ids]
