"""The two-stage cascade, at inference exactly as in training, and its evaluation.

python cascade.py ask "14x = 9 (mod 19)" --run runs/...      one exchange, shown in full
python cascade.py eval --run runs/...                        the table of a trained pair, again

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
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from scipy.stats import binomtest

import reward
from model import ADAPTERS, Pair, load_pair
from reward import (
    Problem,
    challenge_reward,
    congruence,
    draft_reward,
    extract_answer,
    format_score,
    is_correct,
    load_problems,
)
from rollout import CacheTooSmall, Rollouts, cache_budget, challenge_prompt, draft_prompt, sample, summarize

EVAL_SEED = 1_000_003  # fixed, so that runs of all training seeds are evaluated with the same noise


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


def grade(pair: Pair, adapter, rollouts: Rollouts, problems, group: list[int], summaries=()) -> Stage:
    """Decode and score rows: c(y) and phi(y). group[r] is the problem that row r answers."""
    texts = rollouts.texts(pair.of(adapter))
    rows = [problems[g] for g in group]
    programs = any(problem.kind == "code" for problem in rows)  # each runs in processes of its own, so in parallel
    with ThreadPoolExecutor(os.cpu_count() if programs else 1) as pool:
        correct = list(pool.map(is_correct, rows, texts))
    return Stage(adapter, rollouts, texts, correct, [format_score(t) for t in texts], group, list(summaries))


def draft_stage(pair: Pair, drafter: str | None, problems: Sequence[Problem], n: int = 1, **sampling) -> Stage:
    """n drafts a of every problem, from the plain prompt. Rows are problem-major. sampling: as for rollout.sample."""
    prompts = [draft_prompt(pair.of(drafter).tokenizer, problem.question) for problem in problems]
    rollouts = sample(pair, drafter, prompts, n, **sampling)
    return grade(pair, drafter, rollouts, problems, [g for g in range(len(problems)) for _ in range(n)])


def challenge_stage(pair: Pair, challenger: str | None, problems, drafts: Stage, **sampling) -> Stage:
    """ONE challenge b for every draft, from the prompt (x, s(a)). Row r reads draft r."""
    summaries = [summarize(text) for text in drafts.texts]
    tokenizer = pair.of(challenger).tokenizer  # with two bases another one: only text goes from policy to policy
    prompts = [
        challenge_prompt(tokenizer, problems[g].question, s) for g, s in zip(drafts.group, summaries, strict=True)
    ]
    rollouts = sample(pair, challenger, prompts, 1, **sampling)
    return grade(pair, challenger, rollouts, problems, drafts.group, summaries)


def cascade(pair: Pair, problems, drafter="A", challenger="B", n: int = 1, **sampling) -> tuple[Stage, Stage]:
    """The deployed pair, and the rollouts of one training step: drafts, then one challenge for each."""
    drafts = draft_stage(pair, drafter, problems, n, **sampling)
    return drafts, challenge_stage(pair, challenger, problems, drafts, **sampling)


# ---------------------------------------------------------------------------------------------------------------
# Measuring


def rate(hits: Sequence[bool]) -> float | None:
    return sum(hits) / len(hits) if hits else None  # None, not 0: nothing was observed


def exchange_rates(drafts: Stage, challenges: Stage) -> dict[str, float | None]:
    """Is it reading or copying?

    fix   b right where a was wrong (the conversion rate)
    keep  b right where a was right
    copy  b repeats a's answer where that was wrong (agreement on a right answer would prove nothing)
    """
    rows = list(zip(drafts.correct, challenges.correct, drafts.texts, challenges.texts, strict=True))
    answers = [(extract_answer(a), extract_answer(b)) for c_a, _, a, b in rows if not c_a]
    return {
        "fix": rate([c_b for c_a, c_b, *_ in rows if not c_a]),
        "keep": rate([c_b for c_a, c_b, *_ in rows if c_a]),
        "copy": rate([b is not None and a.strip() == b.strip() for a, b in answers if a is not None]),
    }


def mean_tokens(rows: Sequence[Sequence[int]]) -> float:
    return sum(map(len, rows)) / len(rows)


def table_row(name: str, drafts: Stage, challenges: Stage | None = None) -> dict:
    """One line of the table: pass@1 of the last stage with its 95 % Clopper-Pearson interval, tokens of every stage."""
    last = challenges or drafts
    hits, total = sum(last.correct), len(last.correct)
    interval = binomtest(hits, total).proportion_ci(0.95, method="exact")
    return {
        "name": name,
        "pass@1": hits / total,
        "low": interval.low,
        "high": interval.high,
        "problems": total,
        "draft_tokens": mean_tokens(drafts.rollouts.completions) if challenges else 0.0,
        "prefill_tokens": mean_tokens(last.rollouts.prompts)
        + (mean_tokens(drafts.rollouts.prompts) if challenges else 0),
        "final_tokens": mean_tokens(last.rollouts.completions),
        **(exchange_rates(drafts, challenges) if challenges else {"fix": None, "keep": None, "copy": None}),
    }


def evaluate(pair: Pair, test, validation, policies: Sequence[str] = ("A", "B"), **sampling) -> dict:
    """The table: zero-shot, the untrained cascade, each policy alone, and the cascade in every direction.

    policies ("A", "B") are a trained pair; ("A",) alone is a GRPO run, whose cascade is its two passes A>A.
    The reported direction is picked on `validation`, never on `test`. Returns {"rows": [...], "direction": "A>B"}.
    """
    directions = [("A", "B"), ("B", "A")] if len(policies) == 2 else [(policies[0], policies[0])]

    rows = []
    if pair.rival:  # two bases: each alone, and the untrained cascade both ways
        bare = {"A": pair, "B": pair.rival}
        zero = {name: draft_stage(half, None, test, **sampling) for name, half in bare.items()}
        rows += [table_row(f"zero-shot {name}", zero[name]) for name in bare]
        for d, c in directions:
            challenged = challenge_stage(bare[c], None, test, zero[d], **sampling)
            rows.append(table_row(f"untrained {d}>{c}", zero[d], challenged))
    else:
        zero, untrained = cascade(pair, test, None, None, **sampling)  # adapters off: the bare base
        rows += [table_row("zero-shot", zero), table_row("untrained cascade", zero, untrained)]
    results = []
    for drafter, challenger in directions:
        drafts, challenges = cascade(pair, test, drafter, challenger, **sampling)
        rows.append(table_row(f"{drafter} alone", drafts))
        results.append(table_row(f"cascade {drafter}>{challenger}", drafts, challenges))
    on_validation = [sum(cascade(pair, validation, d, c, **sampling)[1].correct) for d, c in directions]
    picked = max(range(len(directions)), key=lambda i: on_validation[i])  # a tie goes to A>B
    for i, row in enumerate(results):
        row["validation"] = on_validation[i] / len(validation)
        row["picked"] = i == picked
    return {"rows": rows + results, "direction": ">".join(directions[picked])}


def format_table(result: dict) -> str:
    """The table as Markdown, readable in a terminal too."""

    def percent(x: float | None) -> str:
        return "  - " if x is None else f"{100 * x:4.0f}"

    lines = [
        "| method             | pass@1 % (95 % interval) | fix % | keep % | copy % | tokens: draft | read | final |",
        "|--------------------|--------------------------|-------|--------|--------|---------------|------|-------|",
    ]
    for row in result["rows"]:
        score = f"{100 * row['pass@1']:5.1f} ({100 * row['low']:.1f} - {100 * row['high']:.1f})"
        name = row["name"] + (" *" if row.get("picked") else "")
        lines.append(
            f"| {name:18} | {score:24} "
            f"| {percent(row['fix']):>5} | {percent(row['keep']):>6} | {percent(row['copy']):>6} "
            f"| {row['draft_tokens']:13.1f} | {row['prefill_tokens']:4.0f} | {row['final_tokens']:5.1f} |"
        )
    n = result["rows"][0]["problems"]
    lines.append(
        f"\n* direction picked on the validation problems; {n} test problems, one rollout per problem and stage."
    )
    return "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------------
# Exchanges for the eye


def exchange_records(problems, drafts: Stage, challenges: Stage, lam: float = 0.5, bonus: float = 1.0) -> list[dict]:
    """One JSON-ready record per exchange: problem, draft, what the challenger was shown, its answer, both rewards."""
    return [
        {
            "problem": problems[drafts.group[r]].question,
            "gold": problems[drafts.group[r]].gold,
            "drafter": drafts.adapter,
            "challenger": challenges.adapter,
            "draft": drafts.texts[r],
            "summary": challenges.summaries[r],
            "challenge": challenges.texts[r],
            "draft_correct": drafts.correct[r],
            "challenge_correct": challenges.correct[r],
            "draft_reward": draft_reward(drafts.correct[r], drafts.phi[r], lam),
            "challenge_reward": challenge_reward(
                challenges.correct[r], drafts.correct[r], challenges.phi[r], lam, bonus
            ),
        }
        for r in range(len(drafts.texts))
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
    usable |= {"method": lambda v: v in ("agon", "coop", "grpo"), "four_bit": lambda v: isinstance(v, bool)}
    usable |= dict.fromkeys(
        ("max_tokens", "rollout_rows", "prompt_tokens", "threads"), lambda v: type(v) is int and 0 < v < 10**6
    )
    usable |= dict.fromkeys(("eval_temperature", "format_weight"), lambda v: type(v) in (int, float) and 0 <= v < 1e6)
    counts = dict.fromkeys(("train_problems", "eval_problems"), lambda v: type(v) is int and v >= 0)
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


def policies_of(config: dict) -> tuple[str, ...]:
    return ("A",) if config["method"] == "grpo" else ("A", "B")


def bonus_of(config: dict) -> float:
    """The weight of the conversion bonus, which is all that tells Agon from the cooperative exchange."""
    return 1.0 if config["method"] == "agon" else 0.0


def saved_direction(folder: Path, config: dict) -> tuple[str, str]:
    """(drafter, challenger) as picked on validation when the run ended; A>B if it never got that far."""
    try:
        drafter, challenger = json.loads((folder / "results.json").read_text(encoding="utf-8"))["direction"].split(">")
        if drafter in ADAPTERS and challenger in ADAPTERS:
            return drafter, challenger
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # an interrupted run has no results yet
    return policies_of(config)[0], policies_of(config)[-1]


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="cascade.py", description="Use a trained pair: one drafts, the other answers.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    ask = commands.add_parser("ask", help="one problem, the whole exchange")
    ask.add_argument("problem", help="a problem of the run's task, such as '14x = 9 (mod 19)'")
    ask.add_argument("--direction", choices=["A>B", "B>A", "A>A", "B>B"], help="default: as picked on validation")
    again = commands.add_parser("eval", help="the table of a run on its test problems, again")
    for command in (ask, again):
        command.add_argument("--run", type=Path, required=True, metavar="DIR", help="run folder written by agon.py")
        command.add_argument("--seed", type=int, default=EVAL_SEED, help="sampling seed")
    again.add_argument("--allow-unsandboxed-code", action="store_true", help="run programs without bubblewrap")
    args = parser.parse_args(argv)
    try:
        if args.seed < 0:
            raise ValueError(f"--seed {args.seed}: must be 0 or more")
        config, pair = load_run(args.run)
        own = config["task"] == "congruence"  # then any problem of the task can be graded
        if args.command == "ask":
            problems = [congruence(args.problem) if own else Problem(args.problem, kind="math")]
        else:
            reward.ALLOW_UNSANDBOXED = args.allow_unsandboxed_code  # never from the run's settings: they may be a gift
            test, validation = (load_split(config, split) for split in ("test", "validation"))
    except (ValueError, OSError) as error:
        return complain(parser.prog, error)
    sampling = {**eval_sampling(config), "seed": args.seed}
    try:
        if args.command == "eval":
            print(format_table(evaluate(pair, test, validation, policies_of(config), **sampling)))
            return 0
        drafter, challenger = args.direction.split(">") if args.direction else saved_direction(args.run, config)
        drafts, challenges = cascade(pair, problems, drafter, challenger, **sampling)
    except (FloatingPointError, CacheTooSmall) as error:  # a pair that diverged; a prompt far beyond prompt_tokens
        return complain(parser.prog, error)
    except torch.OutOfMemoryError:
        mend = f"lower rollout_rows in {args.run / 'config.json'}"
        return complain(parser.prog, ValueError(f"{pair.device} is out of memory: {mend}"))
    record = exchange_records(problems, drafts, challenges, config["format_weight"], bonus_of(config))[0]
    print(format_exchange(record, sys.stdout.isatty(), graded=own))
    answer = extract_answer(challenges.texts[0])
    print(f"answer      {answer if answer is not None else '(none: the challenge never closed its answer)'}")
    return 0


if __name__ == "__main__":
    run_main(main)
