"""The cascade, what is measured on it, and its command line.

python -m pytest tests/test_cascade.py
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import beta

import agon
import cascade
from cascade import (
    EVAL_SEED,
    Stage,
    draft_stage,
    eval_sampling,
    evaluate,
    exchange_rates,
    exchange_records,
    format_exchange,
    format_table,
    saved_direction,
    shuffled_reads,
    table_row,
    telling_exchanges,
)
from model import ADAPTERS, load_pair
from reward import Problem, extract_answer, load_problems
from rollout import PREFILL_TOKENS, Rollouts, challenge_prompt, draft_prompt, sample, summarize

TEST, VALIDATION = load_problems("congruence", "test", 12), load_problems("congruence", "validation", 6)
SAMPLING = {"max_tokens": 36, "temperature": 0.6, "seed": EVAL_SEED}


@pytest.fixture(scope="module")
def pair():
    """A tiny pair whose two policies differ clearly. Module scope: nothing here trains it."""
    return load_pair("tiny", b_init_std=0.1, device="cpu")


def response(answer: str | None) -> str:
    return "<think>05" if answer is None else f"<think>05</think>05<answer>{answer}</answer>"


def made_up_stage(correct, answers=None, adapter="A", completions=None, prompts=None) -> Stage:
    """Outcomes without a model: row r answers problem r."""
    rows = len(correct)
    texts = [response(a) for a in (answers or ["07"] * rows)]
    completions, prompts = completions or [[2, 3]] * rows, prompts or [[1]] * rows
    rollouts = Rollouts(prompts, completions, [True] * rows, [[0.0] * len(c) for c in completions])
    correct, phi = [bool(c) for c in correct], [1.0] * rows
    return Stage(adapter, rollouts, texts, correct, phi, list(range(rows)), ["05"] * rows)


# ---------------------------------------------------------------------------------------------------------------
# The two stages


def test_drafts_stand_problem_by_problem_with_their_group_ids(pair):
    drafts = draft_stage(pair, "A", TEST[:3], 4, **SAMPLING)
    assert drafts.group == [0] * 4 + [1] * 4 + [2] * 4
    assert drafts.rollouts.prompts == [draft_prompt(pair.tokenizer, TEST[g].question) for g in drafts.group]
    assert len(drafts.texts) == len(drafts.correct) == len(drafts.phi) == 12
    assert len(set(drafts.texts)) > 3, "the N drafts of one problem are N samples, not one repeated"


def test_each_row_is_graded_against_its_own_problem(pair, monkeypatch):
    graded = []
    monkeypatch.setattr(cascade, "is_correct", lambda problem, text: graded.append((problem.question, text)) or False)
    drafts = draft_stage(pair, "A", TEST[:3], 2, **SAMPLING)
    assert graded == [(TEST[g].question, text) for g, text in zip([0, 0, 1, 1, 2, 2], drafts.texts, strict=True)]


def test_challenge_row_r_reads_the_summary_of_draft_r(pair):
    drafts, challenges = cascade.cascade(pair, TEST[:3], "A", "B", 4, **SAMPLING)
    assert challenges.group == drafts.group
    assert challenges.summaries == [summarize(text) for text in drafts.texts]
    assert len(set(challenges.summaries)) > 3, "summaries that are all alike could not show a mix-up"
    expected = [
        challenge_prompt(pair.tokenizer, TEST[g].question, summarize(text))
        for g, text in zip(drafts.group, drafts.texts, strict=True)
    ]
    assert challenges.rollouts.prompts == expected, "a challenger reads its own draft, of its own problem"


def test_each_stage_is_sampled_by_its_own_adapter(pair):
    drafts, challenges = cascade.cascade(pair, TEST[:4], "B", "A", 2, **SAMPLING)
    assert (drafts.adapter, challenges.adapter) == ("B", "A")
    alone = sample(pair, "B", [draft_prompt(pair.tokenizer, p.question) for p in TEST[:4]], 2, **SAMPLING)
    again = sample(pair, "A", challenges.rollouts.prompts, 1, **SAMPLING)
    other = sample(pair, "B", challenges.rollouts.prompts, 1, **SAMPLING)
    assert drafts.rollouts.completions == alone.completions
    assert challenges.rollouts.completions == again.completions
    assert challenges.rollouts.completions != other.completions, "the two policies are too alike for this test"


def test_the_same_seed_gives_the_same_exchange(pair):
    first, second = (cascade.cascade(pair, TEST[:4], **SAMPLING) for _ in range(2))
    assert [s.texts for s in first] == [s.texts for s in second]
    other = cascade.cascade(pair, TEST[:4], **{**SAMPLING, "seed": 5})
    assert [s.texts for s in first] != [s.texts for s in other]


# ---------------------------------------------------------------------------------------------------------------
# Measuring


@pytest.mark.parametrize(("hits", "total"), [(0, 10), (10, 10), (3, 10), (0, 1), (1, 1), (57, 500), (499, 500)])
def test_the_interval_is_that_of_clopper_and_pearson(hits, total):
    row = table_row("x", made_up_stage([1] * hits + [0] * (total - hits)))
    low = beta.ppf(0.025, hits, total - hits + 1) if hits else 0.0
    high = beta.ppf(0.975, hits + 1, total - hits) if hits < total else 1.0
    assert (row["low"], row["high"]) == pytest.approx((low, high), abs=1e-9), "exact, two-sided, 95 %"
    assert row["pass@1"] == hits / total
    assert row["problems"] == total


def test_a_row_scores_the_last_stage_and_counts_the_tokens_of_both():
    drafts = made_up_stage([1, 1, 0, 0], completions=[[1] * 10, [1] * 20, [1] * 10, [1] * 20], prompts=[[1] * 4] * 4)
    challenges = made_up_stage([1, 0, 0, 0], completions=[[1] * 3] * 4, prompts=[[1] * 6, [1] * 8] * 2)
    row = table_row("cascade", drafts, challenges)
    assert row["pass@1"] == 0.25, "the challenger's answer is the cascade's answer"
    assert (row["draft_tokens"], row["prefill_tokens"], row["final_tokens"]) == (15.0, 11.0, 3.0)


def test_a_row_of_one_stage_has_no_draft_and_no_exchange():
    row = table_row("alone", made_up_stage([1, 0], completions=[[1] * 5, [1] * 7], prompts=[[1] * 4] * 2))
    assert (row["draft_tokens"], row["prefill_tokens"], row["final_tokens"]) == (0.0, 4.0, 6.0)
    assert row["fix"] is row["keep"] is row["copy"] is None


def test_fix_and_keep_split_by_whether_the_draft_was_right():
    drafts, challenges = made_up_stage([0, 0, 0, 1, 1]), made_up_stage([1, 0, 0, 1, 0])
    rates = exchange_rates(drafts, challenges)
    assert rates["fix"] == pytest.approx(1 / 3), "conversions among wrong drafts"
    assert rates["keep"] == 0.5, "kept answers among right drafts"


@pytest.mark.parametrize(
    ("draft_right", "draft", "challenge", "copy"),
    [
        ([0], ["07"], ["07"], 1.0),
        ([0], ["07"], ["08"], 0.0),
        ([0, 0], ["07", "07"], [" 07 ", "03"], 0.5),  # spaces are no difference
        ([1], ["07"], ["07"], None),  # agreement on a right answer proves nothing
        ([0], [None], ["07"], None),  # there was no answer to repeat
        ([0], [None], [None], None),  # nor do two missing answers agree
        ([0, 0], ["07", "07"], ["07", None], 0.5),  # no answer is no copy
        ([1, 0, 0, 0], ["01", "02", None, "04"], ["01", "02", "03", "05"], 0.5),
    ],
)
def test_copy_counts_repeated_wrong_answers_alone(draft_right, draft, challenge, copy):
    drafts, challenges = made_up_stage(draft_right, draft), made_up_stage([0] * len(draft), challenge)
    assert exchange_rates(drafts, challenges)["copy"] == copy


def test_a_rate_over_nothing_is_none_and_not_zero():
    all_right, all_wrong = made_up_stage([1, 1]), made_up_stage([0, 0], [None, None])
    assert exchange_rates(all_right, all_right) == {"fix": None, "keep": 1.0, "copy": None}
    assert exchange_rates(all_wrong, all_right) == {"fix": 1.0, "keep": None, "copy": None}


def made_up_evaluation(monkeypatch, hits: dict, policies=ADAPTERS) -> dict:
    """evaluate() where direction d answers hits[d] problems of ("test", "validation") right."""

    def draft(pair, drafter, problems, n=1, **sampling):
        return made_up_stage([0] * len(problems), adapter=drafter)

    def challenge(pair, challenger, problems, drafts, reads=(), **sampling):
        right = hits.get((drafts.adapter, challenger), (0, 0))[0 if problems is TEST else 1]
        right = 0 if reads else right  # summaries of other problems help nobody
        return made_up_stage([1] * right + [0] * (len(problems) - right), adapter=challenger)

    monkeypatch.setattr(cascade, "draft_stage", draft)
    monkeypatch.setattr(cascade, "challenge_stage", challenge)
    return evaluate(SimpleNamespace(rival=None), TEST, VALIDATION, policies)


def test_the_direction_is_picked_on_validation_and_not_on_test(monkeypatch):
    result = made_up_evaluation(monkeypatch, {("A", "B"): (10, 2), ("B", "A"): (4, 5)})
    assert result["direction"] == "B>A", "the better direction of the test set was reported: that is fitting the test"
    by_name = {row["name"]: row for row in result["rows"]}
    assert by_name["cascade A>B"]["pass@1"] == 10 / 12, "scores are those of the test problems"
    assert (by_name["cascade A>B"]["validation"], by_name["cascade B>A"]["validation"]) == (2 / 6, 5 / 6)
    assert (by_name["cascade A>B"]["picked"], by_name["cascade B>A"]["picked"]) == (False, True)


def test_a_tie_on_validation_goes_to_a_first(monkeypatch):
    assert made_up_evaluation(monkeypatch, {("A", "B"): (1, 3), ("B", "A"): (9, 3)})["direction"] == "A>B"


def test_a_pair_gets_six_rows_and_a_single_policy_four(monkeypatch):
    names = [row["name"] for row in made_up_evaluation(monkeypatch, {})["rows"]]
    assert names == ["zero-shot", "untrained cascade", "A alone", "B alone", "cascade A>B", "cascade B>A"]
    single = made_up_evaluation(monkeypatch, {}, ("A",))
    assert [row["name"] for row in single["rows"]] == ["zero-shot", "untrained cascade", "A alone", "cascade A>A"]
    assert single["direction"] == "A>A"


def timeless(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def test_the_baselines_are_the_bare_base_whatever_the_adapters_hold():
    pair = load_pair("tiny", device="cpu")
    before = timeless(evaluate(pair, TEST, VALIDATION, **SAMPLING)["rows"])
    with torch.no_grad():
        for name in ADAPTERS:
            for p in pair.parameters[name].values():
                p.normal_(0.0, 0.5)
    after = timeless(evaluate(pair, TEST, VALIDATION, **SAMPLING)["rows"])
    assert before[:2] == after[:2], "zero-shot and the untrained cascade ran with an adapter on"
    assert before[2:] != after[2:]


def test_sampling_and_evaluation_touch_no_global_generator(pair):
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    evaluate(pair, TEST[:4], VALIDATION[:2], **SAMPLING)
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert before == after, "evaluating now and then would change the training run"


def test_evaluation_between_two_samples_changes_neither(pair):
    prompts = [draft_prompt(pair.tokenizer, p.question) for p in TEST]

    def two_samples(between):
        first = sample(pair, "A", prompts, 2, max_tokens=36, seed=1)
        between()
        return first.completions, sample(pair, "B", prompts, 2, max_tokens=36, seed=2).completions

    plain = two_samples(lambda: None)
    assert two_samples(lambda: evaluate(pair, TEST[:3], VALIDATION[:2], **SAMPLING)) == plain


def test_sampling_leaves_the_global_seed_without_effect(pair):
    torch.manual_seed(1)
    first = cascade.cascade(pair, TEST[:3], **SAMPLING)[1].texts
    torch.manual_seed(2)
    assert cascade.cascade(pair, TEST[:3], **SAMPLING)[1].texts == first


def test_shuffled_reads_give_everyone_another_draft():
    for rows in (2, 3, 50):
        reads = shuffled_reads(rows)
        assert sorted(reads) == list(range(rows)), "each summary is dealt once"
        assert all(own != other for own, other in enumerate(reads)), "none is its own"
    assert shuffled_reads(50) == shuffled_reads(50) != shuffled_reads(50, seed=1)


def test_a_challenge_with_given_reads_sees_another_draft_and_answers_its_own_problem(pair):
    drafts = draft_stage(pair, "A", TEST, **SAMPLING)
    reads = shuffled_reads(len(TEST))
    challenges = cascade.challenge_stage(pair, "B", TEST, drafts, reads, **SAMPLING)
    assert challenges.group == drafts.group
    assert challenges.rollouts.prompts == [
        challenge_prompt(pair.tokenizer, TEST[r].question, summarize(drafts.texts[a])) for r, a in enumerate(reads)
    ]


def test_rates_and_rewards_go_by_the_draft_that_was_read():
    drafts, challenges = made_up_stage([0, 1, 1], ["02", "05", "06"]), made_up_stage([1, 0, 1], ["06", "02", "07"])
    challenges.reads = [2, 0, 1]
    assert exchange_rates(drafts, challenges) == {"fix": 0.0, "keep": 1.0, "copy": 1.0}
    assert cascade.challenge_rewards(drafts, challenges) == [2.5, 0.5, 2.5]
    challenges.reads = [0, 0, 0]
    assert exchange_rates(drafts, challenges) == {"fix": 2 / 3, "keep": None, "copy": 1 / 3}
    assert cascade.challenge_rewards(drafts, challenges) == [3.5, 0.5, 3.5]
    assert [r["draft"] for r in exchange_records(TEST, drafts, challenges)] == [drafts.texts[0]] * 3


def test_copying_mathematics_is_by_value():
    drafts, challenges = made_up_stage([0, 0], ["1/2", "3"]), made_up_stage([0, 0], ["0.5", "4"])
    assert exchange_rates(drafts, challenges)["copy"] == 0.0
    assert exchange_rates(drafts, challenges, "math")["copy"] == 0.5
    assert cascade.same_answer(None, None, "math") is cascade.same_answer("1", None, "math") is False


def test_a_leaked_answer_shows_in_copy_and_in_the_shuffled_summaries(monkeypatch):
    """A reader that takes what a leak hands it, beside the same reader without a leak, which solves some by itself."""

    def draft(pair, drafter, problems, n=1, **sampling):
        answers = [p.gold if i % 2 else "99" for i, p in enumerate(problems)]  # half are wrong
        return made_up_stage([i % 2 for i in range(len(problems))], answers, drafter)

    def read(pair, challenger, prompts, n, **sampling):
        return Rollouts(prompts, [[2]] * len(prompts), [True] * len(prompts), [[0.0]] * len(prompts))

    def texts(rollouts, pair):
        shown = [prompt.rpartition("leak:")[2] if "leak:" in prompt else "77" for prompt in rollouts.prompts]
        own = [answer if answer != "77" or i % 3 else TEST[i].gold for i, answer in enumerate(shown)]
        return [response(answer) for answer in own]

    monkeypatch.setattr(cascade, "draft_stage", draft)
    monkeypatch.setattr(cascade, "sample", read)
    monkeypatch.setattr(cascade, "challenge_prompt", lambda _, question, summary: question + summary)
    monkeypatch.setattr(Rollouts, "texts", texts)
    pair, rows = SimpleNamespace(rival=None, of=lambda _: SimpleNamespace(tokenizer=None)), {}
    for leak in (False, True):
        monkeypatch.setattr(
            cascade, "summarize", lambda text, leak=leak: "worked" + f" leak:{extract_answer(text)}" * leak
        )
        rows[leak] = next(r for r in evaluate(pair, TEST, TEST)["rows"] if r.get("picked"))
    assert rows[False]["copy"] == 0.0 and rows[False]["shuffled"] == rows[False]["pass@1"] > 0.3
    assert rows[True]["copy"] == 1.0 and rows[True]["pass@1"] == 0.5, "no better than the drafter"
    assert rows[True]["shuffled"] < 0.2, "an answer to another problem is worth nothing"


@pytest.mark.parametrize(
    ("challenge", "expected"),
    [
        ("<think></think>10<answer>11</answer>", "copy"),
        ("<think>11:09;12:14=</think>11<answer>12</answer>", "continue"),
        ("<think>11:09;12:14;", "continue"),
        ("<think>05:09;06:14=</think>05<answer>06</answer>", "re-solve"),
        ("<think>10:09;11:14=</think>10<answer>11</answer>", "re-solve"),
        ("<think>", "re-solve"),
        ("", "re-solve"),
    ],
)
def test_habits_of_the_embedded_task(challenge, expected):
    problem = Problem("05x = 14 (mod 23)", "12")
    assert cascade.habit(problem, response("11"), "10", challenge) == expected


def test_the_candidate_behind_the_last_one_is_the_first():
    problem, wrapped = Problem("05x = 14 (mod 23)", "12"), "<think>01:05;02:10;"
    assert cascade.habit(problem, response("01"), "22", wrapped) == "continue"
    assert cascade.habit(problem, response("01"), "(no summary)", wrapped) == "re-solve"


def test_habits_elsewhere_go_by_the_answer():
    problem = Problem("1/4 + 1/4", "1/2", "math")
    assert cascade.habit(problem, response("1/2"), "...", response("0.5")) == "copy"
    assert cascade.habit(problem, response("1/2"), "...", response("1/4")) == "re-solve"
    assert cascade.habit(problem, "<think>", "...", "<think>") == "re-solve", "no answer at all is no copy"


def test_advantages_of_habits_are_means_over_their_rows():
    texts = ["<think></think>10<answer>11</answer>", "<think>11:00;", "<think></think>10<answer>11</answer>"]
    drafts, challenges = made_up_stage([0] * 3), made_up_stage([0] * 3)
    challenges.texts, challenges.summaries = texts, ["10"] * 3
    got = cascade.habit_advantages([Problem("05x = 14 (mod 23)", "12")] * 3, drafts, challenges, [1.0, -3.0, 2.0])
    assert got == {
        "copy": {"rows": 2, "advantage": 1.5},
        "re-solve": {"rows": 0, "advantage": None},
        "continue": {"rows": 1, "advantage": -3.0},
    }


# ---------------------------------------------------------------------------------------------------------------
# The paper's table


def test_mcnemar_counts_the_problems_that_only_one_solves():
    a, b = [1, 1, 0, 0, 1] + [0] * 8, [1, 0, 1, 0, 1] + [1] * 7 + [0]
    assert cascade.mcnemar(a, b)[:2] == (1, 8)
    assert cascade.mcnemar(a, b)[2] == pytest.approx(2 * (1 + 9) / 2**9)  # both tails of 9 fair coins with at most 1
    assert cascade.mcnemar(a, a) == (0, 0, 1.0)


def test_jaccard_is_the_overlap_of_the_errors():
    assert cascade.jaccard([1, 0, 0, 0], [1, 1, 0, 0]) == 2 / 3
    assert cascade.jaccard([1, 1], [1, 1]) is None


def made_up_run(alone: list[int], forward: list[int], backward: list[int] | None, picked: int, habits=None) -> dict:
    def row(name, outcomes, **more):
        return {
            **{"name": name, "pass@1": sum(outcomes) / len(outcomes), "outcomes": outcomes, "problems": len(outcomes)},
            **{"draft_tokens": 1.0, "prefill_tokens": 2.0, "final_tokens": 3.0, "seconds": 4.0},
            **{"fix": 0.5, "keep": None, "copy": 0.25, "shuffled": 0.1, **more},
        }

    rows = [row("zero-shot", [0] * 4), row("untrained cascade", [0, 0, 0, 1]), row("A alone", alone)]
    rows += [row("B alone", [0, 1, 1, 0])] if backward else []
    rows += [row("cascade A>B" if backward else "cascade A>A", forward, picked=picked == 0)]
    rows += [row("cascade B>A", backward, picked=picked == 1)] if backward else []
    direction = ("A>B", "B>A")[picked] if backward else "A>A"
    step = {"rollouts": 32, "seconds_sampling": 1.0, "seconds_update": 0.5, "habits": habits}
    late = step | {"habits": habits and {h: {"rows": 9, "advantage": 9.0} for h in cascade.HABITS}}
    results = {"rows": rows, "direction": direction, "jaccard": 0.5 if backward else None}
    return {"config": {}, "results": results, "metrics": [step] * 2 + [late] * 14}


def test_the_paper_table_by_hand():
    habits = {"copy": {"rows": 3, "advantage": -1.0}, "re-solve": {"rows": 1, "advantage": 2.0}}
    habits |= {"continue": {"rows": 0, "advantage": None}}
    runs = {
        ("agon", 5): made_up_run([1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], 0, habits),
        ("agon", 6): made_up_run([1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0], 1, habits),
        ("grpo", 5): made_up_run([1, 1, 0, 0], [1, 1, 0, 0], None, 0),
        ("grpo", 6): made_up_run([0, 0, 0, 0], [1, 1, 1, 1], None, 0),
    }
    table = cascade.paper_table(runs, ["zero-shot", "grpo", "two-pass", "moa", "agon", "drafter-alone"], [5, 6])
    rows = {row["name"]: row for row in table["rows"]}
    assert {name: row["by_seed"] for name, row in rows.items()} == {
        "zero-shot": [0.0],
        "grpo": [0.5, 0.0],
        "two-pass": [0.5, 1.0],
        "moa": [0.25],
        "agon": [1.0, 0.75],  # as picked on validation: once the better direction of the test problems, once it too
        "drafter-alone": [0.25, 0.5],  # A at seed 5, B at seed 6
    }
    agon_row = rows["agon"]
    assert agon_row["pass@1"] == 0.875 and agon_row["other_direction"] == (0.5 + 0.0) / 2
    interval = (beta.ppf(0.025, 7, 2), beta.ppf(0.975, 8, 1))
    assert (agon_row["low"], agon_row["high"]) == pytest.approx(interval), "7 of 8, over both seeds"
    assert agon_row["rollouts"] == 16 * 32 and agon_row["train_seconds"] == 16 * 1.5 and rows["moa"]["rollouts"] == 0
    assert agon_row["jaccard"] == 0.5 and rows["grpo"]["jaccard"] is None
    assert agon_row["habits"] == {"copy": -1.0, "re-solve": 2.0, "continue": None}, "the first 2 of 16 steps alone"
    against = {pair["worse"]: pair for pair in table["paired"]}
    assert against["grpo"]["by_seed"] == [0.5, 0.75] and against["grpo"]["seeds_better"] == 2
    assert against["grpo"]["p"] == pytest.approx(2 * 0.5**5), "5 problems that Agon alone solves, none the other way"
    assert against["two-pass"]["by_seed"] == [0.5, -0.25] and against["two-pass"]["seeds_better"] == 1
    assert against["zero-shot"]["by_seed"] == [1.0, 0.75], "what has no seeds stands against each"
    assert [(pair["worse"], pair["better"]) for pair in table["order"]] == [("zero-shot", "grpo")]
    text = cascade.format_paper_table(table)
    assert "| agon | 87.5 (47.3 – 99.7) | 100.0 75.0 | 25.0 | 10.0 | 50 | - | 25 | - | - | - |" in text
    assert "zero-shot < grpo is not established: +25.0 points (+0.0 to +50.0), 1 of 2 seeds" in text
    json.dumps(table)


@pytest.mark.parametrize(
    ("gains", "verdict"), [([8, 9], "appears"), ([8, 0], "is not established"), ([-1, 0], "does not appear")]
)
def test_the_ordering_is_judged_by_its_figures(gains, verdict):
    runs = {}
    for seed, gain in enumerate(gains):
        for method, hits in (("coop", 10), ("agon", 10 + gain)):
            run = runs[method, seed] = made_up_run([1] * 4, [1] * hits + [0] * (30 - hits), [0] * 30, 0)
            run["metrics"] = run["metrics"][:1]
    text = cascade.format_paper_table(cascade.paper_table(runs, ["coop", "agon"], [0, 1]))
    (line,) = [line for line in text.splitlines() if line.startswith("- coop < agon")]
    assert f"- coop < agon {verdict}:" in line and "fix 50 and 50, copy 25 and 25" in line


TINY_RUN = ["--steps", "2", "--problems-per-step", "2", "--group-size", "2", "--train-problems", "8"]
TINY_RUN += ["--eval-problems", "5", "--rollout-rows", "64"]


def test_the_table_trains_what_is_missing_and_what_was_cut(capsys, tmp_path, monkeypatch):
    def run(command, stdout, **how):  # in this process, which has torch imported
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stdout):
            return SimpleNamespace(returncode=agon.main(command[2:]))

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "table"
    (out / "agon-3").mkdir(parents=True)
    (out / "agon-3" / "config.json").write_text("cut")
    command = ["table", "--seeds", "3", "--methods", "zero-shot", "two-pass", "agon", "--out", out, "--jobs", "1"]
    command += TINY_RUN
    done = called(capsys, *command)
    assert done.code == 0 and "| two-pass |" in done.out and "| agon |" in done.out, done.err
    assert (out / "agon-3.cut0" / "config.json").read_text() == "cut", "nothing the user has is lost"
    assert {p.name for p in out.iterdir() if p.suffix != ".log"} == {
        *("agon-3", "agon-3.cut0", "grpo-3", "table.json", "table.md", "table.png")
    }
    rollouts = {row["name"]: row["rollouts"] for row in json.loads((out / "table.json").read_text())["rows"]}
    assert rollouts == {"zero-shot": 0, "two-pass": 2 * 2 * 4, "agon": 2 * 2 * 4}
    before = {p: p.stat().st_mtime_ns for p in out.glob("*/results.json")}
    assert called(capsys, *command).out == done.out
    assert {p: p.stat().st_mtime_ns for p in out.glob("*/results.json")} == before, "what is there is not made again"
    done = called(capsys, *command, "--seeds", "3", "4", "--steps", "1")
    assert done.code == 2 and done.err.splitlines()[-1].endswith("was made with another steps than the first run")
    (out / "agon-3" / "metrics.jsonl").write_text("{")
    assert "agon-3 is damaged" in refused(capsys, *command)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--seeds 1 1", "--seeds"),
        ("--seeds -1", "--seeds"),
        ("--seeds 1 --jobs -1", "--jobs"),
        ("--seeds 1 --methods agon foo", "foo"),
        ("--seeds 1 --seed 2", "--seed"),
        ("--seeds 1 --method=coop", "--method"),
        ("--seeds 1 --methods agon --steps 0", "agon-1"),
        ("--seeds 1 --methods agon --wrong 0", "--wrong"),
        ("", "--seeds"),
    ],
)
def test_a_table_that_cannot_be_made_is_one_line(capsys, tmp_path, flags, named):
    assert named in refused(capsys, "table", *flags.split(), "--out", tmp_path / "table")


# ---------------------------------------------------------------------------------------------------------------
# The table of a run, and its exchanges


def test_the_table_shows_every_row_and_marks_the_picked_direction(monkeypatch):
    result = made_up_evaluation(monkeypatch, {("A", "B"): (3, 1), ("B", "A"): (6, 4)})
    lines = format_table(result).splitlines()
    assert len({len(line) for line in lines[:8]}) == 1, "columns out of line"
    assert {line.count("|") for line in lines[:8]} == {lines[0].count("|")}, "not a Markdown table"
    assert [line.split("|")[1].strip() for line in lines[2:8]] == [
        "zero-shot",
        "untrained cascade",
        "A alone",
        "B alone",
        "cascade A>B",
        "cascade B>A *",
    ]
    assert "25.0 (5.5 - 57.2)" in lines[6], "3 of 12 and its exact interval, in percent"
    assert "12 test problems" in format_table(result)
    assert [line.split("|")[6].strip() for line in lines[2:8]] == ["-", "0.0", "-", "-", "0.0", "0.0"], "shuffled"
    assert lines[-1].endswith("both get 100 % wrong."), "the made-up policies are wrong everywhere when alone"


def test_a_record_holds_the_exchange_and_both_rewards():
    drafts, challenges = made_up_stage([0, 1], ["02", "05"], "A"), made_up_stage([1, 1], ["03", "05"], "B")
    conversion, kept = exchange_records(TEST, drafts, challenges)
    assert conversion["problem"] == TEST[0].question and conversion["gold"] == TEST[0].gold
    assert (conversion["drafter"], conversion["challenger"]) == ("A", "B")
    assert (conversion["draft"], conversion["challenge"]) == (response("02"), response("03"))
    assert conversion["summary"] == "05"
    assert (conversion["draft_reward"], conversion["challenge_reward"]) == (0.5, 3.5)
    assert (kept["draft_reward"], kept["challenge_reward"]) == (2.5, 2.5)
    assert exchange_records(TEST, drafts, challenges, bonus=0.0)[0]["challenge_reward"] == 2.5


def test_records_of_groups_name_the_problem_of_their_row(pair):
    drafts, challenges = cascade.cascade(pair, TEST[:2], "A", "B", 3, **SAMPLING)
    records = exchange_records(TEST[:2], drafts, challenges)
    assert [r["problem"] for r in records] == [TEST[0].question] * 3 + [TEST[1].question] * 3


def test_three_exchanges_of_different_kinds_are_told_conversion_first():
    outcomes = [(1, 0), (0, 0), (1, 1), (0, 0), (0, 1), (0, 1)]
    drafts, challenges = (made_up_stage([o[i] for o in outcomes]) for i in (0, 1))
    told = telling_exchanges(exchange_records(TEST, drafts, challenges))
    kinds = [(r["draft_correct"], r["challenge_correct"]) for r in told]
    assert kinds == [(False, True), (True, True), (False, False)], "a conversion, a kept answer, a shared failure"
    assert told[0]["problem"] == TEST[4].question, "the first of its kind"
    assert len(telling_exchanges(exchange_records(TEST, drafts, challenges), limit=1)) == 1


def test_fewer_kinds_give_fewer_exchanges():
    stage = made_up_stage([0, 0, 0])
    assert len(telling_exchanges(exchange_records(TEST, stage, stage))) == 1
    assert telling_exchanges([]) == []


def test_an_exchange_is_printed_in_four_lines_with_its_verdicts():
    drafts, challenges = made_up_stage([0], ["02"], "A"), made_up_stage([1], ["03"], "B")
    (record,) = exchange_records(TEST, drafts, challenges)
    problem, draft, shown, challenge = format_exchange(record).splitlines()
    assert problem.startswith("problem ") and TEST[0].question in problem
    assert draft.startswith("draft ") and response("02") in draft and draft.endswith("wrong, reward 0.5")
    assert shown.split() == ["shown", "05"]
    assert challenge.startswith("challenge B") and challenge.endswith("right, reward 3.5")
    assert "\033[" not in format_exchange(record) and "\033[32m" in format_exchange(record, colour=True)


# ---------------------------------------------------------------------------------------------------------------
# The command line, on a run folder written by agon.py


def few_problems(name, split="train", limit=None, seed=0, **given):
    return load_problems(name, split, {"test": 12, "validation": 6}.get(split, limit), seed, **given)


@pytest.fixture(autouse=True)
def small_splits(monkeypatch):
    monkeypatch.setattr("cascade.load_problems", few_problems)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two steps. Copy it before changing it."""
    folder = tmp_path_factory.mktemp("cascade") / "run"
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr("cascade.load_problems", few_problems)
        flags = "--steps 2 --problems-per-step 6 --group-size 4 --lr 0.01 --out"
        assert agon.main([*flags.split(), str(folder)]) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def called(capsys, *argv) -> SimpleNamespace:
    try:
        code = cascade.main([str(a) for a in argv])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return SimpleNamespace(code=code, out=out, err=err)


def refused(capsys, *argv) -> str:
    """Demand exit code 2 and one line on stderr, and return that line."""
    done = called(capsys, *argv)
    assert done.code == 2, f"a user's mistake must exit with 2, not {done.code}"
    assert done.out == ""
    assert len(done.err.splitlines()) == 1 and done.err.startswith("cascade.py"), f"not one plain line: {done.err!r}"
    return done.err


def test_ask_prints_the_whole_exchange(capsys, finished):
    done = called(capsys, "ask", "14x = 9 (mod 19)", "--run", finished)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["problem", "draft", "shown", "challenge", "answer"]
    assert "14x = 09 (mod 19)" in done.out and "(answer 02)" in done.out


def test_ask_answers_what_the_challenger_answered(capsys, finished):
    lines = called(capsys, "ask", "14x = 9 (mod 19)", "--run", finished).out.splitlines()
    answer = extract_answer(lines[3])
    expected = "(none: the challenge never closed its answer)" if answer is None else answer
    assert lines[4].split(maxsplit=1)[1] == expected


def test_ask_is_repeatable_and_follows_its_seed(capsys, finished):
    def draft(seed):
        return called(capsys, "ask", "14x = 9 (mod 19)", "--run", finished, "--seed", seed).out

    assert draft(1) == draft(1)
    assert len({draft(seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("direction", ["A>B", "B>A", "A>A", "B>B"])
def test_ask_obeys_the_direction(capsys, finished, direction):
    lines = called(capsys, "ask", "14x = 9 (mod 19)", "--run", finished, "--direction", direction).out.splitlines()
    assert ">".join((lines[1].split()[1], lines[3].split()[1])) == direction


def test_ask_follows_the_picked_direction(capsys, run):
    for direction in ("A>B", "B>A"):
        (run / "results.json").write_text(json.dumps({"direction": direction}))
        lines = called(capsys, "ask", "14x = 9 (mod 19)", "--run", run).out.splitlines()
        assert (lines[1].split()[1], lines[3].split()[1]) == tuple(direction.split(">"))


def test_ask_serves_a_run_that_was_interrupted_before_its_evaluation(capsys, run):
    (run / "results.json").unlink()
    assert called(capsys, "ask", "14x = 9 (mod 19)", "--run", run).code == 0


def test_eval_prints_the_table_of_the_run_again(capsys, finished):
    done = called(capsys, "eval", "--run", finished)
    assert done.code == 0
    saved = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    assert done.out.strip() == format_table(saved).strip(), (
        "same adapters, problems and seed must give the same table: saving or loading changed the policies"
    )


def test_eval_of_a_grpo_run_has_its_four_rows(capsys, run):
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (run / "config.json").write_text(json.dumps({**config, "method": "grpo"}))
    out = called(capsys, "eval", "--run", run).out
    assert "cascade A>A *" in out and "B alone" not in out


def test_evaluation_samples_as_the_settings_say_and_from_its_own_seed():
    settings = {"max_tokens": 9, "temperature": 1.0, "top_p": 0.8, "seed": 4, "rollout_rows": 7, "prompt_tokens": 30}
    settings |= {"eval_temperature": 0.3, "eval_top_p": 0.7}
    expected = {"max_tokens": 9, "temperature": 0.3, "top_p": 0.7, "max_rows": 7, "seed": EVAL_SEED}
    expected["max_cache_tokens"] = 7 * 40 + PREFILL_TOKENS  # columns come in eights
    assert eval_sampling(settings) == expected


@pytest.mark.parametrize("name", ["numbers.jsonl", "with a direction"])
def test_eval_on_another_task_keeps_the_saved_direction(capsys, run, tmp_path, monkeypatch, name):
    """Its problems may come without a validation split, so nothing is picked there."""
    (run / "results.json").write_text(json.dumps({"direction": "B>A"}))
    file = tmp_path / "numbers.jsonl"
    file.write_text("\n".join(json.dumps({"question": f"{i:02d}x", "answer": str(i)}) for i in range(200)))
    monkeypatch.setattr("cascade.load_problems", load_problems)
    out = called(capsys, "eval", "--run", run, "--task", file, "--eval-problems", "5").out
    assert "cascade B>A *" in out and "cascade A>B *" not in out and "5 test problems" in out


def test_eval_of_a_task_that_is_not_there_is_refused(capsys, run, tmp_path):
    assert "nowhere.jsonl" in refused(capsys, "eval", "--run", run, "--task", tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    "text",
    [None, "", "{not json", "[]", "null", "3", "{}", '{"direction": 3}', '{"direction": "A"}', '{"direction": "C>D"}'],
)
def test_a_missing_or_damaged_result_falls_back_to_a_first(tmp_path, text):
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    assert saved_direction(tmp_path, {"method": "agon"}) == ("A", "B")
    assert saved_direction(tmp_path, {"method": "grpo"}) == ("A", "A")


def test_a_saved_direction_is_read(tmp_path):
    (tmp_path / "results.json").write_text('{"direction": "B>A"}')
    assert saved_direction(tmp_path, {"method": "agon"}) == ("B", "A")


@pytest.mark.parametrize("command", [("ask", "14x = 9 (mod 19)"), ("eval",)], ids=["ask", "eval"])
@pytest.mark.parametrize("kind", ["missing", "empty", "a file"])
def test_what_is_no_run_folder_is_refused_in_one_line(capsys, tmp_path, command, kind):
    folder = tmp_path / "run"
    if kind == "empty":
        folder.mkdir()
    elif kind == "a file":
        folder.write_text("")
    assert str(folder) in refused(capsys, *command, "--run", folder)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{not json",
        "[]",
        "3",
        "null",
        '"text"',
        "{}",
        '{"base": "tiny"}',
    ],
)
def test_a_damaged_config_is_refused_in_one_line(capsys, run, text):
    (run / "config.json").write_text(text)
    assert "config.json" in refused(capsys, "eval", "--run", run)


def test_a_config_that_is_not_text_is_refused_in_one_line(capsys, run):
    (run / "config.json").write_bytes(b"\xff\xfe\x00\x81")
    assert "config.json" in refused(capsys, "eval", "--run", run)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("method", "foo"),
        ("threads", 0),
        ("max_tokens", True),
        ("eval_temperature", -1),
        ("eval_temperature", float("nan")),
        ("eval_top_p", 0),
        ("base", 5),
        ("base", None),
        ("task", "poetry"),
        ("task", 3),
        ("max_tokens", "many"),
        ("eval_temperature", None),
        ("eval_temperature", "warm"),
        ("threads", "many"),
    ],
)
def test_a_config_with_a_value_of_the_wrong_kind_is_refused_in_one_line(capsys, run, key, value):
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    (run / "config.json").write_text(json.dumps({**config, key: value}))
    refused(capsys, "ask", "14x = 9 (mod 19)", "--run", run)


def test_a_missing_policy_is_refused_in_one_line(capsys, run):
    shutil.rmtree(run / "B")
    assert str(run / "B") in refused(capsys, "eval", "--run", run)


@pytest.mark.parametrize("keep", [0, 4, 1000])
def test_a_truncated_adapter_is_refused_in_one_line(capsys, run, keep):
    weights = run / "A" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert str(run / "A") in refused(capsys, "eval", "--run", run)


def test_a_missing_adapter_file_is_refused_in_one_line(capsys, run):
    (run / "B" / "adapter_model.safetensors").unlink()
    assert str(run / "B") in refused(capsys, "ask", "14x = 9 (mod 19)", "--run", run)


@pytest.mark.parametrize("command", [("ask", "14x = 9 (mod 19)"), ("eval",)], ids=["ask", "eval"])
@pytest.mark.parametrize("factor", [math.nan, 1e30], ids=["NaN weights", "huge weights"])
def test_a_diverged_policy_is_reported_in_one_line(capsys, run, command, factor):
    for name in ADAPTERS:
        weights = load_file(run / name / "adapter_model.safetensors")
        save_file({k: w * factor for k, w in weights.items()}, run / name / "adapter_model.safetensors")
    assert "finite" in refused(capsys, *command, "--run", run)


@pytest.mark.parametrize(
    "problem",
    ["hello", "", "14x = 9", "14x = 9 (mod 20)", "1x = 9 (mod 19)", "14x = 0 (mod 19)", "19x = 9 (mod 19)"],
)
def test_what_is_no_problem_is_refused_in_one_line(capsys, finished, problem):
    refused(capsys, "ask", problem, "--run", finished)


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["sing"],
        ["ask", "--run", "x"],
        ["eval"],
        ["eval", "--run"],
        ["eval", "--run", "x", "--direction", "A>B"],
        ["ask", "14x = 9 (mod 19)", "--run", "x", "--direction", "A>C"],
        ["eval", "--run", "x", "--seed", "one"],
    ],
)
def test_a_bad_command_line_is_refused_in_one_line(capsys, argv):
    refused(capsys, *argv)


def test_a_negative_seed_is_refused_in_one_line(capsys, finished):
    refused(capsys, "ask", "14x = 9 (mod 19)", "--run", finished, "--seed", "-1")


def test_as_a_process_a_mistake_is_exit_code_2_and_one_line(tmp_path):
    command = [sys.executable, cascade.__file__, "ask", "14x = 9 (mod 19)", "--run", "nowhere"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1 and "nowhere" in done.stderr, done.stderr
    assert done.stdout == ""


def test_a_reader_that_hangs_up_early_sees_no_traceback(finished):
    """cascade.py ask ... | true"""
    command = [sys.executable, cascade.__file__, "ask", "14x = 9 (mod 19)", "--run", str(finished)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 141 and errors == ""


def test_programs_are_graded_at_the_same_time_and_in_order(monkeypatch):
    texts, together, most = ["right", "wrong", "right", "wrong"], [], []

    def slow(problem, text):
        together.append(text)
        most.append(len(together))
        time.sleep(0.2)
        together.remove(text)
        return text == problem.gold

    monkeypatch.setattr(cascade, "is_correct", slow)
    monkeypatch.setattr(cascade.os, "cpu_count", lambda: 4)
    for kind, at_once in (("code", 4), ("math", 1)):
        most.clear()
        pair, rollouts = SimpleNamespace(of=lambda adapter: None), SimpleNamespace(texts=lambda pair: texts)
        stage = cascade.grade(pair, "A", rollouts, [Problem("q", "right", kind)], [0] * 4)
        assert stage.correct == [True, False, True, False]
        assert max(most) == at_once
