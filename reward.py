"""Problems, their checkers, and the two rewards of Agon. Imports nothing of ours: copy it alone.

Everything Agon learns comes from c(y), so every rule here is written down and strict:
an answer counts only inside the last complete <answer> block after the last </think>; prose is never graded.

Symbols: a draft, b challenge (it reads a's summary), c(y) correctness, phi(y) format score: each 0 or 1; lam = 0.5.

A long file, because it is copied alone, but its parts do not lean on each other. Whoever came for the method reads the
first and stops there.
    1 reading a response, the rewards, the built-in task   extract_answer, format_score, draft_reward, challenge_reward
    2 mathematics: one spelling, equal or not, the child   math_correct, math_equal, rational
    3 code, in a sandbox                                   code_correct, run_program
    4 data                                                 load_problems
    5 python reward.py FILE.jsonl                          grades the responses in a file (needs tqdm)
The maths grader runs this very file again as its child process: paste it into a module, not into a notebook cell.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
ANSWER_OPEN, ANSWER_CLOSE = "<answer>", "</answer>"
logger = logging.getLogger("reward")

# What befell the graders. Mathematics: timeout, memory, crash, error. Code: code-timeout, code-memory,
# code-output-limit, and sandbox-error, which is tried again and is never a verdict.
EVENTS: Counter[str] = Counter()
EVENTS_LOCK = threading.Lock()


def count(event: str) -> None:
    with EVENTS_LOCK:
        EVENTS[event] += 1


class GradingError(OSError):
    """The machinery of grading failed. Never a verdict: no answer is wrong because of it."""


@dataclass(frozen=True)
class Problem:
    """One problem. `question` is all that a policy may see; `gold` is for the checker alone."""

    question: str
    gold: str = ""
    kind: str = "congruence"  # which entry of CHECKERS decides c(y)
    tests: tuple[tuple[str, str], ...] = ()  # (stdin, expected stdout), for kind "code"


# ---------------------------------------------------------------------------------------------------------------
# Reading a response


def extract_answer(response: str) -> str | None:
    """The text of the last complete <answer> block after the last </think>, or None.

    The opening <think> is optional, because some chat templates write it at the end of the prompt. A response that
    never closes its thought has no answer, whatever stands inside it. Plain string search from the right: linear,
    where the obvious lazy regex is quadratic on a policy that loops on "<answer>".
    """
    _, closed, tail = response.rpartition(THINK_CLOSE)
    _, opened, answer = tail.rpartition(ANSWER_CLOSE)[0].rpartition(ANSWER_OPEN)
    return answer if closed and opened else None


def format_score(response: str) -> float:
    """phi: 1.0 for exactly one closed thought, then exactly one closed answer block, then nothing; else 0.0.

    Text between the two is the summary and is welcome. `response` is the decoded completion cut at its first
    end-of-turn id, so a trailing special token is not "something after the answer".
    """
    thought, _, tail = response.strip().partition(THINK_CLOSE)
    thought = thought.removeprefix(THINK_OPEN)  # not there when the chat template opened the thought in the prompt
    one_thought = THINK_OPEN not in thought and ANSWER_OPEN not in thought
    one_answer = re.findall("</?(?:think|answer)>", tail) == [ANSWER_OPEN, ANSWER_CLOSE]
    return float(one_thought and one_answer and tail.endswith(ANSWER_CLOSE))


# ---------------------------------------------------------------------------------------------------------------
# The rewards. Note what group normalisation later does to the additive phi: [.5 .5 .5 0] and [3.5 3.5 3.5 3] give the
# same advantages, so in a group whose outcomes are all equal the format is all that is learned (agon.py counts them).


def draft_reward(correct: bool, phi: float, lam: float = 0.5) -> float:
    """R(a) = 2 c(a) + lam phi(a). No rival term: this stream keeps each policy able to solve alone."""
    return 2.0 * correct + lam * phi


def challenge_reward(
    correct: bool,
    rival_correct: bool,
    phi: float,
    lam: float = 0.5,
    bonus: float = 1.0,
    margin: float = 0.0,
    tiebreak: float = 0.0,
    shorter: bool = False,
) -> float:
    """R(b) = 2 c(b) + bonus c(b) (1 - c(a)) - margin c(a) + tiebreak c(b) c(a) [b is shorter] + lam phi(b).

    bonus = 1, margin = 0 is Agon: solving where the rival failed is worth 3, elsewhere 2. Copying is right exactly when
    the rival was, so it can never collect the bonus. bonus = 0, margin = 0 is the cooperative exchange; bonus = 0,
    margin = 2 pays 2 (c(b) - c(a)). tiebreak, with `shorter` for len(b) < len(a) in tokens, is the auxiliary study's.
    """
    conversion, both = correct and not rival_correct, correct and rival_correct
    return 2.0 * correct + bonus * conversion - margin * rival_correct + tiebreak * (both and shorter) + lam * phi


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


# ---------------------------------------------------------------------------------------------------------------
# Mathematics, 1: one spelling. math-verify (sympy) decides whether two answers are equal, but it refuses much that is
# right (pi/2, 42., 90°) and accepts some that is wrong (52_9 for 52_8, dollars for cents). `clean` repairs the first,
# `same` and `scalar` stop the second by comparing structure themselves: names, lists, tuples, sets, units, bases.

PLAIN = re.compile(
    r"""(?P<sign>[-+]?)\s*(?:
      (?:(?P<whole>[0-9]+)\s*(?:\s|(?=\\)))?\\[dtc]?frac\s*(?:\{\s*(?P<a>-?[0-9]+)\s*\}|(?P<a1>[0-9]))
                                                      \s*(?:\{\s*(?P<b>-?[0-9]+)\s*\}|(?P<b1>[0-9]))
    | (?:(?P<whole2>[0-9]+)\s+)?(?P<a2>[0-9]+)\s*/\s*(?P<b2>[0-9]+)
    | (?P<lead>[0-9]*)\.(?P<fixed>[0-9]*)(?:\\(?:overline|bar|dot)\s*)?(?:\{(?P<rep>[0-9]+)\}|\((?P<rep1>[0-9]+)\))
    | (?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)
      (?:[eE](?P<e>[-+]?[0-9]{1,3})|\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*(?P<e1>[-+]?[0-9]{1,3})\s*\}|(?P<e2>-?[0-9]{1,3})))?
    )\s*(?P<pct>\\?%)?""",
    re.VERBOSE,
)


def rational(text: str) -> Fraction | None:
    r"""The exact value of a plainly written number, or None.

    42, -3.50, 1,234 (but not 0,1), 3/4, \frac34, 2 1/2 (but not 4 10/3), 28\%, 1.5e3, 6.7 \times 10^{-5}, 0.\overline3.
    """
    if len(text) > 400:
        return None
    text = re.sub(r"\\[!,; ]|(?<!\\)\$|\\[()\[\]]", "", text.replace("\u2212", "-")).strip()
    while box := re.fullmatch(r"\\(?:boxed|fbox)\s*\{([^{}]*(?:\{[^{}]*\}[^{}]*){0,4})\}", text):
        text = box[1].strip()
    if not (m := PLAIN.fullmatch(text)):
        return None
    if top := m["a"] or m["a1"] or m["a2"]:
        a, b, whole = int(top), int(m["b"] or m["b1"] or m["b2"]), m["whole"] or m["whole2"]
        if b == 0 or (whole and not 0 < a < b):
            return None
        value = Fraction(a, b) + int(whole or 0)
    elif repeat := m["rep"] or m["rep1"]:
        scale, nines = 10 ** len(m["fixed"]), 10 ** len(repeat) - 1
        value = Fraction(int(m["lead"] + m["fixed"] or 0) * nines + int(repeat), scale * nines)
    else:
        power = int(m["e"] or m["e1"] or m["e2"] or 0)
        value = Fraction(m["number"].replace(",", "").rstrip(".")) * Fraction(10) ** power
    return (-value if m["sign"] == "-" else value) / (100 if m["pct"] else 1)


LATEX_OF = r"""− - – - ÷ / × \times · \cdot ⋅ \cdot ∞ \infty π \pi ° ^\circ ≤ \le ≥ \ge ≠ \neq ± \pm ≈ \approx √ \sqrt
    ∛ \sqrt[3] ∫ \int ∑ \sum Σ \sum ∏ \prod ∪ \cup ∩ \cap ∈ \in ∅ \emptyset ≡ \equiv ℝ \mathbb{R} ℤ \mathbb{Z}
    ℕ \mathbb{N} ℚ \mathbb{Q} ℂ \mathbb{C} α \alpha β \beta γ \gamma ζ \zeta θ \theta λ \lambda μ \mu ρ \rho φ \phi
    ω \omega € \text{euro} £ \text{pound} ¢ \text{cent}""".split()  # noqa: SIM905
LATEX_OF = dict(zip(LATEX_OF[::2], LATEX_OF[1::2], strict=True))
RAISED, LOWERED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ", "₀₁₂₃₄₅₆₇₈₉₋ₙ"
SPELLINGS = [  # (pattern, replacement), in this order
    # what only decorates
    (r"\\(?:displaystyle|textstyle|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
    (r"\\(?:left|right)(?![a-zA-Z])\.?|[\u200b-\u200f\u2060\ufeff`]|\A\s*=|\\\\\s*\Z", ""),
    (r"\{\s*,\s*\}|,\\!\s*", ","),  # 10{,}080 and 10,\!080
    (r"\\degree(?![a-zA-Z])|(?<=[0-9])\s*\^\s*\{?\s*o\s*\}?(?![a-zA-Z])", r"^\\circ "),
    (
        r"\\(?:begin|end)\s*\{(?:aligned|align\*?|equation\*?|gathered)\}|\\(?:checkmark|[lL]arge|LARGE|[hH]uge)(?![a-zA-Z])",
        " ",
    ),
    (r"[\[(]\s*\\begin\{array\}\{[^{}]*\}(.*?)\\end\{array\}\s*[\])]", r"\\begin{pmatrix}\1\\end{pmatrix}"),
    (r"\\(?:underline|bf|(?:text)?color\s*\{\w+\})\s*\{([^{}]*)\}", r"\1"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    (r"\\varphi(?![a-zA-Z])", r"\\phi"),
    (r"(?i)\A\s*(?:(?:the )?(?:final )?answer(?: is)?\s*[: ]|option|choice)\s*(?=\S)", ""),
    (r"(?<!\\)\\[!,;:> ]|\\q?quad(?![a-zA-Z])|~", " "),
    (r"\\[()]|(?<!\\)\\[\[\]]|(?<!\\)\$|\A\*\*|\*\*\Z", " "),  # \( 5 \), $5$, **5**
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:math|text|operatorname)(?:rm|it|normal)?\s*\{\s*((?:arc)?(?:sin|cos|tan)h?|ln|log|exp)\s*\}", r"\\\1 "),
    (r"\\(?:math|text)(?:rm|it)?\s*\{\s*([ei])\s*\}", r"\1"),
    (r"\\(?:(?:text|math)(?:normal|rm|bf|it|sf|up)|mbox|hbox|operatorname)\s*(?=\{)", r"\\text"),
    (r"\\text\s*\{\s*(-?[0-9][^{}]*|[^{}a-zA-Z]*)\}|\\(?:boxed|fbox)\s*(?=[^\s{])", r" \1 "),  # \text{23}
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset "),
    (r"(?<=[)\]])\s*U\s*(?=[(\[])", r" \\cup "),
    # modulus and number base
    (r"\(\s*mod\s*([^()]+)\)|\\[bp]?mod\s*([0-9a-z]+(?![{0-9a-z]))|\\mod\s*\{([^{}]*)\}", r"\\pmod{\1\2\3}"),
    (r"\(\s*([0-9A-F]+)\s*\)\s*_", r"\1_"),
    (r"\A([0-9A-F]+)\s*(?:\\text\s*)?[({]?\s*base\s*\}?\s*([0-9]+)\s*\)?\Z", r"\1_{\2}"),
    # calculator and program notation
    (r"(?<=[0-9])j(?![a-zA-Z])", "i"),
    (r"(?<=[0-9])\s*secs?\.?\Z", " second"),  # not the secant
    (r"\+/?-", r"\\pm "),
    (r"([a-zA-Z0-9]+|\([^()]*\))!\s*\^", r"(\1!)^"),
    *(
        (rf"(?<=[0-9])\s*(?:\\text\s*\{{\s*)?{scale}(?![a-z])\s*\}}?", rf" \\cdot 10^{{{p}}}")
        for p, scale in ((2, "hundred"), (3, "thousand"), (6, "million"), (9, "billion"))
    ),
    (r"\*\*", "^"),
    (r"(?<![a-zA-Z\\])(?:infinity|infty|inf|oo)(?![a-zA-Z])", r"\\infty "),
    (r"(?<![a-zA-Z\\])(pi|sqrt|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)(?![a-zA-Z])", r"\\\1 "),
    (r"\\log(?!\s*_|[a-zA-Z])|\\log_\{?e\}?(?![a-zA-Z])", r"\\ln"),  # math-verify would take base 10
    (r"(\\(?:log|ln|sin|cos|tan)\s*[_^])\s*([0-9])(?![0-9])", r"\1{\2}"),
    (  # \sin^2 30^\circ, \tan(60^\circ): a bracket that opens here closes here
        r"(\\(?:sin|cos|tan|cot|sec|csc)\s*(?:\^\s*\{?\s*[0-9]\s*\}?)?)\s*(\(\s*|\{\s*)?([0-9.]+)\s*\^\s*"
        r"(?:\\circ(?![a-z])|\{\s*\\circ\s*\})\s*(?(2)[)}])",
        r"\1(\\frac{\3\\pi}{180})",
    ),
    (  # 3/4 x and 1/2\sqrt{3}: the fraction ends before the letter
        r"(?<![0-9a-zA-Z.,^_/)}\]])([0-9]+)\s*/\s*([0-9]+)"
        r"(?=\s*(?:\\(?!le|ge|cup|text|%|neq|pm|ldots|approx|in(?![a-z]))[a-z]|[a-zA-Z(]))",
        r"\\frac{\1}{\2} ",
    ),
    (r"(?<![0-9a-zA-Z.,])([0-9]+\.?[0-9]*|\.[0-9]+)[eE]([-+]?[0-9]{1,3})(?![0-9a-zA-Z.])", r"\1 \\cdot 10^{\2}"),
    (r"(?<=[0-9.])\s*x\s*(?=10\s*\^)|(?<=[0-9a-zA-Z)}\]])\s*\*\s*", r" \\cdot "),
    (r"!=|\\ne(?![a-zA-Z])", r"\\neq "),
    (r"<=|=<|\\leq(?:slant)?(?![a-zA-Z])", r"\\le "),
    (r">=|\\geq(?:slant)?(?![a-zA-Z])", r"\\ge "),
    (r"\\lt(?![a-zA-Z])", "<"),
    (r"\\gt(?![a-zA-Z])", ">"),
    (r"(?<![a-zA-Z\\])(?:percent(?:age)?|pct)(?![a-zA-Z])|\\text\{\s*(?:percent(?:age)?|pct)\s*\}|(?<!\\)%", r"\\%"),
    (r"\\[cl]?dots[cbmio]?(?![a-zA-Z])|\.\.\.", r"\\ldots "),
    # braces that LaTeX lets one leave out
    (r"\\sqrt\s*(\[[0-9]\])?\s*([0-9]+|[a-zA-Z])", r"\\sqrt\1{\2}"),
    (r"\\frac\s*([0-9a-zA-Z])\s*(?=[0-9a-zA-Z{])", r"\\frac{\1}"),
    (r"(\\frac\s*\{[^{}]*\})\s*([0-9a-zA-Z])", r"\1{\2}"),
    (r"\^\s*(-?[0-9]{2,}|-[a-zA-Z0-9])", r"^{\1}"),  # 10^-5, 10^12: what a person means by it
    (r"(?<=(?<!\\)\{)([1-9][0-9]{0,2}(?:,[0-9]{3})+)(?=\})", lambda m: m[1].replace(",", "")),  # \frac{20,000}{\pi}
]
SPELLINGS = [(re.compile(pattern), replacement) for pattern, replacement in SPELLINGS]
FUNCTIONS = [  # what brackets become braces, whatever stands between them
    (r"\\sqrt\s*\(", r"\sqrt{", "}"),
    (r"\\exp\s*[({]", "e^{", "}"),
    (r"\^\s*\(", "^{", "}"),
    (r"(?<![a-zA-Z\\])abs\s*\(", "|", "|"),
    (r"(?<![a-zA-Z\\])cbrt\s*\(", r"\sqrt[3]{", "}"),
]


def clean(text: str) -> str:
    """One spelling for many: what math-verify misreads or cannot read, said in LaTeX that it reads."""
    text = unbox(text)
    for mark, digits in (("^", RAISED), ("_", LOWERED)):
        plain = str.maketrans(digits, "0123456789-n")
        text = re.sub(f"[{digits}]+", lambda m, mark=mark, plain=plain: f"{mark}{{{m[0].translate(plain)}}}", text)
    text = re.sub(r"([0-9])(?=[¼-¾⅐-⅞])", r"\1 ", text)  # 2½ is 2 1/2, not 21/2
    text = "".join(LATEX_OF[c] + " " * (c not in "−–÷") if c in LATEX_OF else c for c in text)
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    for pattern, replacement in SPELLINGS:
        text = pattern.sub(replacement, text)
    for opening, before, after in FUNCTIONS:
        at = 0
        while (m := re.compile(opening).search(text, at)) and (end := closing(text, m.end() - 1)) > 0:
            text = text[: m.start()] + before + text[m.end() : end] + after + text[end + 1 :]
            at = m.start() + len(before)
    text = re.sub(r"(?<!\.)[.,;:]\Z", "", re.sub(r"\s+", " ", text).strip()).strip()
    # 1,234,567 and 7 425 000, but only outside of brackets: (2,100) is a pair
    head, equals, text = text.rpartition("=")
    if re.search(r"[(\[{]", text):
        return head + equals + text
    grouped = r"(?<![0-9.,])[1-9][0-9]{0,2}(?:([, ])[0-9]{3})(?:\1[0-9]{3})*(?![0-9]|,[0-9])"
    return head + equals + re.sub(grouped, lambda m: re.sub("[, ]", "", m[0]), text)


def closing(text: str, at: int) -> int:
    """Index of the bracket that closes the one at `at`, or -1. Kinds may differ: [0, 1) is an interval."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def unbox(text: str) -> str:
    r"""An answer without its boxes: -\boxed{5} is -5, "So \boxed{5} cm" is 5 cm. Boxes with different contents and only
    words between them become a list, which equals no single gold: a hedge."""
    boxes, end = [], 0
    for m in re.finditer(r"\\(?:boxed|fbox|framebox)\s*(?=\{)", text):
        if m.start() >= end:
            end = closing(text, m.end()) + 1
            if end == 0:
                return text
            boxes.append((m.start(), end, unbox(text[m.end() + 1 : end - 1].strip())))
    if not boxes:
        return text
    between = [text[left:right] for (_, left, _), (right, _, _) in itertools.pairwise(boxes)]
    before = text[: boxes[0][0]]
    around = before + " ".join(between)
    label = (
        r"\A[\s$]*(?:\(?[a-z0-9][).:]|[*#•])\s|\\(?:therefore|implies|[rR]ightarrow|to|approx)(?![a-z])|[\s,;.$∴→⇒≈]"
    )
    if re.search(r"(?<![\\a-zA-Z])(?!not\b)[a-zA-Z]{2,}", around) or not re.sub(label, "", around):
        # what binds to the box stays: "the value is -\boxed{10}", "either 3 or \boxed{10}"
        bound = re.search(r"(?:[-+]\$?|(?:\b(?:not|or)|[*/^<>]|\\(?:neq?|cdot|times|pm))[\s$]*)\Z", before)
        contents = ", ".join(dict.fromkeys(content for *_, content in boxes))
        return (bound[0].strip(" $") + " " if bound else "") + contents + " " + text[end:]
    return before + "".join(f" {c} {gap}" for (*_, c), gap in zip(boxes, [*between, text[end:]], strict=True))


def split(text: str, separators: str) -> list[str]:
    """Cut at what matches `separators` outside of all brackets."""
    parts, depth, start = [], 0, 0
    for m in re.finditer(rf"(?P<cut>{separators})|\\[a-zA-Z]+|\\[{{}}]|\\.|[()\[\]{{}}]", text):
        depth += (m[0] in ("(", "[", "{", r"\{")) - (m[0] in (")", "]", "}", r"\}"))
        if m["cut"] and depth == 0:
            parts.append(text[start : m.start()].strip())
            start = m.end()
    return [*parts, text[start:].strip()]


# ---------------------------------------------------------------------------------------------------------------
# Mathematics, 2: equal or not. All of this runs in a child process, because it may hang, raise or eat memory.

UNEVALUATED = re.compile(
    r"\\(?:i*int|oint|sum|prod|lim|gcd|lcm|det|max|min)(?![a-zA-Z])|vmatrix|(?<![a-zA-Z])(?:lim|sum|int|prod)_"
    r"|\\frac\s*\{\s*(?:d|\\partial)\s*[a-zA-Z]?\s*\}\s*\{\s*(?:d|\\partial)\s*[a-zA-Z]"
)
AND_OR = r",|;|\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])"
SYMBOL = r"\\?[a-zA-Z]+'*(?:_(?:\{[^{}]*\}|[0-9a-zA-Z]))?"
NAME = rf"(?:{SYMBOL}(?:\s*\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])*\s*\))?|\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\))"
BEYOND = re.compile(  # towers of powers, giant powers and factorials: sympy would compute them
    r"\^[^+,=*]{0,60}\^[^+,=*]{0,60}\^|\^\s*\{?\s*[0-9]+\s*\^\s*\{?\s*[0-9]{2,}|\^\s*\{?\s*[0-9]{6,}|[0-9]{6,}\s*[})]*\s*!|[0-9]{4000}|!\s*\)?\s*!\s*\)?\s*!"
)
UNIT_NAMES = """
    m meter metre meter cm centimeter centimetre centimeter km kilometer kilometre kilometer mm millimeter kg kilogram
    g gram mg milligram l liter litre liter ml milliliter ft foot feet foot in inch inche inch yd yard lb pound oz ounce
    h hour hr hour min minute s second sec second circ degree deg degree mph mileperhour usd dollar""".split()  # noqa: SIM905
UNIT_NAMES = dict(zip(UNIT_NAMES[::2], UNIT_NAMES[1::2], strict=True))  # one spelling for those with several
NO_UNIT = re.compile(  # words that change the value or deny it
    r"(?i)\b(?:[xyz]|dozens?|(?<!ordered )pairs?|(?<![a-z] )(?:squared|cubed)|factorial|hal(?:f|ves)|thirds?|quarters?"
    r"|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand)ths?|not|or|and|but|minus|plus|times(?= )|over|nan|wrong"
    r"|alpha|beta|maybe)\b(?! units?)"
)
UNIT = re.compile(
    r"(?P<value>.*?[0-9a-zA-Z)}\].])\s*(?P<unit>(?:\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?[0-9]\}?)?\s*)+"
    r"|\^\s*\{?\s*\\circ\s*\}?(?:\s*(?:\\text\s*\{)?[CFK]\}?)?"
    r"|(?:(?<![a-zA-Z\\])(?:(?:square|sq\.?|cubic|cu\.?)\s+)?(?:in|yd|sec|usd|USD|km/h|m/s|[ap]\.?m\.?|[AP]M|cm|km|mm|kg|mg|ml|ft|lbs?|oz|mph|degrees?|cents?|dollars?|miles?|inch(?:es)?|hours?|minutes?)"
    r"(?![a-zA-Z])(?:\s*\^\s*\{?[0-9]\}?)?\s*)"
    r"|(?<=[0-9}] )[a-zA-Z]{3,}(?: [a-zA-Z]{2,}){0,3}(?:\s*\^\s*\{?[0-9]\}?)?)",
    re.DOTALL,
)


def equivalent(answer: str, gold: str) -> bool:
    """Is `answer` mathematically equal to `gold`? An integral, sum, product or limit left unevaluated restates the
    question: it equals only a gold that holds one. May hang or raise: call `math_equal`."""
    a, g = clean(answer), clean(gold)
    return not (UNEVALUATED.search(split(a, "=")[-1]) and not UNEVALUATED.search(g)) and same(a, g)


def interval(text: str) -> tuple[str, str]:
    r"""(variable, interval) of a < x \le b, x > a, x \in S or x < a or x > b; ("", text) for anything else."""
    turned = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
    if m := re.fullmatch(rf"\\\{{\s*{SYMBOL}\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?(?:\\mid|:|\|)(.+)\\\}}", text):
        text = m[1].strip()
    if len(parts := split(text, AND_OR)) > 1:
        found = [interval(part) for part in parts]
        one = len({x for x, _ in found}) == 1 and found[0][0]
        return (found[0][0], r" \cup ".join(part for _, part in found)) if one else ("", text)
    if m := re.fullmatch(rf"({SYMBOL})\s*\\in(?![a-zA-Z])(.+)", text):
        return m[1], m[2].strip()
    sides = [side.strip() for side in re.split(r"(\\[lg]e(?![a-zA-Z])|<|>)", text)]
    if len(sides) == 3:  # the variable is the right side where that is a symbol; add the end that is missing
        low, op, high = (r"-\infty", "<", r"\infty") if sides[1] in ("<", r"\le") else (r"\infty", ">", r"-\infty")
        sides = [*sides, op, high] if re.fullmatch(SYMBOL, sides[2]) else [low, op, *sides]
    if len(sides) == 5 and sides[1] in (">", r"\ge"):
        sides = [turned.get(side, side) for side in reversed(sides)]
    if len(sides) != 5 or not re.fullmatch(SYMBOL, sides[2]) or not {sides[1], sides[3]} <= {"<", r"\le"}:
        return "", text
    low, op, x, op2, high = sides
    if re.search(rf"(?<![a-zA-Z\\]){re.escape(x)}(?![a-zA-Z])", low + " " + high):
        return "", text
    return x, f"{'(' if op == '<' else '['}{low}, {high}{')' if op2 == '<' else ']'}"


def shape(text: str) -> tuple[str, list[str]]:
    r"""(kind, elements): "()", "[)", ... a tuple or interval; "{}" a set; "," a bare list; "u" a union; "" all else."""
    if m := re.fullmatch(r"\\begin\{([pb]?matrix)\}([^&]*)\\end\{\1\}", text):  # a column vector
        return "()", re.split(r"\s*\\\\\s*", re.sub(r"\\\\\s*\Z", "", m[2].strip()))
    if len(parts := split(text, r"\\cup(?![a-zA-Z])")) > 1:
        shapes = [shape(part) for part in parts]
        if all(kind == "{}" for kind, _ in shapes):
            return "{}", [element for _, elements in shapes for element in elements]
        return "u", parts
    for opening, shut in ((r"\{", r"\}"), ("{", "}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if text.startswith(opening) and text.endswith(shut) and closing(text, len(opening) - 1) == len(text) - 1:
            parts = split(text[len(opening) : -len(shut)], "[,;]")
            if "{" in opening and (len(parts) > 1 or opening == r"\{"):
                return "{}", signs(parts)
            if len(parts) > 1:
                return (opening + shut, parts) if len(signs([text])) == 1 else (",", signs([text]))
    parts = signs([part for part in split(text, AND_OR) if part])
    return (",", parts) if len(parts) > 1 else ("", [text])


def signs(parts: list[str]) -> list[str]:
    r"""3 \pm \sqrt2 -> 3 + \sqrt2, 3 - \sqrt2."""
    both = re.compile(r"\\(pm|mp)(?![a-zA-Z])\s*")
    pairs = [[both.sub(lambda m, up=up: "-+"[(m[1] == "pm") == up], p) for up in (True, False)] for p in parts]
    return [sign.removeprefix("+") for pair in pairs for sign in dict.fromkeys(pair)]  # one where there is no \pm


def named(text: str) -> tuple[list[str], list[str]] | None:
    """(names, values) of "x = 2, y = 3", "(p, q) = (3, 2)", "f(x) = 2x" or "a = b = 5"; None where nothing is named."""
    names, values = [], []
    for part in split(text, AND_OR):
        m = re.fullmatch(rf"({NAME})\s*=(?:[^<>]*=)?\s*([^=<>]+)", part)
        if not m:
            return None
        many = m[1].startswith("(")
        left, right = split(m[1][1:-1], ",") if many else [m[1]], shape(m[2])[1] if many else [m[2]]
        if len(left) != len(right):
            return None
        for name, value in zip(left, right, strict=True):
            values += (both := signs([value]))  # x = 1 \pm 2 names two
            names += [re.sub(r"[\s{}]", "", name)] * len(both)
    return names, values


def words(text: str) -> str | None:
    r"""The words of an answer in words (\text{no solution}, Yes, \text{(C)}), or None for mathematics."""
    inner = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    if (inner != text or text[:1] == "(") and (option := re.fullmatch(r"\s*\(?\s*([A-Za-z])\s*\)?\s*", inner)):
        return option[1].lower()
    if re.search(r"\\[a-zA-Z]|[0-9=<>^_+*/|]", inner) or not re.search(r"[A-Za-z]{2,}", inner):
        return None
    said = re.findall(r"[^\W_]+(?:['-][^\W_]+)*", inner.casefold())
    return " ".join(word.removesuffix("s") for word in said if word not in ("a", "an", "the"))


def same(a: str, g: str) -> bool:
    """Equality of two cleaned answers by structure: words, names, then lists, tuples, sets and intervals by element."""
    bare_a, bare_g = re.sub(r"\s", "", a), re.sub(r"\s", "", g)
    if not re.search("[0-9A-Za-z]", a):
        return False
    if bare_a == bare_g:
        return True
    if (said := words(g)) is not None:
        if said == "no solution" and bare_a == r"\emptyset":
            return True
        equal = said == (words(a) or (bare_a.lower() if len(bare_a) == 1 else None))
        if equal or not re.fullmatch("[a-z]{2,3}", bare_g) or bare_g in ("no", "yes"):  # xy may be a product
            return equal
    if re.fullmatch("[A-H]", bare_g) and bare_g.lower() in (words(a), bare_a.lower()):  # gold C: c, (C), \text{C}
        return True
    a, g = (re.sub(r"(?<=\S)\s*\\approx.*", "", t) for t in (a, g))  # x = 1/3 \approx 0.33 says 1/3
    a, g = (re.sub(rf"\A([^=<>a-zA-Z]+)=\s*({SYMBOL})\Z", r"\2 = \1", t) for t in (a, g))  # 5 = x
    (names_a, values_a), (names_g, values_g) = named(a) or ([], []), named(g) or ([], [])
    if any("(" in name for name in names_a) != any("(" in name for name in names_g):  # y = e^x says y(x) = e^x
        names_a, names_g = ([re.sub(r"\(.*", "", name) for name in names] for names in (names_a, names_g))
    if names_a and names_g:
        if set(names_a) == set(names_g) and len(set(names_g)) == len(names_g) == len(names_a):
            by_name = dict(zip(names_a, values_a, strict=True))
            return all(same(by_name[name], value) for name, value in zip(names_g, values_g, strict=True))
        if len(names_a) > 1 or len(names_g) > 1:  # x = 1 or x = 2
            return set(names_a) == set(names_g) and len(set(names_g)) == 1 and matched(values_a, values_g)
    elif names_a or names_g:
        names, values, other = (names_a, values_a, g) if names_a else (names_g, values_g, a)
        if len(names) > 1:
            kind, parts = shape(other)
            pair = (values_a or parts), (values_g or parts)
            return matched(*pair) if len(set(names)) == 1 else kind in ("()", ",") and matched(*pair, ordered=True)
        if "=" not in other:
            a, g = (values[0], g) if names_a else (a, values[0])
    if (
        len(split(a, "=")) > 1 and not re.search(r"[=<>]|\\[lg]e(?![a-z])|\\equiv", g) and len(split(a, AND_OR)) == 1
    ):  # P(A) = 1/2
        *left, a = split(a, "=")
        left = "=".join(left)
        # 1 = 2 is no answer, and neither is an equation left to solve (2x = 10) or a relation (9 \neq x = 10)
        unsolved = re.fullmatch(r"[-+0-9./^{}()\s]*[a-zA-Z](?!\()[-+0-9./^{}()\s]*", left) and not re.fullmatch(
            SYMBOL, left
        )
        relation = re.search(
            r"[<>]|\\(?:[lg]e|neq)(?![a-z])|\\\\|(?<![a-z\\])not(?![a-z])", left.replace(r"\begin", "")
        )
        if unsolved or relation or rational(left) not in (None, rational(a)):
            return False
    mod_a, mod_g = (re.fullmatch(r"(?:(.+?)\s*\\equiv)?\s*([^=]+?)\s*\\pmod\s*\{([^{}]+)\}", t) for t in (a, g))
    if mod_a and mod_g:
        named_alike = None in (mod_a[1], mod_g[1]) or same(mod_a[1], mod_g[1])
        x, y, n = (rational(t) for t in (mod_a[2], mod_g[2], mod_g[3]))
        alike = (x - y) % n == 0 if None not in (x, y, n) and n else same(mod_a[2], mod_g[2])  # -1 is 6 modulo 7
        return named_alike and alike and same(mod_a[3], mod_g[3])
    if mod_a or mod_g:  # the question named the modulus; 2^10 is not worked out
        a, g = mod_a[2] if mod_a else a, mod_g[2] if mod_g else g
        return (not mod_a or rational(a) is not None) and same(a, g)
    (x_a, range_a), (x_g, range_g) = interval(a), interval(g)
    if x_a and x_g and x_a != x_g:
        return scalar(a, g)  # x > y says y < x
    a, g = range_a, range_g
    (kind_a, parts_a), (kind_g, parts_g) = shape(a), shape(g)
    if r"\ldots" in bare_a + bare_g:  # element by element, as written
        return kind_a == kind_g != "" and matched(parts_a, parts_g, ordered=True)
    if r"\emptyset" in (bare_a, bare_g):
        return bare_g == r"\emptyset" and words(a) in ("no solution", "empty set")
    kinds = {kind_a, kind_g}
    if kinds in ({",", "{}"}, {"", "{}"}):  # 1, 2 is {1, 2} and 1 is {1}
        return matched(parts_a, parts_g)
    if kinds == {",", "()"} or (kind_a, kind_g) == ("[]", ","):
        return matched(parts_a, parts_g, ordered=True)
    if len(kinds) == 1 and kinds != {""} and (kinds != {"u"} or len(parts_a) == len(parts_g)):
        return matched(parts_a, parts_g, ordered=kind_g not in (",", "{}", "u"))
    for_sympy = re.search(r"\\mathbb|\\setminus|\\cap|matrix", a + g)  # R \ {0}
    if kinds & {",", "{}"} or ("" in kinds and len(kinds) > 1 and not for_sympy):
        return False
    return scalar(a, g)


def matched(answers: list[str], golds: list[str], ordered: bool = False) -> bool:
    """Every answer equal to a gold of its own: in the same order, or in any."""
    if len(answers) != len(golds) or len(golds) > 40:
        return False
    if ordered:
        return all(same(a, g) for a, g in zip(answers, golds, strict=True))
    left = list(golds)
    for answer in answers:
        if (hit := next((gold for gold in left if same(answer, gold)), None)) is None:
            return False
        left.remove(hit)
    return True


def unit_of(text: str) -> tuple[str, str]:
    r"""("15", "centimeter^2") of "15 \text{ cm}^2" or "15 square cm": the value and its unit, "" without one."""
    if m := re.match(r"(-?)\s*(?:\\\$|\\text\{(euro|pound)\})\s*(?=[-0-9.\\])", text):
        return m[1] + text[m.end() :], m[2] or "dollar"
    m = UNIT.fullmatch(text)
    if not m or NO_UNIT.search(re.sub(r"\\text|[{}]", " ", m["unit"]).strip()):
        return text, ""
    unit = re.sub(r"\\text\b|[{}\\.]|\A\^", " ", m["unit"]).lower()
    unit = re.sub(r"(?:square|sq) +(\w+)|(?:cubic|cu) +(\w+)", lambda m: f"{m[1]}^2" if m[1] else f"{m[2]}^3", unit)
    unit = re.sub(r"([a-z]+?)s?(?![a-z])", lambda m: UNIT_NAMES.get(m[1], m[1]), unit)
    return m["value"].strip(), re.sub(r"\s", "", unit)


def scalar(a: str, g: str) -> bool:
    """Two answers without a structure that `same` knows: percent, unit, clock time, base, number, then sympy."""
    pct_a, pct_g = a.endswith(r"\%"), g.endswith(r"\%")
    if pct_a or pct_g:
        a, g = a.removesuffix(r"\%").strip(), g.removesuffix(r"\%").strip()
        x, y = rational(a), rational(g)
        if x is None or y is None:
            return scalar(a, g)
        if pct_a and not pct_g:  # 28% answers 0.28, and 28 where the question asked for percent; 0.28% does not
            return x == 100 * y or (x == y and abs(x) >= 1)
        return x == y or (not pct_a and 100 * x == y)  # 28 and 0.28 both answer 28%
    (a, unit_a), (g, unit_g) = unit_of(a), unit_of(g)
    if unit_a and unit_g and unit_a != unit_g:
        return False
    if not unit_a and (m := re.fullmatch(r"(.*[0-9])\s?(m|g|s|h|L)((?:\^\s*\{?[0-9]\}?)?)", a)):  # 9 m^3, without \text
        unit_a = UNIT_NAMES[m[2].lower()] + re.sub(r"[\s{}]", "", m[3])
        a = m[1] if unit_a == unit_g or (not unit_g and rational(g) is not None) else a
    if re.search(r"[0-9]\s*:\s*[0-9]", a + " " + g):
        return [p.strip().lstrip("0") for p in a.split(":")] == [p.strip().lstrip("0") for p in g.split(":")]
    base_a, base_g = (re.fullmatch(r"([0-9A-F]*[0-9][0-9A-F]*)(?:\s*_\s*\{?\s*([0-9]+)\s*\}?)?", t) for t in (a, g))
    if base_a and base_g and (base_a[2] or base_g[2]):  # the question named the base: bare digits are right too
        return base_a[1] == base_g[1] and base_a[2] in (base_g[2], None)
    x, y = rational(a), rational(g)
    if x is not None and y is not None:
        return x == y or (10**400 % y.denominator > 0 and rounded(a, y))  # 0.5000001 is not one half, which ends
    if (
        re.search(r"(?<![_^])(?<![_^][0-9])[0-9.]\s+[0-9.]", a) or BEYOND.search(a) or BEYOND.search(g)
    ):  # "1 2" would be read as 1 + 2
        return False
    import math_verify
    import sympy

    # math-verify reads R and r as one symbol, and both gammas, and drops primes, transposes and factorials' doubling
    if re.search(r"(?<![0-9])!!", a + " " + g) or re.search(r"[0-9)}]\s*'", a):
        return False
    a, g = (re.sub(r"(?<![a-zA-Z\\])([a-zA-Z])('+)", lambda m: f"{m[1]}_{{9{len(m[2])}}}", t) for t in (a, g))
    if re.search(r"\^\s*\{?\s*(?:T(?![a-zA-Z])|\\top)", a + " " + g):
        a, g = (re.sub(r"\\top(?![a-zA-Z])|(?<![a-zA-Z\\])T(?![a-zA-Z])", r"{\\tau}", t) for t in (a, g))
    letters = set(re.sub(r"\\[a-zA-Z]+", "", a + g)) - {"C"}  # the constant of integration goes by either
    for letter in sorted(c for c in letters if c.isupper() and c.lower() in letters):
        capital = rf"(\\mathbb\{{.\}}|\\[a-zA-Z]+)|{letter}"
        a, g = (re.sub(capital, lambda m, c=letter: m[1] or rf"x_{{{ord(c)}}} ", t) for t in (a, g))
    a, g = (re.sub(r"\\Gamma(?!\s*[(a-zA-Z])", r"\\Omega ", t) for t in (a, g))
    A, G = read(a), read(g)
    if A is None or G is None:
        return False
    if isinstance(A, sympy.Expr) and isinstance(G, sympy.Expr) and (verdict := agree(A, G)) is not None:
        if verdict or G.free_symbols or not G.is_extended_real or G.is_Rational:
            return verdict
        value = sympy.Rational(sympy.N(G, 60))
        return rounded(a, Fraction(int(value.p), int(value.q)))
    return bool(math_verify.verify(gold=G, target=A, timeout_seconds=None))


def rounded(text: str, value: Fraction) -> bool:
    """Is `text` a decimal that agrees with `value` in every digit it gives, and gives at least 8 significant ones?"""
    m = re.fullmatch(r"-?([0-9]*)\.([0-9]+)", text.strip())
    long = m and len((m[1] + m[2]).lstrip("0")) >= 8
    return bool(long) and abs(Fraction(m[0]) - value) <= Fraction(1, 10 ** len(m[2]))


def read(text: str):
    """The sympy object of one answer, or None. Boxed, so that all of it is read or nothing: never a fragment."""
    import math_verify
    import sympy
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig

    text = re.sub(r"(?<![0-9])([0-9]{1,3})!!", lambda m: str(math.prod(range(int(m[1]), 0, -2))), text)
    exact = r"(?<![0-9_.])([0-9]*)\.([0-9]+)"  # decimals as fractions: floats would be compared to 6 places only
    text = re.sub(exact, lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)
    plain = NormalizationConfig(basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="last")
    config = math_verify.LatexExtractionConfig(boxed_match_priority=0, normalization_config=plain)
    found = math_verify.parse(r"\boxed{" + text + "}", [config], "no_fallback", "first_match", parsing_timeout=None)
    if not found or not isinstance(found[0], sympy.Expr):
        return found[0] if found else None
    return found[0].replace(sympy.Function(r"\zeta"), sympy.zeta)


def agree(A, G) -> bool | None:
    """Equality of two sympy expressions by value; None where values do not decide and math-verify must.

    Rationals exactly, other constants to 28 digits relative (math-verify rounds to 6 places, where all tiny numbers are
    0), anything with variables at 8 random points of all signs, wherever the gold is real: two different analytic
    expressions agree at a random point with probability 0 (Schwartz-Zippel for rational ones).
    """
    import sympy

    unclear = (sympy.oo, sympy.zoo, sympy.nan, sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
    if any(e.is_Matrix or e.has(*unclear, sympy.core.function.AppliedUndef) for e in (A, G)):
        return None
    A, G = (e.subs({s: sympy.I for s in e.free_symbols if s.name == "i"}) for e in (A, G))
    names = sorted({s.name for s in A.free_symbols | G.free_symbols})
    if not names:
        A, G = A.doit(), G.doit()
        return bool(A == G) if A.is_Rational and G.is_Rational else close(A, G)
    # a formula with floors, factorials or (-1)^n in n, k, ... is about whole numbers
    whole = (sympy.floor, sympy.ceiling, sympy.factorial, sympy.binomial)
    counts = any(e.has(*whole) or any(p.base.is_negative for p in e.atoms(sympy.Pow)) for e in (A, G))
    counts = counts and set(names) <= set("nmkjlpqN")
    rng, hits = random.Random(0), 0
    for k in range(12):
        at = {n: sympy.Rational(rng.randint(20, 400), 97) * (-1) ** (k >> j % 3) for j, n in enumerate(names)}
        if k >= 8 or counts:
            at = {n: sympy.Integer(rng.randint(1, 12 if k % 2 else 40)) for n in names}
        a, g = (e.subs({s: at[s.name] for s in e.free_symbols}) for e in (A, G))
        value = sympy.N(g, 15)
        if not (value.is_number and value.is_finite) or (abs(sympy.im(value)) > 1e-12 and not G.has(sympy.I)):
            continue
        if (equal := close(a, g)) is False:
            return False
        hits += equal is True
    return True if hits >= 3 else None


def close(a, g) -> bool | None:
    """Are two constants equal? sympy raises its precision until the difference shows, up to 300 digits: at a fixed one
    exp(-100) is 0, and 10^50 + 3 is 10^50 + 2. None where they have no value."""
    import sympy

    parts = sympy.N(a - g, 15, maxn=300).as_real_imag()
    if not all(part.is_number and part.is_finite for part in parts):
        return None
    return all(part == 0 or part._prec == 1 for part in parts)  # precision 1: no digit could be told from 0


# ---------------------------------------------------------------------------------------------------------------
# Mathematics, 3: the child process. sympy can compute for ever or fill the memory on ordinary-looking answers, and
# neither a signal nor a thread stops one big-integer operation: only killing a process does.


class Grader:
    """One child process that compares answers, kept for the whole run. Too slow or too large, it is replaced.

    Safe from any thread (one question at a time). No signal is used in the caller. The child ends when its input does,
    so it cannot outlive the caller; a CPU limit ends even one that is lost in a computation at that moment.
    """

    MEMORY = 1 << 30  # bytes of address space

    def __init__(self) -> None:
        self.lock, self.process = threading.Lock(), None
        self.logged: set[str] = set()

    def ask(self, answer: str, gold: str, limit_s: float) -> bool:
        """equivalent(answer, gold) in the child. False, and counted in EVENTS, if it exceeds the wall-clock or memory
        limit or raises. Raises GradingError if the child cannot be started (math-verify is missing, no memory)."""
        question = json.dumps([answer, gold, limit_s]).encode() + b"\n"
        with self.lock:
            for fresh in (False, True):  # a child that died while idle is no fault of this answer: once more
                if self.process is None:
                    self.start()
                    fresh = True
                try:
                    self.process.stdin.write(question)
                    reply = self.reply(limit_s)
                except BrokenPipeError:
                    reply = None
                except BaseException:  # Ctrl-C here would leave a reply in the pipe, for the next question to read
                    self.close()
                    raise
                if reply or fresh:
                    break
                self.close()
            reply = reply or {"equal": False, "event": "crash", "last": True}
            if event := reply.get("event"):
                count(event.split(":")[0])
                if event not in self.logged:
                    self.logged.add(event)
                    logger.warning("grading %r against %r: %s, counts as wrong", answer[:80], gold[:80], event)
            if reply.get("last"):
                self.close()
            return reply["equal"]

    def start(self) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--grader-child"]
        self.process = subprocess.Popen(
            command, 0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        ready = self.reply(60) or {"fatal": "it ended at once"}
        if "ready" not in ready:
            self.close()
            raise GradingError(f"the maths grader does not start: {ready.get('fatal', 'no answer in 60 s')}")

    def reply(self, limit_s: float) -> dict | None:
        """The child's next line; None if it died, a timeout event if it is silent for limit_s: the caller ends it."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                return {"event": "timeout", "equal": False, "last": True}
        line = os.read(self.process.stdout.fileno(), 4096)  # whole: the child writes it at once, below PIPE_BUF
        return json.loads(line) if line else None

    def close(self) -> None:
        process, self.process = self.process, None
        if process:
            with process:  # closes the pipes and waits
                process.kill()

    def forget(self) -> None:
        """In a forked child of the caller: the grader is the parent's. Its pipes must not stay open here."""
        if self.process:
            self.process.returncode = 0  # not ours to kill or to wait for: close() now closes the pipes alone
        self.close()
        self.__init__()  # the lock may be held by a thread that this process does not have


GRADER = Grader()
atexit.register(GRADER.close)
os.register_at_fork(after_in_child=GRADER.forget)


def proc_text(path: str) -> str:
    """The text of /proc/`path`; "" where the process is gone, or there is no /proc."""
    with contextlib.suppress(OSError), open(f"/proc/{path}", encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def grader_child() -> None:
    """The child's side: one JSON line in, one out."""
    import resource

    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints must not look like a verdict

    def say(**reply):
        out.write(json.dumps(reply).encode() + b"\n")

    try:
        logging.disable(logging.CRITICAL)  # math-verify logs whole expressions
        equivalent("x+1", "1+x")  # loads sympy and the grammar
    except ImportError as error:
        return say(fatal=f"{error} (pip install math-verify)")
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (Grader.MEMORY, Grader.MEMORY))
    say(ready=True)
    for line in sys.stdin.buffer:
        answer, gold, limit_s = json.loads(line)
        cpu = int(time.process_time() + limit_s) + 2
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        reply = {"equal": False}
        try:
            reply["equal"] = equivalent(answer, gold)
        except MemoryError:
            reply["event"] = "memory"
        except Exception as error:  # sympy raises nearly everything; the caller counts and logs it
            reply["event"] = f"error: {type(error).__name__}"
        # VmHWM and not ru_maxrss, which counts what this process held before its exec: the trainer
        peak = int((re.search(r"VmHWM:\s+(\d+) kB", proc_text("self/status")) or (0, 0))[1]) << 10
        if peak > 0.8 * Grader.MEMORY and not reply["equal"]:
            reply["event"] = "memory"  # math-verify takes a MemoryError for "not equal"
        say(**reply, last=peak > 0.5 * Grader.MEMORY or reply.get("event") == "memory")


def math_equal(answer: str, gold: str, limit_s: float = 3.0) -> bool:
    """Is the text of an answer mathematically equal to the gold? limit_s: wall-clock seconds, then it counts as wrong.

    Plain numbers are compared here, exactly; anything else in the child process: some ms, and 1-2 s to start it.
    An answer of over 1,000 characters beyond the gold's is wrong unread. Raises GradingError where no child starts.
    """
    x, y = rational(answer), rational(gold)
    if x is not None and y is not None and "%" not in answer + gold:
        return x == y or (10**400 % y.denominator > 0 and rounded(answer, y))
    if not answer.strip() or not gold.strip() or len(gold) > 4000 or len(answer) > 1000 + 2 * len(gold):
        return False
    return GRADER.ask(answer, gold, limit_s)


def math_correct(response: str, gold: str, limit_s: float = 3.0) -> bool:
    """c(y) for mathematics: the response's answer block equals the gold. No block, no answer: prose is never graded."""
    answer = extract_answer(response)
    return answer is not None and math_equal(answer, gold, limit_s)


# ---------------------------------------------------------------------------------------------------------------
# Code: the program of an answer is run on every test inside bubblewrap, and its output compared token by token.
#
# grader -> bwrap -> launcher (process 1 of the sandbox) -> program. Namespaces hide files, network, processes and the
# environment of the host; with the launcher the kernel ends all that is inside. rlimits bound one process; every 50 ms
# the grader looks at the sum over all, and it keeps the time and the expected output. Not kept from a program: faults
# of the kernel, reading /usr and the installed packages, memory in files nobody maps (memfd: 256 of file_mb a process),
# and, where the grader is root, whom NPROC does not count, the processes that can start between two looks: a storm of
# forks with setsid starves the grader too, and then ends long after its limit (as another user it stays small).

ALLOW_UNSANDBOXED = False  # what --allow-unsandboxed-code sets: go without where bubblewrap is missing or fails
ADVICE = "apt install bubblewrap, or let programs use your files and network with --allow-unsandboxed-code"
START_S, LOOK_S = 15.0, 0.05  # to start a sandbox, which no program is charged for; between two looks
RETRY_S = (0.2, 1.0, 3.0)  # before another try, where the sandbox failed
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}
ENVIRONMENT |= {"PYTHONUTF8": "1", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}  # arenas and BLAS threads reserve
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # 64 MiB and more each
NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")


class SandboxError(GradingError):
    """Programs cannot be run here: a failure of the machinery, never a verdict on an answer."""


@dataclass(frozen=True)
class Result:
    """One run. status: passed, wrong, crashed, timeout, memory, output-limit or sandbox-error; seconds: wall time."""

    status: str
    stdout: str
    stderr: str
    returncode: int | None  # as in subprocess; None where the grader ended the program
    seconds: float


def extract_program(response: str) -> str | None:
    """The program of the answer block: its last python block, else its last untagged one; without a fence, all of it.

    A block opens where a line starts with ```, or ends with ``` and one word; it closes at a line of ``` alone, or with
    the answer. A block in another language is never run. None where there is no answer or nothing in it.
    """
    if (answer := extract_answer(response)) is None:
        return None
    blocks: dict[str, list[str]] = {}  # language -> lines of its last block
    fence, margin, lines = "", 0, []  # of the open block. No regex: those that skip to a fence are quadratic
    for line in answer.split("\n"):
        indent, text = len(line) - len(line.lstrip(" ")), line.strip()
        head, ticks, info = line.partition("```")
        words = info.lstrip("`").lower().split()
        if fence and text.startswith(fence) and not text.strip("`") and indent <= margin + 3:
            fence = ""
        elif fence:
            lines.append(line[min(indent, margin) :])
        elif ticks and "`" not in info.lstrip("`") and (not head.strip() or len(words) == 1):
            fence, margin = "`" * (3 + len(info) - len(info.lstrip("`"))), len(head) * head.isspace()
            language = "python" if words[:1] in (["python"], ["py"], ["python3"], ["py3"]) else "".join(words[:1])
            blocks[language] = lines = []
    program = "\n".join(blocks.get("python", blocks.get("", []))) if blocks else answer.strip()
    return program if program.strip() else None


def same_output(stdout: str, expected: str) -> bool:
    """Equal token by token; blanks and line ends do not count. Only where the expected token e is written with a point
    or an exponent, a number within 1e-6 * max(1, |e|) will do: 3 for 3.0 passes, 3.0 for 3 does not, nan never."""
    tokens, wanted = stdout.split(), expected.split()
    return len(tokens) == len(wanted) and all(t == w or nearly(t, w) for t, w in zip(tokens, wanted, strict=True))


def nearly(token: str, wanted: str) -> bool:
    if not (re.search("[.eE]", wanted) and NUMBER.fullmatch(wanted) and NUMBER.fullmatch(token)):
        return False
    x, e = float(token), float(wanted)
    return math.isfinite(e) and abs(x - e) <= 1e-6 * max(1.0, abs(e))  # 1e999 is inf


# An interpreter of its own, because nothing may run between fork and exec of a trainer with threads and CUDA. Not
# dumpable: the program cannot open the report pipe in /proc/1/fd. SIGINT at its default: no signal from inside reaches
# process 1 without a handler. Reports r (it runs), ! (no exec), then the exit status; reaps on until it is killed.
LAUNCHER = """
import ctypes, os, resource, signal, sys
report, prctl = int(sys.argv[1]), getattr(ctypes.CDLL(None), "prctl", lambda *a: 0)
for option, value in ((1, 9), (4, 0), (36, 1)):  # PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER
    prctl(option, value, 0, 0, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.set_inheritable(report, False)
child = os.fork()
if child == 0:
    try:
        prctl(1, 9, 0, 0, 0)
        for name, value in (item.split("=") for item in sys.argv[2].split()):
            kind = getattr(resource, "RLIMIT_" + name)
            hard = resource.getrlimit(kind)[1]
            value = int(value) if hard == resource.RLIM_INFINITY else min(int(value), hard)
            try:  # a program may ask for a deeper stack, and the wall clock limits its time
                resource.setrlimit(kind, (value, hard if name in ("STACK", "CPU") else value))
            except (OSError, ValueError):  # macOS refuses some
                pass
        os.execv(sys.argv[3], sys.argv[3:])
    finally:
        os.write(report, b"!")
        os._exit(127)
os.write(report, b"r")
while True:
    try:
        pid, status = os.wait()
    except ChildProcessError:
        signal.pause()
    if pid == child:
        os.write(report, b"%d\\n" % os.waitstatus_to_exitcode(status))
"""


@functools.lru_cache
def sizes_tmpfs(bwrap: str) -> bool:
    """Whether this bwrap can bound a tmpfs (0.7 and later). Where not, over_limits ends the program that fills one."""
    return "--size" in subprocess.run([bwrap, "--help"], capture_output=True, text=True).stdout


def sandbox_command(bwrap: str, source: int, size: int) -> list[str]:
    """The bwrap command up to the program: /usr, the interpreter, two writable folders of `size` bytes, no more."""
    args = [bwrap, "--unshare-all", "--die-with-parent", "--as-pid-1", "--cap-drop", "ALL", "--ro-bind", "/usr", "/usr"]
    for top in ("/bin", "/sbin", "/lib", "/lib32", "/lib64"):  # links into /usr, or folders
        args += ["--symlink", os.readlink(top), top] if os.path.islink(top) else ["--ro-bind-try", top, top]
    args += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]  # else root's program writes to /proc/sys
    for path in ("/dev/shm", "/tmp"):
        args += [*(("--size", str(size)) if sizes_tmpfs(bwrap) else ()), "--tmpfs", path]
    paths = ["/etc/ld.so.cache", "/etc/alternatives"]
    for prefix in {f(p) for p in (sys.base_prefix, sys.prefix) for f in (str, os.path.realpath)}:
        if not f"{prefix}/".startswith(("//", "/usr/")):  # never all of it: a prefix may be a project's own folder
            paths += [os.path.join(prefix, name) for name in ("bin", "lib", "lib64", "pyvenv.cfg")]
    for path in paths:
        args += ["--ro-bind-try", path, path]
    args += ["--dir", "/tmp/run", "--file", str(source), "/tmp/run/main.py", "--chdir", "/tmp/run"]
    return [*args, "--remount-ro", "/dev", "--remount-ro", "/", "--"]  # else two more folders to fill


def descendants(root: int) -> Iterator[int]:
    """The processes below `root`, parents first, by the kernel's own lists: all of /proc costs 10 ms on a busy host."""
    todo = [root]
    for pid in todo:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{pid}/task"):
                todo += map(int, proc_text(f"{pid}/task/{task}/children").split())
        if pid != root:
            yield pid


def over_limits(root: int, sandboxed: bool, memory: int, tmpfs: int, tasks: int) -> str | None:
    """The status of a program whose processes together exceed a limit: rlimits count by process, and NPROC not root."""
    pids, resident, used = [], 0, 0
    for pid in descendants(root):
        pids.append(pid)
        with contextlib.suppress(OSError, IndexError):
            tasks -= len(os.listdir(f"/proc/{pid}/task"))
            resident += int(proc_text(f"{pid}/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if tasks < -1:  # the launcher is one
            return "crashed"
    if resident > memory:  # a page shared by forks was counted once for each: take shares of it (slower)
        shares = [re.search(r"^Pss: +(\d+)", proc_text(f"{pid}/smaps_rollup"), re.M) for pid in pids]
        if not any(shares) or sum(int(share[1]) << 10 for share in shares if share) > memory:
            return "memory"
    with contextlib.suppress(OSError, IndexError):  # a file in a tmpfs is memory too; an empty one takes about 1 kB
        for path in ("tmp", "dev/shm") if sandboxed else ():
            disk = os.statvfs(f"/proc/{pids[0]}/root/{path}")
            used += (disk.f_blocks - disk.f_bfree) * disk.f_frsize + ((disk.f_files - disk.f_ffree) << 10)
    return "memory" if used > 2.5 * tmpfs else None


def kill_tree(process: subprocess.Popen) -> None:
    """End all below `process`, then itself: the dead reap nobody. In the sandbox the first signal ends all at once."""
    with contextlib.suppress(ProcessLookupError):
        for _ in range(500):
            os.kill(process.pid, signal.SIGCONT)  # an unprotected program can stop the launcher
            pids = []
            for pid in descendants(process.pid):
                pids.append(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.002)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_once(
    bwrap: str | None, program: str, stdin: str, limit_s: float, memory: int, cap: int, size: int, tasks: int
) -> Result:
    """One run, its output not compared: "passed" is exit status 0. memory, cap and size: bytes. Raises OSError.

    Without bwrap the limits hold, but nothing keeps the program from the user's files and processes, the network, or
    (as root) raising the limits, and a program that kills its launcher can leave processes behind.
    """
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="agon-", ignore_cleanup_errors=True))
        for name, text in (("stdin", stdin), ("main.py", program)):
            Path(home, name).write_bytes(text.encode("utf-8", "replace"))
        given, source = (stack.enter_context(open(os.path.join(home, name), "rb")) for name in ("stdin", "main.py"))
        limits = f"CORE=0 CPU={math.ceil(limit_s) + 1} AS={memory + (1 << 30)} FSIZE={size} NOFILE=256 STACK={8 << 20}"
        if bwrap and [int(n) for n in re.findall("[0-9]+", os.uname().release)[:2]] >= [5, 14]:
            limits += f" NPROC={tasks + 1}"  # on older kernels, and outside, it counts all processes of the user
        reader, writer = os.pipe()
        report = stack.enter_context(open(reader, "rb", 0))
        with open(writer, "wb", 0):
            command = [sys.executable, "-I", "-S", "-c", LAUNCHER, str(writer), limits, sys.executable, source.name]
            env = ENVIRONMENT | {"HOME": home}
            if bwrap:
                command[-1], env = "/tmp/run/main.py", ENVIRONMENT
                command = sandbox_command(bwrap, source.fileno(), 4 * size) + command
            options = {"cwd": home, "env": env, "pass_fds": (writer, source.fileno()), "start_new_session": True}
            pipes = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
            process = subprocess.Popen(command, **pipes, **options)
        streams = {stream: bytearray() for stream in (report, process.stdout, process.stderr)}
        ended, started, look, deadline = None, 0.0, 0.0, time.monotonic() + START_S
        try:
            selector = stack.enter_context(selectors.DefaultSelector())  # not select(): a trainer may hold > 1024 files
            for stream in streams:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ)
            while report in selector.get_map() and b"\n" not in streams[report]:
                for key, _ in selector.select(LOOK_S):
                    chunk = key.fileobj.read(1 << 16)
                    streams[key.fileobj] += chunk
                    if not chunk:
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if not started and streams[report]:
                    started, deadline = now, now + limit_s
                if now >= deadline:
                    ended = "timeout" if started else "sandbox-error"
                elif started and now >= look:
                    ended, look = over_limits(process.pid, bwrap is not None, memory, 4 * size, tasks), now + LOOK_S
                if ended or max(map(len, streams.values())) > cap:
                    break
            seconds = time.monotonic() - started if started else 0.0
        finally:
            kill_tree(process)
            for stream, data in streams.items():  # the writers are dead: what is in the pipes is all there will be
                with stream:
                    while len(data) <= cap and (chunk := stream.read(1 << 16)):
                        data += chunk
    told, out, err = streams.values()
    stdout, stderr, code = out[:cap].decode("utf-8", "replace"), err[:cap].decode("utf-8", "replace"), None
    if max(len(out), len(err)) > cap:
        ended = "output-limit"
    elif not ended and re.fullmatch(rb"r-?[0-9]+\n", told):
        no_memory = stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
        code = int(told[1:])
        ended = "timeout" if code == -signal.SIGXCPU else "memory" if no_memory else "crashed" if code else "passed"
    elif not ended:
        ended = "crashed" if told == b"r" and not bwrap else "sandbox-error"  # outside, it can kill the launcher
    return Result(ended, stdout, stderr, code, seconds)


def run_program(
    program: str,
    stdin: str = "",
    expected: str | None = None,
    *,
    limit_s: float = 6.0,
    memory_mb: int = 1024,
    output_bytes: int = 1_000_000,
    file_mb: int = 16,
    processes: int = 256,
) -> Result:
    """Run a program once: passed is exit status 0 and the `expected` output (None: any). SandboxError without bwrap.

    limit_s: wall seconds. memory_mb: resident MiB of all its processes; each may map 1 GiB more, because 200 threads
    reserve 8 MiB of stack each. output_bytes: of stdout and of stderr. file_mb: MiB of a file; /tmp and /dev/shm hold
    four times as much each. processes: with their threads; more of them is "crashed", too many files is "memory".
    """
    bwrap = shutil.which("bwrap")
    sandboxes = ([bwrap] if bwrap else []) + ([None] if ALLOW_UNSANDBOXED else [])  # None: without
    if not sandboxes:
        raise SandboxError(f"code is graded by running it, and there is no bubblewrap: {ADVICE}")
    for sandbox in sandboxes:
        try:
            limits = limit_s, memory_mb << 20, output_bytes, file_mb << 20, processes
            result = run_once(sandbox, program, stdin, *limits)
        except OSError as error:  # no more processes, files or disk
            result = Result("sandbox-error", "", str(error), None, 0.0)
        if result.status != "sandbox-error":
            break
    if result.status == "passed" and expected is not None and not same_output(result.stdout, expected):
        result = replace(result, status="wrong")
    if result.status not in ("passed", "wrong", "crashed"):
        count(result.status if result.status == "sandbox-error" else f"code-{result.status}")
    return result


def check_sandbox() -> None:
    """Raise SandboxError, in one line, where programs cannot be run: ask before long work."""
    code_correct(f"{THINK_CLOSE}{ANSWER_OPEN}print(1){ANSWER_CLOSE}", [("", "1")])


def code_status(response: str, tests: Sequence[tuple[str, str]], **limits: float) -> str:
    """The status of the first of the (stdin, stdout) tests that a program does not pass, or "passed"; "no program", or
    "wrong" without tests. Limits: run_program's. A sandbox that fails is tried again, then SandboxError is raised."""
    if (program := extract_program(response)) is None:
        return "no program"
    for stdin, expected in tests:
        for pause in (*RETRY_S, 0.0):
            result = run_program(program, stdin, expected, **limits)
            if result.status != "sandbox-error":
                break
            time.sleep(pause)
        else:
            message = " ".join(result.stderr.split())[-300:] or "no message"
            raise SandboxError(f"bubblewrap does not work here ({message}): mend it ({ADVICE})")
        if result.status != "passed":
            return result.status
    return "passed" if tests else "wrong"


def code_correct(response: str, tests: Sequence[tuple[str, str]], **limits: float) -> bool:
    """c(y) of a program: right on every one of `tests`, of which there must be one. Raises SandboxError."""
    return code_status(response, tests, **limits) == "passed"


# ---------------------------------------------------------------------------------------------------------------
# c(y), whatever the kind

CHECKERS: dict[str, Callable[[Problem, str], bool]] = {
    "congruence": lambda problem, response: congruence_correct(response, problem.gold),
    "math": lambda problem, response: math_correct(response, problem.gold),
    "code": lambda problem, response: code_correct(response, problem.tests),
}


def is_correct(problem: Problem, response: str) -> bool:
    """c(y): the verified correctness of one response, by the checker of the problem's kind."""
    return CHECKERS[problem.kind](problem, response)


# ---------------------------------------------------------------------------------------------------------------
# Data: from a row to a Problem. A row function gives the Problem, or the reason why the row is dropped, or None where
# the row is not of the chosen level.


def as_text(cell: object) -> str:
    """A cell as text; None is "". Numbers are welcome: a column may hold 4 in one row and "4" in the next."""
    if cell is not None and not isinstance(cell, (str, int, float)):
        raise ValueError(f"a {type(cell).__name__} stands where text should")
    text = "" if cell is None else str(cell)
    text.encode()  # half a surrogate pair would fail only later, in the tokenizer: UnicodeEncodeError is a ValueError
    return text


def math_problem(question: object, gold: object) -> Problem | str:
    problem = Problem(as_text(question).strip(), as_text(gold).strip(), "math")
    return problem if problem.question and problem.gold else "without a question or an answer"


def code_tests(cell: object) -> list[tuple[str, str]]:
    """The (stdin, stdout) pairs of one cell in either of two forms. Raises ValueError, which shows them."""
    if isinstance(cell, dict) and isinstance(cell.get("input"), list) and isinstance(cell.get("output"), list):
        cell = [{"stdin": i, "stdout": o} for i, o in zip(cell["input"], cell["output"], strict=True)]
    if not isinstance(cell, list) or not all(isinstance(t, dict) and {"stdin", "stdout"} <= t.keys() for t in cell):
        raise ValueError('tests are [{"stdin": ..., "stdout": ...}, ...] or {"input": [...], "output": [...]}')
    return [(as_text(test["stdin"]), as_text(test["stdout"])) for test in cell]


def code_problem(question: object, *cells: object) -> Problem | str:
    """The first 20 usable tests, each of at most 64 kB and 512 kB in all: every test costs a process per answer.

    Tests are taken whole or not at all, as half an input has another answer. Not usable: a blank expected output
    (printing nothing would match it), a text that its source cut off with "...", and the same stdin again.
    """
    tests: dict[str, str] = {}
    room = 512_000
    for stdin, stdout in (test for cell in cells for test in code_tests(cell)):
        size = len(stdin.encode()) + len(stdout.encode())
        whole = stdout.strip() and not any(text.rstrip().endswith("...") for text in (stdin, stdout))
        if whole and stdin not in tests and size <= min(64_000, room) and len(tests) < 20:
            tests[stdin], room = stdout, room - size
    problem = Problem(as_text(question).strip(), "", "code", tuple(tests.items()))
    return problem if problem.question and problem.tests else "without a question or tests"


# Comparing outputs refuses right programs where several outputs are right, so a statement that says so is dropped. It
# is read by sentences. "any" counts next to printing and accepting: "for any i", "if any", "choose any two" and "do not
# print any spaces" are no such thing. "Several solutions" and "any order" count unless the sentence breaks the tie or
# is about the input. In doubt the problem goes: a lost problem is cheap, a wrong verdict is trained on.
PRINT = r"(?:print|output|display|report|return|find|give)(?:s|ing)?"
ANY_OUTPUT = re.compile(
    rf"(?<!not )(?<!n't )(?<!without )\b{PRINT}:? (?:out )?(?:any|an arbitrary|(?:only )?(?:one|either) of th\w+)\b"
    r"(?! (?:extra|additional|other|more|spaces?|text|trailing|leading|following|two|three)\b)"
    r"|\b(?:any|all|each|every|multiple|several)(?: \w+){0,3} (?:answers?|solutions?|outputs?|them|ones?)\b"
    r"(?!.*\berror).{0,30}\b(?:accept|correct|valid|fine|ok|okay|allowed)"
    r"|\bif\b.*\b(?:multiple|several|many)\b.*\bany\b(?! order)"
    rf"|\b(?:{PRINT}|answers?)\b.*\b(?:any|arbitrary) order\b"
)
SEVERAL_OUTPUTS = re.compile(
    r"\b(?:multiple|several|many|more than one|various)(?: \w+){0,2} (?:answers?|solutions?|outputs?)\b"
    r"|\bif there (?:are|is|exists?) (?:multiple|several|many|more than one)\b(?! test)|\b(?:any|arbitrary) order\b"
)
ONE_OUTPUT = re.compile(
    r"smallest|largest|lexicographic|minim|maxim|least|greatest|lowest|highest|creasing|scending|\bhow many|"
    r"\b(?:number of|given|input|operations?|moves?|perform|process)\b"
)


def any_output(statement: str) -> bool:
    sentences = [" ".join(s.split()) for s in re.split(r"[.!?](?=\s)|\n\s*\n", statement.lower())]
    several = (s for s in sentences if SEVERAL_OUTPUTS.search(s))
    return any(map(ANY_OUTPUT.search, sentences)) or not all(map(ONE_OUTPUT.search, several))


def deepmath_row(row: dict) -> Problem | str | None:
    """A fifth of the golds are yes/no, which guessing gets half right, and no last line shows that a proof is right:
    https://github.com/zwhe99/DeepMath/issues/1."""
    if as_text(row["difficulty"]) not in ("8", "8.0"):
        return None
    question, gold = as_text(row["question"]), as_text(row["final_answer"])
    bare = re.sub(r"\\(?:text|math|operatorname|boxed|emph)(?:bf|it|rm)?\b|[\s${}*\"'`]", "", gold).lower()
    if re.match(r"(?:yes|no|true|false)(?:[.,;:!]|\Z)", bare):
        return "yes/no answers"
    asks = re.match(r"\s*(?:please )?(?:(?:dis)?prove|(?:show|demonstrate|verify) that)\b", question, re.IGNORECASE)
    if asks or re.match(r"(?:see)?(?:the)?proof|prove[dn]|shown|verified|(?:it)?holds|q\.?e\.?d", bare):
        return "proofs"
    return math_problem(question, gold)


def codecontests_row(row: dict) -> Problem | str | None:
    if as_text(row["difficulty"]) != "1":  # EASY in contest_problem.proto
        return None
    if row["input_file"] or row["output_file"]:
        return "problems that use files"
    if any_output(as_text(row["description"])):
        return "problems with several right outputs"
    tests = [row[f"{kind}_tests"] or [] for kind in ("public", "private", "generated")]
    try:
        return code_problem(row["description"], *tests)
    except ValueError:
        return "problems with broken tests"


def gsm8k_row(row: dict) -> Problem | str:
    _, mark, gold = as_text(row["answer"]).rpartition("####")
    return math_problem(row["question"], gold.replace(",", "")) if mark else "without '####'"


# ---------------------------------------------------------------------------------------------------------------
# Data: where the rows come from


@dataclass(frozen=True)
class Source:
    """A data set of the hub at one revision."""

    hub: str
    config: str | None
    revision: str
    row: Callable[[dict], Problem | str | None]
    columns: tuple[str, ...]  # all that is read; the first is the question
    splits: dict[str, tuple[str, float, float]]  # our split: split of the hub, its share low <= u < high (see pick)
    sizes: dict[str, int]  # default limits; without one: all there is
    stream: bool = False  # row by row over the network, nothing is kept
    parquet: bool = True  # on the hub, which alone can leave columns unread; else JSON


HASHED = {"train": ("train", 0.20, 1.0), "validation": ("train", 0.15, 0.20), "test": ("train", 0.0, 0.15)}
SOURCES = {
    # Before 2025-05-08 the questions of 48 rows gave the answer away. This revision has 103,022 rows, the cards of that
    # time say 103,110: so it is taken to be later.
    "deepmath": Source(
        "zwhe99/DeepMath-103K", None, "5cf055d1fe3d7a2eb19719ac020211469736ae44", deepmath_row,
        ("question", "final_answer", "difficulty"), HASHED, {"train": 3000, "validation": 100, "test": 300},
    ),
    # Rows of many MB. The hub's valid and test hold one site's problems, none of them "easy": all is cut from train.
    "codecontests": Source(
        "deepmind/code_contests", None, "802411c3010cb00d1b05bad57ca77365a3c699d6", codecontests_row,
        ("description", "difficulty", "input_file", "output_file", "public_tests", "private_tests", "generated_tests"),
        HASHED, {"train": 1000, "validation": 100, "test": 300}, stream=True,
    ),
    "gsm8k": Source(
        "openai/gsm8k", "main", "740312add88f781978c0658806c59bc2815b9866", gsm8k_row, ("question", "answer"),
        {"train": ("train", 0.05, 1.0), "validation": ("train", 0.0, 0.05), "test": ("test", 0.0, 1.0)}, {},
    ),
    "math500": Source(
        "HuggingFaceH4/MATH-500", None, "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        lambda row: math_problem(row["problem"], row["answer"]), ("problem", "answer"),
        {"test": ("test", 0.0, 1.0)}, {}, parquet=False,
    ),
}  # fmt: skip
ENDINGS = (".jsonl", ".json", ".parquet")
QUESTION, ANSWER, TESTS = ("question", "problem", "prompt"), ("answer", "final_answer", "gold", "solution"), ("tests",)
USUAL = {"question": QUESTION, "answer": ANSWER, "tests": TESTS}  # column names in a file of one's own
Row = tuple[str, "Problem | str | None"]  # a question and what became of its row


def first_line(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error).strip() or type(error).__name__).splitlines()[0][:300]


def need_columns(wanted: Iterable[str], found: Iterable[str], mend: str = "") -> None:
    if missing := [column for column in wanted if column not in found]:
        raise ValueError(f"no column {', '.join(missing)} (found: {', '.join(found) or 'none'}){mend}")


def copy_files(source: Source, root: Path, hub_split: str) -> list[Path]:
    """The files of one hub split in a local copy: one file, or a folder as `hf download` leaves it."""
    found = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    names = {p: p.name if p == root else p.relative_to(root).as_posix() for p in found if p.suffix.lower() in ENDINGS}
    # not .cache/, and not what older copies hold beside parquet
    files = [p for p, name in names.items() if not re.search(r"(?:^|/)(?:\.|dataset_infos)", name)]
    if len({p.suffix.lower() for p in files}) != 1:
        problem = f"no {', '.join(ENDINGS)} files of one type" if root.exists() else "no such file or folder"
        raise ValueError(f"{root}: {problem}")
    words = {p: re.split(r"[^a-z0-9]+", names[p].lower()) for p in files}
    files = [p for p in files if source.config in words[p]] or files  # main/, not socratic/
    of_split = [p for p in files if hub_split in words[p]]
    if not of_split and len({hub for hub, *_ in source.splits.values()}) > 1:
        raise ValueError(f"{root}: no file has {hub_split!r} in its name, which tells the splits apart")
    return of_split or files


def records(path: Path) -> Iterator[tuple[str, dict]]:
    """(place, row) of a .jsonl file, of a .json file that holds one list, or of a .parquet file.

    JSON by json.loads, line by line, with numbers as they are spelled. The readers of `datasets` and pandas want one
    type per column and take some texts for dates; on damaged JSON pyarrow 26 can even end the process by a segfault.
    """
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                rows = (row for batch in file.iter_batches(256) for row in batch.to_pylist())
                yield from ((f"row {n}", row) for n, row in enumerate(rows, 1))
        except pyarrow.ArrowException as error:
            raise ValueError(first_line(error)) from None
        return
    loads = functools.partial(json.loads, parse_int=str, parse_float=str, parse_constant=str)
    whole = path.suffix.lower() == ".json"
    with open(path, "rb") as file:
        for number, line in enumerate([file.read()] if whole else file, 1):
            if not line.strip():
                continue
            try:
                value = loads(line.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", None) or getattr(error, "reason", "nested too deeply")
                place = f"line {getattr(error, 'lineno', 1) if whole else number}"
                raise ValueError(f"{place} is cut off or no JSON in UTF-8 ({reason}): mend or remove it") from None
            for n, row in enumerate(value if whole and isinstance(value, list) else [value], 1):
                place = f"item {n}" if whole else f"line {number}"
                if not isinstance(row, dict):
                    form = "a .jsonl file holds one object per line, a .json file one list of objects"
                    raise ValueError(f"{place} is a {type(row).__name__}, not an object: {form}")
                yield place, row


def file_rows(paths: Iterable[Path], convert: Callable[[dict], Row]) -> Iterator[Row]:
    """convert(row) of each row of some files. Raises ValueError, which names the file and the place."""
    for path in paths:
        at = ""
        try:
            for place, row in records(path):
                at = f", {place}"
                yield convert(row)
                at = ""
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"{path}{at}: {first_line(error)}") from error


def own_row(given: dict[str, str | None]) -> Callable[[dict], Row]:
    """The row function of a file of one's own: "code" where a row has tests, else "math".

    `given` may name the columns; otherwise the first of the USUAL names that the first row has.
    """
    names = {what: (name,) if name else USUAL[what] for what, name in given.items()}
    column: dict[str, str] = {}

    def convert(row: dict) -> Row:
        for what, usual in names.items() if not column else ():  # the first row decides
            column[what] = next((name for name in usual if name in row), usual[0])
        last = "tests" if given["tests"] or row.get(column["tests"]) is not None else "answer"
        need_columns((column["question"], column[last]), row, ": --question-column and --answer-column name yours")
        question = as_text(row[column["question"]])
        return question, (code_problem if last == "tests" else math_problem)(question, row[column[last]])

    return convert


def named_rows(source: Source, hub_split: str, data: str | None) -> Iterator[Row]:
    """The rows of one hub split: from the hub, or from a local copy of it. Raises ValueError.

    Parquet goes through `datasets` from either place, so that a copy tests the road to the hub.
    """

    def convert(row: dict) -> Row:
        need_columns(source.columns, row)
        return as_text(row[source.columns[0]]), source.row(row)

    files = [] if data is None else copy_files(source, Path(data), hub_split)
    if files and files[0].suffix.lower() != ".parquet":
        yield from file_rows(files, convert)
        return
    mend = f" (--data PATH reads a local copy of {source.hub}, HF_HUB_OFFLINE=1 what an earlier run has cached)"
    try:
        import datasets
        import huggingface_hub as hub
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{source.hub}: {error}: pip install datasets{mend}") from None
    place: tuple = (source.hub, source.config)
    options: dict = {"split": hub_split, "revision": source.revision, "streaming": source.stream}
    try:
        for path in files:
            need_columns(source.columns, pyarrow.parquet.read_schema(path).names)
        if files:
            place, options = ("parquet",), {"split": "train", "streaming": True, "data_files": list(map(str, files))}
        elif not hub.is_offline_mode():  # without a network: fails within 10 s, where `datasets` retries for minutes
            hub.HfApi().dataset_info(source.hub, revision=source.revision, timeout=10)
        if files or source.parquet:
            options |= {"columns": list(source.columns), "batch_size": 64}  # rows held in memory at a time
        yield from map(convert, datasets.load_dataset(*place, **options))
    except (OSError, ValueError, pyarrow.ArrowException, datasets.exceptions.DatasetsError, hub.errors.HTTPError) as e:
        raise ValueError(f"{data or source.hub}: {first_line(e)}{'' if data else mend}") from e


# ---------------------------------------------------------------------------------------------------------------
# Data: which rows go where


@functools.cache
def gradable(gold: str) -> bool:
    """Does the grader accept the gold as an answer? With a patient limit: a busy machine must not change the data."""
    return math_equal(gold, gold, limit_s=10.0)


def pick(
    label: str, rows: Iterable[Row], low: float, high: float, limit: int | None, seed: int, lazy: bool = False
) -> list[Problem]:
    """At most `limit` problems of a split: the questions with low <= u < high, in the order of u.

    u is sha256(seed, question), its first 48 bits as a fraction, of the question without regard to case and spacing. So
    the order of the rows does not matter, a question that stands there twice is in one split (and kept once), and new
    rows move no old one to another. `lazy` takes the first `limit` rows of the split instead of those with the smallest
    u, and reads no further. Golds are checked last and in order: only what is returned costs time.
    """
    seen, dropped = Counter(), Counter()

    def of_split() -> Iterator[tuple[float, str, Problem]]:
        for question, outcome in rows:
            key = " ".join(question.split()).casefold()
            u = int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode()).digest()[:6], "big") / 2**48
            here = outcome is not None and low <= u < high
            seen.update(all=outcome is not None, split=here)
            if here and isinstance(outcome, Problem):
                yield u, key, outcome
            elif here:
                dropped[outcome] += 1

    items: Iterable = of_split()
    if not lazy:
        items = sorted(items, key=lambda item: (item[0], item[2].question, item[2].gold))
    if lazy or len(items) > 200:
        from tqdm import tqdm

        items = tqdm(items, desc=f"{label}: checking", leave=False, disable=None)  # None: only on a terminal
    chosen: dict[str, tuple[float, str, Problem]] = {}
    for u, key, problem in items if limit != 0 else ():
        if key in chosen:
            dropped["repeated questions"] += 1
        elif problem.kind == "math" and not gradable(problem.gold):
            dropped["golds that the grader refuses"] += 1
        else:
            chosen[key] = (u, key, problem)
            if len(chosen) == limit:
                break
    drops = f"{sum(dropped.values()):,} of {seen['split']:,} rows dropped: "
    drops += ", ".join(f"{n:,} {reason}" for reason, n in dropped.most_common())
    if not chosen and limit != 0:
        few = " (a file of your own should have some 100 rows, so that each split gets a few)" * (seen["all"] < 100)
        drops = f"; {drops}" if dropped else ""
        raise ValueError(f"{label}: no problem in this split of {seen['all']:,} rows{few}{drops}")
    if dropped:
        logger.warning("%s: %s", label, drops)
    if limit is not None and len(chosen) < limit:
        logger.warning("%s: %s problems wanted, %s there", label, f"{limit:,}", f"{len(chosen):,}")
    return [problem for _, _, problem in sorted(chosen.values(), key=lambda item: item[:2])]


def load_problems(
    name: str, split: str = "train", limit: int | None = None, seed: int = 0, *, data: str | None = None,
    question_column: str | None = None, answer_column: str | None = None, tests_column: str | None = None,
) -> list[Problem]:  # fmt: skip
    """The problems of one split, "train", "validation" or "test": disjoint, and always the same for one seed.

    `name`: "congruence", the built-in task (1,008 problems: 408, 100, 500), one of SOURCES, or a .jsonl, .json or
    .parquet file of your own (80, 5, 15 %), whose columns can be named. `data`: a local copy of one of SOURCES, a file
    or a folder. `limit`: at most so many; None: the default size of the set, else all. Raises ValueError, in one line,
    or GradingError where golds cannot be graded.
    """
    if limit is not None and limit < 0:
        raise ValueError(f"limit {limit}: must be 0 or more")
    given = {"question": question_column, "answer": answer_column, "tests": tests_column}
    source, own = SOURCES.get(name), Path(name).suffix.lower() in ENDINGS
    splits = source.splits if source else HASHED
    if not source and not own and name != "congruence":
        known = f"congruence, {', '.join(SOURCES)}, or a file that ends in {', '.join(ENDINGS)}"
        raise ValueError(f"unknown data set {name!r} (known: {known})")
    if split not in splits:
        raise ValueError(f"unknown split {split!r} of {name} (known: {', '.join(splits)})")
    if (data is not None and not source) or (any(given.values()) and not own):
        raise ValueError(f"{name}: --data is for {', '.join(SOURCES)}, column names are for a file of your own")
    hub_split, low, high = splits[split]
    if own:
        return pick(f"{name} {split}", file_rows([Path(name)], own_row(given)), low, high, limit, seed)
    if source:
        limit = source.sizes.get(split) if limit is None else limit
        return pick(f"{name} {split}", named_rows(source, hub_split, data), low, high, limit, seed, source.stream)
    cases = [(a, x, p) for p in MODULI for a in range(2, p) for x in range(1, p)]
    random.Random(seed).shuffle(cases)
    problems = [Problem(f"{a:02d}x = {a * x % p:02d} (mod {p})", f"{x:02d}") for a, x, p in cases]
    return {"test": problems[:500], "validation": problems[500:600], "train": problems[600:]}[split][:limit]


# ---------------------------------------------------------------------------------------------------------------
# python reward.py FILE.jsonl: the graders on a file of responses


def verdict(problem: Problem, response: str) -> str:
    """ "right", or what befell a response: "no answer", "wrong", "timeout", "memory", "error", "crashed", ..."""
    if extract_answer(response) is None:
        return "no answer"
    if problem.kind == "code":
        return code_status(response, problem.tests).replace("passed", "right")
    before = EVENTS.copy()
    return "right" if is_correct(problem, response) else next(iter(EVENTS - before), "wrong")


def response_row(row: dict) -> tuple[Problem, str]:
    """A row {"response", "gold"} or {"response", "tests"}. Every test counts. Raises ValueError."""
    if row.get("tests") is not None:
        problem = Problem("", kind="code", tests=tuple(code_tests(row["tests"])))
    else:
        problem = Problem("", as_text(row.get("gold")).strip(), "math")
    if not isinstance(row.get("response"), str) or not (problem.gold or problem.tests):
        raise ValueError(f'needs a text "response", and a "gold" or "tests" (found: {", ".join(row) or "nothing"})')
    return problem, row["response"]


def main(argv: list[str] | None = None) -> int:
    """Grade a file, print counts by verdict, write the verdicts beside it. Returns the exit code."""
    global ALLOW_UNSANDBOXED
    import argparse

    from tqdm import tqdm

    parser = argparse.ArgumentParser(prog="reward.py", description="Grade a file of responses.")
    parser.add_argument("file", type=Path, help='lines of {"response", "gold"} or {"response", "tests"}')
    parser.add_argument("--out", type=Path, help="file for the verdicts (default: beside FILE, as NAME.verdicts.jsonl)")
    parser.add_argument("--allow-unsandboxed-code", action="store_true", help="run programs without bubblewrap")
    args = parser.parse_args(argv)
    out, counts = args.out or args.file.with_suffix(".verdicts.jsonl"), Counter()
    ALLOW_UNSANDBOXED = args.allow_unsandboxed_code
    try:
        rows = list(file_rows([args.file], response_row))  # all of them are read before the first is graded
        if any(problem.kind == "code" for problem, _ in rows):
            check_sandbox()
        if out.exists():
            raise ValueError(f"{out} exists; remove it, or name another file with --out")
        with open(out, "w", encoding="utf-8", buffering=1) as file:  # by line: killed, it keeps what it has
            for number, (problem, response) in enumerate(tqdm(rows, unit="response"), 1):
                said = verdict(problem, response)
                counts[said] += 1
                record = {"row": number, "verdict": said, "phi": format_score(response)}
                print(json.dumps(record | {"answer": extract_answer(response)}), file=file)
    except (ValueError, OSError) as error:
        named = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
        print(f"reward.py: error: {named}{first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; the first {sum(counts.values())} verdicts are in {out}", file=sys.stderr)
        return 130
    print("\n".join(f"{n:6} {said}" for said, n in counts.most_common()) or "no responses")
    print(f"{len(rows)} responses; verdicts: {out}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--grader-child"]:
        grader_child()
    else:
        sys.exit(main())
