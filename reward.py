"""Problems, their checkers, and the two rewards of Agon. Imports nothing of ours: copy it alone.

Everything Agon learns comes from c(y), so every rule here is written down and strict:
an answer counts only inside the last complete <answer> block after the last </think>; prose is never graded.

METHOD symbols:  a draft, b challenge (reads a's summary), c(y) in {0,1} correctness, phi(y) in [0,1] format score,
lam = 0.5.       R(a) = 2 c(a) + lam phi(a)                          draft_reward
                 R(b) = 2 c(b) + c(b) (1 - c(a)) + lam phi(b)        challenge_reward
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"


@dataclass(frozen=True)
class Problem:
    """One problem. `question` is all that a policy may see; `gold` is for the checker alone."""

    question: str
    gold: str
    kind: str = "congruence"  # which entry of CHECKERS decides c(y)


# ---------------------------------------------------------------------------------------------------------------
# Reading a response


def extract_answer(response: str) -> str | None:
    """The text of the last complete <answer> block after the last </think>, or None.

    The opening <think> is optional, because some chat templates write it at the end of the prompt. A response that
    never closes its thought has no answer, whatever stands inside it. Plain string search from the right: linear,
    where the obvious lazy regex is quadratic on a policy that loops on "<answer>".
    """
    closed = response.rfind(THINK_CLOSE)
    if closed < 0:
        return None
    tail = response[closed + len(THINK_CLOSE) :]
    end = tail.rfind(ANSWER_CLOSE)
    start = tail.rfind(ANSWER_OPEN, 0, max(end, 0))
    return None if start < 0 else tail[start + len(ANSWER_OPEN) : end]


def format_score(response: str) -> float:
    """phi: 1.0 for exactly one closed thought, then exactly one closed answer block, then nothing; else 0.0.

    Text between the two is the summary and is welcome. `response` is the decoded completion cut at its first
    end-of-turn id, so a trailing special token is not "something after the answer".
    """
    thought, closed, tail = response.strip().partition(THINK_CLOSE)
    opened = thought.count(THINK_OPEN)  # 0 when the chat template already opened the thought in the prompt
    ok = (
        closed != ""
        and (opened == 0 or (opened == 1 and thought.startswith(THINK_OPEN)))
        and ANSWER_OPEN not in thought
        and THINK_OPEN not in tail
        and THINK_CLOSE not in tail
        and tail.count(ANSWER_OPEN) == 1
        and tail.count(ANSWER_CLOSE) == 1
        and tail.find(ANSWER_OPEN) < tail.find(ANSWER_CLOSE)
        and tail.endswith(ANSWER_CLOSE)
    )
    return 1.0 if ok else 0.0


# ---------------------------------------------------------------------------------------------------------------
# The rewards. Note what group normalisation later does to the additive phi: [.5 .5 .5 0] and [3.5 3.5 3.5 3] give the
# same advantages, so in a group whose outcomes are all equal the format is all that is learned (agon.py counts them).


def draft_reward(correct: bool, phi: float, lam: float = 0.5) -> float:
    """R(a) = 2 c(a) + lam phi(a). No rival term: this stream keeps each policy able to solve alone."""
    return 2.0 * correct + lam * phi


def challenge_reward(correct: bool, rival_correct: bool, phi: float, lam: float = 0.5, bonus: float = 1.0) -> float:
    """R(b) = 2 c(b) + bonus c(b) (1 - c(a)) + lam phi(b). bonus = 1 is Agon, bonus = 0 the cooperative exchange.

    The middle term is the conversion bonus: solving where the rival failed is worth 3, elsewhere 2. Copying is right
    exactly when the rival was, so it can never collect the bonus.
    """
    return 2.0 * correct + bonus * correct * (not rival_correct) + lam * phi


# ---------------------------------------------------------------------------------------------------------------
# The built-in task: find x with a x = b (mod p), by trial, on a short budget. Correctness cannot be seen without
# working, a draft's summary carries useful progress (where its search stopped), and copying is the tempting shortcut:
# a miniature of hard reasoning that a 150k-parameter model can do.

CONGRUENCE = re.compile(r"\s*([0-9]{1,2})\s*\*?\s*x\s*=\s*([0-9]{1,2})\s*\(\s*mod\s+([0-9]{1,2})\s*\)\s*\Z")
MODULI = (17, 19, 23)


def congruence(text: str) -> Problem:
    """Parse "14x = 9 (mod 19)" into a Problem in canonical spelling (two-digit numbers). Raises ValueError."""
    match = CONGRUENCE.match(text) if len(text) <= 100 else None
    if not match:
        raise ValueError(f"not a problem of the built-in task: {text[:60]!r} (write it like '14x = 9 (mod 19)')")
    a, b, p = (int(g) for g in match.groups())
    if p not in MODULI or not (2 <= a < p and 1 <= b < p):
        raise ValueError(f"{text.strip()!r}: the modulus must be 17, 19 or 23, with 2 <= a < p and 1 <= b < p")
    return Problem(f"{a:02d}x = {b:02d} (mod {p})", f"{pow(a, -1, p) * b % p:02d}")


def congruence_correct(response: str, gold: str) -> bool:
    """c(y) for the built-in task: the answer block holds the one residue x, written in digits."""
    answer = (extract_answer(response) or "").strip()
    return re.fullmatch(r"[0-9]{1,4}", answer) is not None and int(answer) == int(gold)


CHECKERS: dict[str, Callable[[str, str], bool]] = {"congruence": congruence_correct}


def is_correct(problem: Problem, response: str) -> bool:
    """c(y): the verified correctness of one response, by the checker of the problem's kind."""
    return CHECKERS[problem.kind](response, problem.gold)


def load_problems(name: str, split: str = "train", limit: int | None = None, seed: int = 0) -> list[Problem]:
    """The problems of one split: "train", "validation" or "test", disjoint and always the same for one seed.

    "congruence" is the built-in task: 1,008 distinct problems, 408 train, 100 validation, 500 test.
    Raises ValueError for an unknown name or split.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit {limit}: must be 0 or more")
    if name != "congruence":
        raise ValueError(f"unknown data set {name!r} (known: congruence)")
    problems = [
        Problem(f"{a:02d}x = {a * x % p:02d} (mod {p})", f"{x:02d}")
        for p in MODULI
        for a in range(2, p)
        for x in range(1, p)
    ]
    random.Random(seed).shuffle(problems)
    splits = {"test": problems[:500], "validation": problems[500:600], "train": problems[600:]}
    if split not in splits:
        raise ValueError(f"unknown split {split!r} of {name} (known: train, validation, test)")
    return splits[split][:limit]
