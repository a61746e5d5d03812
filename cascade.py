"""The two-stage cascade, at inference exactly as in training, and its evaluation.

python cascade.py ask "14x = 9 (mod 19)" --run runs/...      one exchange, shown in full
python cascade.py eval --run runs/...                        the table of a trained pair, again, or on other problems
python cascade.py table --seeds 10 11 12 13 14               the paper's table: every method, trained and compared

          problem x -----------------------------+
              |                                  |
        [ drafter ]   draft a, its summary s(a)  |
              |       with the answer withheld   |
              +---------------> [ challenger ] <-+
                                      |
                                final answer b
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import torch
from scipy.stats import binomtest

import reward
from model import ADAPTERS, Pair, load_pair
from reward import (
    CONGRUENCE,
    THINK_CLOSE,
    Problem,
    challenge_reward,
    congruence,
    draft_reward,
    extract_answer,
    format_score,
    is_correct,
    load_problems,
    math_equal,
)
from rollout import CacheTooSmall, Rollouts, cache_budget, challenge_prompt, draft_prompt, sample, summarize

EVAL_SEED = 1_000_003  # fixed, so that runs of all training seeds are evaluated with the same noise


# ---------------------------------------------------------------------------------------------------------------
# The methods


@dataclass(frozen=True)
class Method:
    """All that tells the methods apart: agon.agon_step and what follows here read these fields, and no name."""

    about: str
    policies: tuple[str, ...] = ("A", "B")  # what is trained; with one, it reads its own drafts
    reads: bool = True  # False: 2N drafts per problem, and nobody reads them
    alternate: bool = True  # the roles swap every step; False: A drafts, B challenges
    shared: bool = False  # all N challenges of a problem read its first draft
    bonus: float = 0.0  # weight of c(b) (1 - c(a)) in the challenge reward
    margin: float = 0.0  # weight of -c(a)


METHODS = {
    "agon": Method("cross-model exchange with the conversion bonus", bonus=1.0),
    "coop": Method("cooperative exchange: no bonus"),
    "margin": Method("challenge reward 2 (c(b) - c(a))", margin=2.0),
    "fixed-roles": Method("with the bonus, but A always drafts", alternate=False, bonus=1.0),
    "shared-opponent": Method("all challenges of a problem read one draft: a constant bonus", shared=True, bonus=1.0),
    "self-refine": Method("one policy reads its own drafts", ("A",)),
    "self-refine-bonus": Method("the same, with the bonus", ("A",), bonus=1.0),
    "grpo": Method("plain GRPO: one policy, 2N drafts per problem", ("A",), reads=False),
    "zero-shot": Method("the base alone; nothing is trained", (), reads=False),
    "moa": Method("the untrained cascade; nothing is trained", ()),
}


def reward_terms(config: dict) -> dict[str, float]:
    """The weights in the challenge reward of a run, as reward.challenge_reward names them."""
    method, tiebreak = METHODS[config["method"]], config.get("length_tiebreak", 0.0)  # older runs have none
    return {"lam": config["format_weight"], "bonus": method.bonus, "margin": method.margin, "tiebreak": tiebreak}


# ---------------------------------------------------------------------------------------------------------------
# The two stages


@dataclass
class Stage:
    """One policy's rows of one stage. Row r answers problems[group[r]]; the group id is explicit, because the N
    challenges of one problem have N different prompts and nothing else ties them together."""

    adapter: str | None
    rollouts: Rollouts
    texts: list[str]
    correct: list[bool]  # c(y)
    phi: list[float]  # phi(y)
    group: list[int]  # index into the problems of the call
    summaries: list[str] = field(default_factory=list)  # challenge stage only: what each row was shown
    reads: Sequence[int] = ()  # challenge stage only: the draft row that each row read; its own number where not given

    def __post_init__(self):
        self.reads = self.reads or range(len(self.texts))


def grade(pair: Pair, adapter, rollouts: Rollouts, problems, group: list[int], summaries=(), reads=()) -> Stage:
    """Decode and score rows: c(y) and phi(y). group[r] is the problem that row r answers."""
    texts = rollouts.texts(pair.of(adapter))
    rows = [problems[g] for g in group]
    programs = any(problem.kind == "code" for problem in rows)  # each runs in processes of its own, so in parallel
    with ThreadPoolExecutor(os.cpu_count() if programs else 1) as pool:
        correct = list(pool.map(is_correct, rows, texts))
    return Stage(adapter, rollouts, texts, correct, [format_score(t) for t in texts], group, list(summaries), reads)


def draft_stage(pair: Pair, drafter: str | None, problems: Sequence[Problem], n: int = 1, **sampling) -> Stage:
    """n drafts a of every problem, from the plain prompt. Rows are problem-major. sampling: as for rollout.sample."""
    prompts = [draft_prompt(pair.of(drafter).tokenizer, problem.question) for problem in problems]
    rollouts = sample(pair, drafter, prompts, n, **sampling)
    return grade(pair, drafter, rollouts, problems, [g for g in range(len(problems)) for _ in range(n)])


def challenge_stage(pair: Pair, challenger: str | None, problems, drafts: Stage, reads=(), **sampling) -> Stage:
    """ONE challenge b for every draft, from the prompt (x, s(a)). Row r answers the problem of draft r, and reads draft
    reads[r]: draft r where no `reads` are given."""
    reads = reads or range(len(drafts.texts))
    written = [summarize(text) for text in drafts.texts]
    summaries = [written[a] for a in reads]
    tokenizer = pair.of(challenger).tokenizer  # with two bases another one: only text goes from policy to policy
    prompts = [
        challenge_prompt(tokenizer, problems[g].question, s) for g, s in zip(drafts.group, summaries, strict=True)
    ]
    rollouts = sample(pair, challenger, prompts, 1, **sampling)
    return grade(pair, challenger, rollouts, problems, drafts.group, summaries, reads)


def cascade(
    pair: Pair, problems, drafter="A", challenger="B", n: int = 1, shared: bool = False, **sampling
) -> tuple[Stage, Stage]:
    """The deployed pair, and the rollouts of one training step: drafts, then one challenge for each.

    shared: the N challenges of a problem all read its first draft.
    """
    drafts = draft_stage(pair, drafter, problems, n, **sampling)
    reads = [drafts.group.index(g) for g in drafts.group] if shared else ()
    return drafts, challenge_stage(pair, challenger, problems, drafts, reads, **sampling)


def challenge_rewards(drafts: Stage, challenges: Stage, **terms: float) -> list[float]:
    """R(b) of every row, against the draft that it read. terms: see reward_terms."""
    rewards = []
    for r, a in enumerate(challenges.reads):
        shorter = len(challenges.rollouts.completions[r]) < len(drafts.rollouts.completions[a])
        right, rival, phi = challenges.correct[r], drafts.correct[a], challenges.phi[r]
        rewards.append(challenge_reward(right, rival, phi, **terms, shorter=shorter))
    return rewards


# ---------------------------------------------------------------------------------------------------------------
# Measuring


def rate(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None  # None, not 0: nothing was observed


def mean(values: Iterable[float | None]) -> float | None:
    """Of what was observed."""
    return rate([x for x in values if x is not None])


def same_answer(a: str | None, b: str | None, kind: str) -> bool:
    """Do two answers say the same? Mathematics by value, since 1/2 copies 0.5; all else by its text."""
    if a is None or b is None:
        return False
    return a.strip() == b.strip() or (kind == "math" and math_equal(a, b))


def exchange_rates(drafts: Stage, challenges: Stage, kind: str = "congruence") -> dict[str, float | None]:
    """Is it reading or copying? kind: that of the problems.

    fix   b right where a was wrong (the conversion rate)
    keep  b right where a was right
    copy  b repeats a's answer where that was wrong (agreement on a right answer would prove nothing)
    """
    rows = [(drafts.correct[a], challenges.correct[r]) for r, a in enumerate(challenges.reads)]  # c(a), c(b)
    wrong = [(drafts.texts[a], challenges.texts[r]) for r, a in enumerate(challenges.reads) if not drafts.correct[a]]
    answers = [(extract_answer(a), extract_answer(b)) for a, b in wrong]
    return {
        "fix": rate([c_b for c_a, c_b in rows if not c_a]),
        "keep": rate([c_b for c_a, c_b in rows if c_a]),
        "copy": rate([same_answer(a, b, kind) for a, b in answers if a is not None]),
    }


HABITS = ("copy", "re-solve", "continue")


def habit(problem: Problem, draft: str, summary: str, challenge: str) -> str:
    """How a challenge came by its answer, one of HABITS.

    On the embedded task that can be seen: no trial of its own is a copy; a first trial of the candidate behind the one
    shown continues the draft (by luck one random start in 16 to 22 does); any other re-solves. Elsewhere the draft's
    own answer counts as a copy, all else as re-solved.
    """
    if problem.kind != "congruence":
        same = same_answer(extract_answer(draft), extract_answer(challenge), problem.kind)
        return "copy" if same else "re-solve"
    first, shown = re.match(r"<think>([0-9]*)", challenge), summary.strip()
    p = int(CONGRUENCE.match(problem.question)[3])
    if first and not first[1] and THINK_CLOSE in challenge:
        return "copy"
    follows = first and first[1] and shown.isdigit() and int(first[1]) == int(shown) % (p - 1) + 1  # 1 follows p - 1
    return "continue" if follows else "re-solve"


def habit_advantages(problems, drafts: Stage, challenges: Stage, advantages: Sequence[float]) -> dict[str, dict]:
    """{habit: rows that show it, their mean advantage}: what a method's reward pays for in this batch."""
    rows = zip(challenges.group, challenges.reads, challenges.summaries, challenges.texts, strict=True)
    shown = [habit(problems[g], drafts.texts[a], summary, text) for g, a, summary, text in rows]
    paired = list(zip(shown, advantages, strict=True))
    return {h: {"rows": shown.count(h), "advantage": mean(x for own, x in paired if own == h)} for h in HABITS}


def mean_tokens(rows: Sequence[Sequence[int]]) -> float:
    return sum(map(len, rows)) / len(rows)


def clopper_pearson(hits: int, total: int) -> tuple[float, float]:
    """The exact 95 % interval of a rate."""
    interval = binomtest(hits, total).proportion_ci(0.95, method="exact")
    return interval.low, interval.high


def table_row(name: str, drafts: Stage, challenges: Stage | None = None, kind: str = "congruence") -> dict:
    """One line of the table: pass@1 of the last stage with its 95 % Clopper-Pearson interval, tokens of every stage,
    and, one 0 or 1 per problem, which were right: other runs are compared problem by problem."""
    last = challenges or drafts
    hits, total = sum(last.correct), len(last.correct)
    low, high = clopper_pearson(hits, total)
    return {
        "name": name,
        "pass@1": hits / total,
        "low": low,
        "high": high,
        "problems": total,
        "draft_tokens": mean_tokens(drafts.rollouts.completions) if challenges else 0.0,
        "prefill_tokens": mean_tokens(last.rollouts.prompts)
        + (mean_tokens(drafts.rollouts.prompts) if challenges else 0),
        "final_tokens": mean_tokens(last.rollouts.completions),
        **(exchange_rates(drafts, challenges, kind) if challenges else {"fix": None, "keep": None, "copy": None}),
        "outcomes": [int(c) for c in last.correct],
    }


def shuffled_reads(rows: int, seed: int = EVAL_SEED) -> list[int]:
    """For one draft per problem: whose draft each row reads when the summaries are dealt out again, never its own."""
    order = random.Random(seed).sample(range(rows), rows)
    reads = [0] * rows
    for own, other in zip(order, order[1:] + order[:1], strict=True):  # one cycle through all of them
        reads[own] = other
    return reads


def jaccard(a: Sequence[int], b: Sequence[int]) -> float | None:
    """Overlap of two sets of errors, from outcomes on the same problems: both wrong over either wrong."""
    either = sum(not (x and y) for x, y in zip(a, b, strict=True))
    return sum(not x and not y for x, y in zip(a, b, strict=True)) / either if either else None


def evaluate(pair: Pair, test, validation=(), policies: Sequence[str] = ("A", "B"), direction="", **sampling) -> dict:
    """The table: zero-shot, the untrained cascade, each policy alone, and the cascade in every direction.

    policies: ("A", "B") are a trained pair; ("A",) alone reads its own drafts, A>A (under GRPO, its two passes); () is
    the bare base. The reported direction is picked on `validation`, never on `test`; `direction` says it instead.
    Every cascade is measured a second time with the summaries dealt out among the problems: what is then left of its
    accuracy owes nothing to reading. Returns {"rows": [...], "direction": "A>B", "jaccard": of both policies' errors}.
    """
    kind, rows = test[0].kind, []

    def both(name: str, reader: Pair, challenger: str | None, drafts: Stage, seconds: float) -> dict:
        """The row of a cascade whose drafts are there; seconds: what they took."""
        started = time.perf_counter()
        challenges = challenge_stage(reader, challenger, test, drafts, **sampling)
        row = table_row(name, drafts, challenges, kind) | {"seconds": seconds + time.perf_counter() - started}
        again = challenge_stage(reader, challenger, test, drafts, shuffled_reads(len(test)), **sampling)
        return row | {"shuffled": rate(again.correct)}

    def alone(name: str, half: Pair, drafter: str | None) -> tuple[Stage, float]:
        started = time.perf_counter()
        drafts = draft_stage(half, drafter, test, **sampling)
        seconds = time.perf_counter() - started
        rows.append(table_row(name, drafts) | {"seconds": seconds})
        return drafts, seconds

    # The base: adapters off. With two bases each alone, and the untrained cascade both ways.
    bare = {"A": pair, "B": pair.rival} if pair.rival else {"": pair}
    zero = {name: alone(f"zero-shot {name}".strip(), half, None) for name, half in bare.items()}
    for d, c in [("A", "B"), ("B", "A")] if pair.rival else [("", "")]:
        rows.append(both(f"untrained {d}>{c}" if d else "untrained cascade", bare[c], None, *zero[d]))
    if not policies:
        return {"rows": rows, "direction": "", "jaccard": None}

    directions = [("A", "B"), ("B", "A")] if len(policies) == 2 else [(policies[0], policies[0])]
    results, own = [], {}
    for drafter, challenger in directions:
        own[drafter] = alone(f"{drafter} alone", pair, drafter)
        results.append(both(f"cascade {drafter}>{challenger}", pair, challenger, *own[drafter]))
    if direction:
        picked = directions.index(tuple(direction.split(">")))
    else:
        on_validation = [sum(cascade(pair, validation, d, c, **sampling)[1].correct) for d, c in directions]
        picked = max(range(len(directions)), key=lambda i: on_validation[i])  # a tie goes to A>B
        for row, hits in zip(results, on_validation, strict=True):
            row["validation"] = hits / len(validation)
    for i, row in enumerate(results):
        row["picked"] = i == picked
    errors = [row["outcomes"] for row in rows if row["name"].endswith("alone")]
    overlap = jaccard(*errors) if len(errors) == 2 else None
    return {"rows": rows + results, "direction": ">".join(directions[picked]), "jaccard": overlap}


def percent(x: float | None, digits: int = 0) -> str:
    return "-" if x is None else f"{100 * x:.{digits}f}"


def format_table(result: dict) -> str:
    """The table as Markdown, readable in a terminal too."""
    lines = [
        "| method             | pass@1 % (95 % interval) | fix % | keep % | copy % | shuffled % "
        "| tokens: draft | read | final |",
        "|--------------------|--------------------------|-------|--------|--------|------------"
        "|---------------|------|-------|",
    ]
    for row in result["rows"]:
        score = f"{100 * row['pass@1']:5.1f} ({100 * row['low']:.1f} - {100 * row['high']:.1f})"
        name = row["name"] + (" *" if row.get("picked") else "")
        lines.append(
            f"| {name:18} | {score:24} | {percent(row['fix']):>5} | {percent(row['keep']):>6} "
            f"| {percent(row['copy']):>6} | {percent(row.get('shuffled'), 1):>10} | {row['draft_tokens']:13.1f} "
            f"| {row['prefill_tokens']:4.0f} | {row['final_tokens']:5.1f} |"
        )
    lines.append(
        f"\n* direction picked on the validation problems; {result['rows'][0]['problems']} test problems, one rollout "
        f"per problem and stage.\nshuffled: pass@1 where everyone reads the summary of another problem's draft."
    )
    if result["jaccard"] is not None:
        lines.append(f"Of the problems that A or B alone gets wrong, both get {percent(result['jaccard'])} % wrong.")
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# Exchanges for the eye


def exchange_records(problems, drafts: Stage, challenges: Stage, lam: float = 0.5, **terms: float) -> list[dict]:
    """One JSON-ready record per exchange: problem, draft, what the challenger was shown, its answer, both rewards.

    lam and terms: the weights of the rewards, see reward_terms.
    """
    rewards = challenge_rewards(drafts, challenges, lam=lam, **terms)
    return [
        {
            "problem": problems[challenges.group[r]].question,
            "gold": problems[challenges.group[r]].gold,
            "drafter": drafts.adapter,
            "challenger": challenges.adapter,
            "draft": drafts.texts[a],
            "summary": challenges.summaries[r],
            "challenge": challenges.texts[r],
            "draft_correct": drafts.correct[a],
            "challenge_correct": challenges.correct[r],
            "draft_reward": draft_reward(drafts.correct[a], drafts.phi[a], lam),
            "challenge_reward": rewards[r],
        }
        for r, a in enumerate(challenges.reads)
    ]


def telling_exchanges(records: list[dict], limit: int = 3) -> list[dict]:
    """A few that show different things, where there are such: a conversion, a kept answer, a shared failure."""
    kinds: dict[tuple[bool, bool], dict] = {}
    for record in records:
        kinds.setdefault((record["draft_correct"], record["challenge_correct"]), record)
    wanted = [kinds[k] for k in ((False, True), (True, True), (False, False), (True, False)) if k in kinds]
    return wanted[:limit]


def format_exchange(record: dict, colour: bool = False, graded: bool = True) -> str:
    """One exchange for the eye. graded = False: a problem asked by the user, whose answer nobody knows."""

    def paint(text: str, code: int) -> str:
        return f"\033[{code}m{text}\033[0m" if colour else text

    def verdict(who: str) -> str:
        if not graded:
            return ""
        right = record[f"{who}_correct"]
        return paint(f"{'right' if right else 'wrong'}, reward {record[f'{who}_reward']:.1f}", 32 if right else 31)

    return "\n".join(
        [
            f"problem     {paint(record['problem'], 1)}" + f"   (answer {record['gold']})" * bool(record["gold"]),
            f"draft     {record['drafter'] or '-'} {paint(record['draft'], 36)}   {verdict('draft')}",
            f"shown       {paint(record['summary'], 33)}",
            f"challenge {record['challenger'] or '-'} {paint(record['challenge'], 35)}   {verdict('challenge')}",
        ]
    )


# ---------------------------------------------------------------------------------------------------------------
# Command line


class OneLineParser(argparse.ArgumentParser):
    """argparse that complains in one line; its usage block would bury the message under all the flags."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def complain(program: str, error: Exception) -> int:
    """One line on stderr, and the exit code for a user's mistake."""
    print(f"{program}: error: {error}", file=sys.stderr)
    return 2


def run_main(main: Callable[[], int]) -> NoReturn:
    """Run a main() as a process: Ctrl-C and a closed pipe end it quietly, a poor terminal encoding loses no output."""
    if sys.stdout is None:  # started with stdout closed
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, open as long as the process
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except OSError as error:  # disk full, or "... | head", where nobody reads on
        code = 141 if isinstance(error, BrokenPipeError) else complain(Path(sys.argv[0]).name, error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter flushes into it at exit
    sys.exit(code)


def load_run(folder: Path) -> tuple[dict, Pair]:
    """(settings, trained pair) of a run folder. Raises ValueError with one line for anything missing or damaged."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not a run folder (no config.json); train one: python agon.py --out {folder}")
    try:
        config = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:  # not UTF-8, not JSON, not an object
        raise ValueError(f"{path} is damaged: {error}") from error
    tasks, files = ("congruence", *reward.SOURCES), reward.ENDINGS
    config = {"model_b": "", "prompt_tokens": 768, **config}  # older runs have them not
    usable = dict.fromkeys(("base", "model_b"), lambda v: isinstance(v, str))
    usable |= {"task": lambda v: isinstance(v, str) and (v in tasks or Path(v).suffix.lower() in files)}
    usable |= {"method": lambda v: isinstance(v, str) and v in METHODS, "four_bit": lambda v: isinstance(v, bool)}
    usable |= dict.fromkeys(
        ("max_tokens", "rollout_rows", "prompt_tokens", "threads"), lambda v: type(v) is int and 0 < v < 10**6
    )
    usable |= dict.fromkeys(("eval_temperature", "format_weight"), lambda v: type(v) in (int, float) and 0 <= v < 1e6)
    counts = dict.fromkeys(("train_problems", "eval_problems"), lambda v: type(v) is int and v >= 0)
    counts |= {"length_tiebreak": lambda v: type(v) in (int, float) and 0 <= v < 1e6}
    texts = dict.fromkeys(("data", "question_column", "answer_column", "tests_column"), lambda v: isinstance(v, str))
    usable |= {key: holds for key, holds in {**counts, **texts}.items() if key in config}  # older runs have them not
    usable |= {"eval_top_p": lambda v: type(v) in (int, float) and 0 < v <= 1}
    bad = [key for key, holds in usable.items() if key not in config or not holds(config[key])]
    if bad:
        raise ValueError(f"{path} has no usable value for {', '.join(bad)}; is it from agon.py?")
    torch.set_num_threads(config["threads"])  # as in training, so that the same seed gives the same samples
    return config, load_pair(config["base"], folder, model_b=config["model_b"], four_bit=config["four_bit"])


def load_split(config: dict, split: str) -> list[Problem]:
    """One split of a run's task, from its settings. Raises ValueError, or OSError where answers cannot be graded."""
    given = {key: config.get(key) or None for key in ("data", "question_column", "answer_column", "tests_column")}
    limit = config.get("train_problems" if split == "train" else "eval_problems") or None  # 0: the task's own size
    problems = load_problems(config["task"], split, limit, **given)
    if problems and problems[0].kind == "code":
        reward.check_sandbox()  # before any long work
    return problems


def eval_sampling(config: dict) -> dict:
    """The sampling arguments of evaluation, from a run's settings."""
    return {
        "max_tokens": config["max_tokens"],
        "temperature": config["eval_temperature"],
        "top_p": config["eval_top_p"],
        "max_rows": config["rollout_rows"],
        "max_cache_tokens": cache_budget(config["rollout_rows"], config["prompt_tokens"], config["max_tokens"]),
        "seed": EVAL_SEED,
    }


def saved_direction(folder: Path, config: dict) -> tuple[str, str]:
    """(drafter, challenger) as picked on validation when the run ended; A>B if it never got that far."""
    try:
        drafter, challenger = json.loads((folder / "results.json").read_text(encoding="utf-8"))["direction"].split(">")
        if drafter in ADAPTERS and challenger in ADAPTERS:
            return drafter, challenger
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # an interrupted run has no results yet
    policies = METHODS[config["method"]].policies or (None,)
    return policies[0], policies[-1]


# ---------------------------------------------------------------------------------------------------------------
# The paper's table: every method, several seeds

PAPER = {  # row of the table: what is trained for it ("": nothing), and which row of that run's evaluation it shows
    "zero-shot": ("", "zero-shot"),
    "grpo": ("grpo", "A alone"),
    "self-refine": ("self-refine", "picked"),
    "two-pass": ("grpo", "picked"),  # GRPO's policy reads its own draft
    "moa": ("", "untrained"),
    "shared-opponent": ("shared-opponent", "picked"),
    "coop": ("coop", "picked"),
    "agon": ("agon", "picked"),
    "self-refine-bonus": ("self-refine-bonus", "picked"),
    "margin": ("margin", "picked"),
    "fixed-roles": ("fixed-roles", "picked"),
    "drafter-alone": ("agon", "drafter"),  # the first stage of Agon's cascade
}
ORDER = ("zero-shot", "grpo", "coop", "agon")  # the paper's, from worst to best
OWN_SETTINGS = {"method", "seed", "out", "rollout_rows", "micro_tokens"}  # in which the runs of a table may differ


def train_missing(folder: Path, wanted: Sequence[tuple[str, int]], flags: Sequence[str], jobs: int) -> None:
    """Run agon.py for every (method, seed) that has no results in `folder` yet, `jobs` at a time, each with a log.

    A run that was cut is moved aside and made again. Raises ValueError with one line for a run that fails.
    """
    program = str(Path(__file__).resolve().with_name("agon.py"))

    def run(method: str, seed: int) -> None:
        own = folder / f"{method}-{seed}"
        if own.exists():
            aside = next(path for k in range(10**6) if not (path := own.with_name(f"{own.name}.cut{k}")).exists())
            own.rename(aside)
        command = [sys.executable, program, *flags, "--method", method, "--seed", str(seed), "--out", str(own)]
        log = own.with_suffix(".log")
        with open(log, "w", encoding="utf-8") as file:
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        if code:
            last = (log.read_text(encoding="utf-8", errors="replace").split("\n") or [""])[-2:]
            raise ValueError(f"the run {own} ended with exit code {code}: {' '.join(last).strip()} (all of it: {log})")

    missing = [(method, seed) for method, seed in wanted if not (folder / f"{method}-{seed}" / "results.json").exists()]
    started = time.perf_counter()
    with ThreadPoolExecutor(jobs) as pool:
        runs = [pool.submit(run, *job) for job in missing]
        try:
            for count, done in enumerate(as_completed(runs), 1):
                done.result()
                minutes = (time.perf_counter() - started) / 60
                left = minutes / count * (len(missing) - count)
                print(f"{count} of {len(missing)} runs, {minutes:.0f} min, about {left:.0f} to go", file=sys.stderr)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # one that failed stops those that have not begun


def read_run(folder: Path) -> dict:
    """Settings, results and metrics of a finished run. Raises ValueError where they are damaged."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return {"config": config, "results": results, "metrics": [json.loads(line) for line in lines]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the run {folder} is damaged ({error}): remove it, and it is made again") from error


def mcnemar(a: Sequence[int], b: Sequence[int]) -> tuple[int, int, float]:
    """Outcomes on the same problems -> right in a alone, right in b alone, exact two-sided p that neither is better."""
    only_a = sum(x > y for x, y in zip(a, b, strict=True))
    only_b = sum(x < y for x, y in zip(a, b, strict=True))
    return only_a, only_b, binomtest(only_a, only_a + only_b, 0.5).pvalue if only_a + only_b else 1.0


def early_habits(runs: Sequence[dict]) -> dict[str, float | None]:
    """Mean advantage of each habit over the challenges of the first eighth of the runs: what the reward pushes to."""
    early = [m["habits"] for run in runs for m in run["metrics"][: max(1, len(run["metrics"]) // 8)] if m["habits"]]
    rows = {name: sum(h[name]["rows"] for h in early) for name in HABITS}
    total = {name: sum(h[name]["rows"] * (h[name]["advantage"] or 0.0) for h in early) for name in HABITS}
    return {name: total[name] / rows[name] if rows[name] else None for name in HABITS}


def paper_table(runs: dict[tuple[str, int], dict], names: Sequence[str], seeds: Sequence[int]) -> dict:
    """Rows over seeds, from what `read_run` gives for each (method, seed). JSON-ready: see format_paper_table."""
    anywhere = next(iter(runs))[0]  # every run evaluates the same base
    shown: dict[str, list[dict]] = {}  # by name, one row of an evaluation for each seed
    rows = []
    for name in names:
        method, which = PAPER[name]
        group = [runs[method or anywhere, seed] for seed in (seeds if method else seeds[:1])]
        shown[name], others = [], []
        for results in (run["results"] for run in group):
            candidates = results["rows"]
            if which == "picked":
                fits = [r for r in candidates if r.get("picked")]
                others += [r["pass@1"] for r in candidates if r.get("picked") is False]
            else:
                start = f"{results['direction'][:1]} alone" if which == "drafter" else which
                fits = [r for r in candidates if r["name"].startswith(start)]
            shown[name].append(fits[0])
        steps = [m for run in group for m in run["metrics"]] if method else []
        hits, total = sum(sum(r["outcomes"]) for r in shown[name]), sum(r["problems"] for r in shown[name])
        low, high = clopper_pearson(hits, total)
        scores = [r["pass@1"] for r in shown[name]]
        row = {"name": name, "pass@1": mean(scores), "low": low, "high": high, "by_seed": scores}
        row["other_direction"] = mean(others)
        for key in ("fix", "keep", "copy", "shuffled", "draft_tokens", "prefill_tokens", "final_tokens", "seconds"):
            row[key] = mean(r.get(key) for r in shown[name])
        row["rollouts"] = sum(m["rollouts"] for m in steps) // len(group)  # of a run's training
        row["train_seconds"] = sum(m["seconds_sampling"] + m["seconds_update"] for m in steps) / len(group)
        trained = method and which == "picked"
        row["jaccard"] = mean(run["results"]["jaccard"] for run in group) if trained else None
        row["habits"] = early_habits(group) if trained else dict.fromkeys(HABITS)
        rows.append(row)

    def compare(worse: str, better: str) -> dict:
        """Problem by problem and seed by seed; what has no seeds stands against each."""
        a, b = ([r["outcomes"] for r in shown[name]] for name in (worse, better))
        a, b = a * (len(b) if len(a) == 1 else 1), b * (len(a) if len(b) == 1 else 1)
        each = [mcnemar(x, y) for x, y in zip(a, b, strict=True)]
        _, _, pooled = mcnemar([o for x in a for o in x], [o for y in b for o in y])
        gains = [(sum(y) - sum(x)) / len(x) for x, y in zip(a, b, strict=True)]
        result = {"worse": worse, "better": better, "difference": mean(gains), "by_seed": gains}
        result |= {"seeds_better": sum(g > 0 for g in gains), "p": pooled, "p_by_seed": [p for *_, p in each]}
        ours = {row["name"]: row for row in rows}
        rates = {k: (ours[worse][k], ours[better][k]) for k in ("fix", "keep", "copy")}
        return result | {"rates": rates}

    paired = [compare(name, "agon") for name in names if name != "agon"] if "agon" in names else []
    steps = [pair for pair in pairwise(ORDER) if set(pair) <= set(names)]
    return {"seeds": list(seeds), "rows": rows, "paired": paired, "order": [compare(*pair) for pair in steps]}


def format_paper_table(table: dict) -> str:
    """table.md: accuracy, behaviour, differences, and what became of the paper's ordering."""

    def p_value(p: float) -> str:
        return f"{p:.3f}" if p >= 0.001 else f"{p:.0e}"

    seeds = len(table["seeds"])
    text = [
        "| method | pass@1 % (95 % interval, seeds pooled) | by seed | other direction | shuffled | fix | keep | copy "
        "| agon minus this, points | McNemar p | seeds where agon is better |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    against = {pair["worse"]: pair for pair in table["paired"]}
    for row in table["rows"]:
        pair = against.get(row["name"])
        cells = [
            row["name"],
            f"{percent(row['pass@1'], 1)} ({percent(row['low'], 1)} – {percent(row['high'], 1)})",
            " ".join(percent(x, 1) for x in row["by_seed"]),
            *(percent(row[key], 1) for key in ("other_direction", "shuffled")),
            *(percent(row[key]) for key in ("fix", "keep", "copy")),
            f"{100 * pair['difference']:+.1f}" if pair else "-",
            p_value(pair["p"]) if pair else "-",
            f"{pair['seeds_better']} of {len(pair['by_seed'])}" if pair else "-",
        ]
        text.append(f"| {' | '.join(cells)} |")
    text += [
        "",
        "| method | tokens: draft | read | final | seconds | rollouts | training, s | Jaccard of errors "
        "| advantage of copying | of re-solving | of continuing |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table["rows"]:
        cells = [row["name"], *(f"{row[key]:.1f}" for key in ("draft_tokens", "prefill_tokens", "final_tokens"))]
        cells += [f"{row['seconds']:.1f}", f"{row['rollouts']:,}", f"{row['train_seconds']:.0f}"]
        cells += ["-" if row["jaccard"] is None else f"{row['jaccard']:.2f}"]
        cells += ["-" if row["habits"][name] is None else f"{row['habits'][name]:+.3f}" for name in HABITS]
        text.append(f"| {' | '.join(cells)} |")
    text += ["", f"The paper's ordering, {' < '.join(ORDER)}:", ""]
    for pair in table["order"]:
        count, of = pair["seeds_better"], len(pair["by_seed"])
        low, high = min(pair["by_seed"]), max(pair["by_seed"])
        verdict = "appears" if pair["difference"] > 0 and count == of and pair["p"] < 0.05 else "is not established"
        if pair["difference"] <= 0:
            verdict = "does not appear"
        rates = ", ".join(
            f"{name} {percent(a)} and {percent(b)}" for name, (a, b) in pair["rates"].items() if None not in (a, b)
        )
        text.append(
            f"- {pair['worse']} < {pair['better']} {verdict}: {100 * pair['difference']:+.1f} points "
            f"({100 * low:+.1f} to {100 * high:+.1f}), {count} of {of} seeds, p = {p_value(pair['p'])}"
            + (f"; {rates}." if rates else ".")
        )
    text += [
        "",
        f"Seeds {', '.join(map(str, table['seeds']))}. Cascades in the direction that the validation problems picked; "
        f"means over {seeds} seeds but for the base's rows. Intervals: Clopper-Pearson over the problems of all seeds. "
        "p: exact McNemar test, problem by problem, seeds pooled: it knows of no spread between seeds, which the "
        "column of seeds shows. shuffled: everyone reads the summary of another problem's draft. seconds: wall time "
        "of both stages on the test problems. Advantages: mean z-scored advantage of the challenges of each habit in "
        "the first eighth of the training.",
    ]
    return "\n".join(text) + "\n"


def draw_training(runs: dict[tuple[str, int], dict], path: Path, methods: Sequence[str] = ("agon", "coop")) -> None:
    """table.png: copy, fix, keep and accuracy of the challenges over training, every seed, Agon against coop."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    panels = {"copy": "copies a wrong draft's answer", "fix": "right where the draft is wrong"}
    panels |= {"keep": "right where the draft is right", "accuracy": "cascade accuracy"}
    figure, axes = plt.subplots(1, 4, figsize=(16, 3.6), sharey=True)
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for method, colour in zip(methods, ("tab:red", "tab:blue"), strict=False):
            curves = []
            for (name, _), run in runs.items():
                if name == method:
                    steps = run["metrics"]
                    ys = [m["challenge"][key] if key == "accuracy" else m["rates"][key] for m in steps]
                    curves.append([mean(ys[max(0, i - 4) : i + 5]) for i in range(len(ys))])  # over 9 steps
                    axis.plot(curves[-1], color=colour, alpha=0.35, linewidth=0.9)
            if curves:
                axis.plot([mean(ys) for ys in zip(*curves, strict=True)], color=colour, linewidth=2.2, label=method)
        axis.set(title=title, xlabel="step", ylim=(-0.02, 1.02))
        axis.grid(alpha=0.3)
    axes[0].legend(loc="best")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def make_table(folder: Path, names: Sequence[str], seeds: Sequence[int], flags: Sequence[str], jobs: int) -> None:
    """Train what is missing, and write and print the table. Raises ValueError, with one line, for what cannot be."""
    methods = list(dict.fromkeys(PAPER[name][0] for name in names if PAPER[name][0])) or ["moa"]
    wanted = [(method, seed) for seed in seeds for method in methods]
    folder.mkdir(parents=True, exist_ok=True)
    train_missing(folder, wanted, flags, jobs)
    runs = {(method, seed): read_run(folder / f"{method}-{seed}") for method, seed in wanted}
    first = runs[wanted[0]]["config"]
    for (method, seed), run in runs.items():
        other = [key for key, x in run["config"].items() if key not in OWN_SETTINGS and x != first.get(key)]
        if other:
            raise ValueError(f"{folder}: {method}-{seed} was made with another {', '.join(other)} than the first run")
    table = paper_table(runs, names, seeds)
    (folder / "table.json").write_text(json.dumps(table, indent=1), encoding="utf-8")
    (folder / "table.md").write_text(format_paper_table(table), encoding="utf-8")
    draw_training(runs, folder / "table.png")
    print(format_paper_table(table))
    print(f"{folder / 'table.md'}, table.json, table.png, and a run folder for each method and seed")


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="cascade.py", description="Use a trained pair: one drafts, the other answers.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    ask = commands.add_parser("ask", help="one problem, the whole exchange")
    ask.add_argument("problem", help="a problem of the run's task, such as '14x = 9 (mod 19)'")
    ask.add_argument("--direction", choices=["A>B", "B>A", "A>A", "B>B"], help="default: as picked on validation")
    again = commands.add_parser("eval", help="the table of a run on its test problems, again, or on those of --task")
    for command in (ask, again):
        command.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder written by agon.py")
        command.add_argument("--seed", type=int, default=EVAL_SEED, help="sampling seed")
    again.add_argument("--allow-unsandboxed-code", action="store_true", help="run programs without bubblewrap")
    again.add_argument("--task", help="another task, or file, than the run's (see agon.py --help)")
    for flag in ("data", "question-column", "answer-column", "tests-column"):
        again.add_argument(f"--{flag}", default="", help="as for agon.py; goes with --task")
    again.add_argument("--eval-problems", type=int, default=0, help="problems at most; 0: the task's own number")
    table = commands.add_parser(
        "table",
        allow_abbrev=False,  # or --seed, agon.py's, would be taken for --seeds
        help="every method over several seeds; flags that are not listed here go to agon.py",
        description="Train what --out does not hold yet, one run folder per method and seed, and print the paper's "
        "table. All other flags are handed to agon.py, for every run.",
    )
    table.add_argument("--seeds", type=int, nargs="+", required=True, metavar="SEED")
    table.add_argument("--methods", nargs="+", choices=PAPER, default=list(PAPER), metavar="ROW", help=", ".join(PAPER))
    table.add_argument("--out", type=Path, default=Path("runs/table"), metavar="DIR", help="default: runs/table")
    table.add_argument(
        "--jobs", type=int, default=0, help="runs at once (default: one on a GPU, else one per CPU core)"
    )
    args, flags = parser.parse_known_args(argv)
    if args.command == "table":
        return main_table(args, flags)
    if flags:
        parser.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        if args.seed < 0:
            raise ValueError(f"--seed {args.seed}: must be 0 or more")
        config, pair = load_run(args.run)
        if args.command == "eval":
            reward.ALLOW_UNSANDBOXED = args.allow_unsandboxed_code  # never from the run's settings: they may be a gift
            test, validation, direction = other_problems(args, config)
        own = config["task"] == "congruence"  # then any problem of the task can be graded
        if args.command == "ask":
            problems = [congruence(args.problem) if own else Problem(args.problem, kind="math")]
    except (ValueError, OSError) as error:
        return complain(parser.prog, error)
    sampling = {**eval_sampling(config), "seed": args.seed}
    try:
        if args.command == "eval":
            policies = METHODS[config["method"]].policies
            print(format_table(evaluate(pair, test, validation, policies, direction, **sampling)))
            return 0
        drafter, challenger = args.direction.split(">") if args.direction else saved_direction(args.run, config)
        drafts, challenges = cascade(pair, problems, drafter, challenger, **sampling)
    except (FloatingPointError, CacheTooSmall) as error:  # a pair that diverged; a prompt far beyond prompt_tokens
        return complain(parser.prog, error)
    except torch.OutOfMemoryError:
        mend = f"lower rollout_rows in {args.run / 'config.json'}"
        return complain(parser.prog, ValueError(f"{pair.device} is out of memory: {mend}"))
    record = exchange_records(problems, drafts, challenges, **reward_terms(config))[0]
    print(format_exchange(record, sys.stdout.isatty(), graded=own))
    answer = extract_answer(challenges.texts[0])
    print(f"answer      {answer if answer is not None else '(none: the challenge never closed its answer)'}")
    return 0


def other_problems(args: argparse.Namespace, config: dict) -> tuple[list[Problem], list[Problem], str]:
    """(test, validation, direction) for eval. Where a task has no validation problems, and where the run's own did the
    picking already, the direction is the saved one; "": to be picked on the validation problems."""
    if not args.task:
        return load_split(config, "test"), load_split(config, "validation"), ""
    config |= {key: getattr(args, key) for key in ("task", "data", "question_column", "answer_column", "tests_column")}
    config["eval_problems"] = args.eval_problems
    return load_split(config, "test"), [], ">".join(filter(None, saved_direction(args.run, config)))


def main_table(args: argparse.Namespace, flags: list[str]) -> int:
    own = {"--method", "--seed", "--out"} & {flag.partition("=")[0] for flag in flags}
    try:
        if own:
            raise ValueError(f"{own.pop()}: the table sets it for each run (--methods, --seeds, --out)")
        if len(set(args.seeds)) < len(args.seeds) or min(args.seeds) < 0:
            raise ValueError(f"--seeds {' '.join(map(str, args.seeds))}: must be different, 0 or more")
        if args.jobs < 0:
            raise ValueError(f"--jobs {args.jobs}: must be 0 or more")
        jobs = args.jobs or (1 if torch.cuda.is_available() else os.cpu_count() or 1)
        make_table(args.out, args.methods, args.seeds, flags, jobs)
    except (ValueError, OSError) as error:
        return complain("cascade.py", error)
    return 0


if __name__ == "__main__":
    run_main(main)
