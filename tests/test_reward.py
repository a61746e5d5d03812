"""The rules of reward.py: what counts as an answer, what it pays, and the built-in task.

Run:  pytest tests/test_reward.py
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward import (
    MODULI,
    Problem,
    challenge_reward,
    congruence,
    congruence_correct,
    draft_reward,
    extract_answer,
    format_score,
    is_correct,
    load_problems,
)

SPLITS = {"train": 408, "validation": 100, "test": 500}
ALL = [problem for split in SPLITS for problem in load_problems("congruence", split)]


# ---------------------------------------------------------------------------------------------------------------
# extract_answer

EXTRACT = [
    ("the plain case", "<think>x</think>summary<answer>42</answer>", "42"),
    ("opening think tag optional: a template may have written it", "x</think>\n<answer>42</answer>", "42"),
    ("a block inside the thought is ignored", "<think><answer>42</answer></think>no block", None),
    ("the block after the thought wins over one inside", "<think><answer>42</answer></think><answer>43</answer>", "43"),
    ("the LAST </think> ends the thought", "<think>a</think><answer>1</answer></think><answer>2</answer>", "2"),
    ("a block before the last </think> is inside the thought", "a</think><answer>1</answer> b</think> c", None),
    ("no </think>: no answer, whatever stands there", "<think><answer>42</answer>", None),
    ("no tags at all: prose is never graded", "<think>x</think>The answer is 42. \\boxed{42}", None),
    ("the same with words in front", "<think>it may well be <answer>42</answer>", None),
    ("no thought, but a block", "<answer>42</answer>", None),
    ("conflicting blocks: the last one", "</think><answer>41</answer><answer>42</answer><answer>43</answer>", "43"),
    ("prose after the block is not graded", "</think><answer>42</answer> Note that 43 would be wrong.", "42"),
    ("special token after the block", "</think><answer>42</answer><|im_end|>", "42"),
    ("a block never closed is not complete", "</think><answer>42", None),
    ("the last COMPLETE block", "</think><answer>42</answer> or maybe <answer>43", "42"),
    ("closing tag only", "</think>42</answer>", None),
    ("closing before opening", "</think></answer>42<answer>", None),
    ("nested opening tags: the inner block", "</think><answer>1<answer>2</answer>", "2"),
    ("prose that quotes the opening tag", "</think>I write <answer> and then: <answer>42</answer>", "42"),
    ("prose that quotes both tags before", "</think>It goes into <answer></answer>. <answer>42</answer>", "42"),
    ("empty block is an empty answer, not None", "</think><answer></answer>", ""),
    ("less-than signs inside", "</think><answer>0 < x < 5</answer>", "0 < x < 5"),
    ("newlines inside are kept", "</think><answer>\n  42\n</answer>\n", "\n  42\n"),
    ("a tag glued to text", "x</think>y<answer>4</answer>z", "4"),
    ("empty response", "", None),
]


@pytest.mark.parametrize("response, answer", [pytest.param(r, a, id=name) for name, r, a in EXTRACT])
def test_answer_is_the_last_complete_block_after_the_last_closed_thought(response, answer):
    assert extract_answer(response) == answer


def quickest(function, *args) -> float:
    """Best of five, in seconds: the machine may be busy."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(*args)
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("tag", ["<answer>", "</answer>", "<think>", "</think>", "<answer></answer>", "<", "\n"])
@pytest.mark.parametrize("shape", ["{}", "x</think>{}", "x</think>{}</answer>", "x</think><answer>{}", "{}</think>x"])
def test_reading_a_policy_that_loops_on_a_tag_takes_linear_time(tag, shape):
    response = shape.replace("{}", tag * 8000)
    for read in (extract_answer, format_score):
        assert quickest(read, response) < 0.05, f"{read.__name__} stalls the step on 8,000 times {tag!r}"


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "42", " ", "a < b", "\n"]), max_size=12
    ).map("".join)
)
def test_extracted_answer_always_stands_between_tags_after_the_thought(response):
    answer = extract_answer(response)
    if answer is not None:
        tail = response.rsplit("</think>", 1)[1]
        assert "<answer>" + answer + "</answer>" in tail
        assert "<answer>" not in answer, "not the innermost block"
    else:
        tail = response.rsplit("</think>", 1)[1] if "</think>" in response else ""
        assert "</answer>" not in tail.partition("<answer>")[2], "a complete block was overlooked"


# ---------------------------------------------------------------------------------------------------------------
# format_score

GOOD = [
    "<think>x</think>summary<answer>42</answer>",
    "x</think>summary<answer>42</answer>",  # the template opened the thought
    "<think></think><answer></answer>",  # phi judges the form alone
    "  <think>x</think>\n\nseveral\nlines\n<answer>\n42\n</answer>\n",
    "<think>a < b, </b>, \\boxed{1}</think><answer>0 < x < 5</answer>",
]
BAD = [
    ("no thought", "<answer>42</answer>"),
    ("thought never closed", "<think>x<answer>42</answer>"),
    ("no block", "<think>x</think>42"),
    ("something after the block", "<think>x</think><answer>42</answer> done"),
    ("special token after the block", "<think>x</think><answer>42</answer><|end|>"),
    ("two blocks", "<think>x</think><answer>42</answer><answer>42</answer>"),
    ("two thoughts", "<think>x</think><think>y</think><answer>42</answer>"),
    ("thought closed twice", "<think>x</think>y</think><answer>42</answer>"),
    ("thought opened twice", "<think><think>x</think><answer>42</answer>"),
    ("text before the thought", "Sure! <think>x</think><answer>42</answer>"),
    ("thought reopened behind", "<think>x</think><think><answer>42</answer>"),
    ("block opened inside the thought", "<think>x<answer></think><answer>42</answer>"),
    ("a whole block inside the thought", "<think><answer>42</answer></think><answer>42</answer>"),
    ("block opened twice", "<think>x</think><answer>41<answer>42</answer>"),
    ("block closed twice", "<think>x</think><answer>42</answer></answer>"),
    ("nested blocks", "<think>x</think><answer><answer>42</answer></answer>"),
    ("block closed before it opens", "<think>x</think></answer>42<answer>"),
    ("block never closed", "<think>x</think><answer>42"),
    ("block never opened", "<think>x</think>42</answer>"),
    ("tags in capitals", "<THINK>x</THINK><ANSWER>42</ANSWER>"),
    ("empty", ""),
]


@pytest.mark.parametrize("response", GOOD)
def test_format_score_is_one_for_the_documented_form(response):
    assert format_score(response) == 1.0


@pytest.mark.parametrize("response", [pytest.param(r, id=name) for name, r in BAD])
def test_format_score_is_zero_for_anything_else(response):
    assert format_score(response) == 0.0


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "42", "x"]), max_size=7).map("".join),
)
def test_full_format_score_implies_a_gradable_answer(response):
    if format_score(response) == 1.0:
        assert extract_answer(response) is not None, "paid for a form that cannot be graded"


# ---------------------------------------------------------------------------------------------------------------
# Rewards, by hand: 2 for right, 1 more where the rival was wrong, 0.5 for the form

#   c(b)   c(a)  phi   Agon  coop
TABLE = [
    (False, False, 0.0, 0.0, 0.0),
    (False, False, 1.0, 0.5, 0.5),
    (False, True, 0.0, 0.0, 0.0),
    (False, True, 1.0, 0.5, 0.5),
    (True, False, 0.0, 3.0, 2.0),
    (True, False, 1.0, 3.5, 2.5),
    (True, True, 0.0, 2.0, 2.0),
    (True, True, 1.0, 2.5, 2.5),
]


@pytest.mark.parametrize("correct, rival_correct, phi, agon, coop", TABLE)
def test_challenge_reward_by_hand(correct, rival_correct, phi, agon, coop):
    assert challenge_reward(correct, rival_correct, phi) == agon, "bonus = 1 is the default and is Agon"
    assert challenge_reward(correct, rival_correct, phi, bonus=1.0) == agon
    assert challenge_reward(correct, rival_correct, phi, bonus=0.0) == coop


@pytest.mark.parametrize("correct, phi, reward", [(False, 0, 0.0), (False, 1, 0.5), (True, 0, 2.0), (True, 1, 2.5)])
def test_draft_reward_by_hand(correct, phi, reward):
    assert draft_reward(correct, phi) == reward


def test_format_weight_scales_only_the_form():
    assert draft_reward(True, 1.0, lam=0.1) == pytest.approx(2.1)
    assert challenge_reward(True, False, 1.0, lam=0.1) == pytest.approx(3.1)
    assert challenge_reward(True, False, 1.0, lam=0.0) == 3.0


def test_copying_never_collects_the_bonus():
    for c in (False, True):  # a copy is right exactly when the rival was
        assert challenge_reward(c, c, 1.0) == challenge_reward(c, c, 1.0, bonus=0.0)


# ---------------------------------------------------------------------------------------------------------------
# The built-in task


def test_there_are_1008_distinct_problems():
    assert len(ALL) == len({p.question for p in ALL}) == 1008
    assert {p.kind for p in ALL} == {"congruence"}


def test_splits_have_their_sizes_and_are_disjoint():
    questions = {split: {p.question for p in load_problems("congruence", split)} for split in SPLITS}
    assert {split: len(q) for split, q in questions.items()} == SPLITS
    assert not questions["train"] & questions["test"], "trained on the test problems"
    assert not questions["train"] & questions["validation"]
    assert not questions["validation"] & questions["test"]


FIRST = {"train": "10x = 04 (mod 17)", "validation": "14x = 03 (mod 17)", "test": "13x = 01 (mod 19)"}


def test_splits_are_the_same_in_every_run():
    """Written down once: a change of order here silently makes old results incomparable."""
    first = {split: load_problems("congruence", split, limit=1)[0].question for split in SPLITS}
    assert first == FIRST
    assert load_problems("congruence", "train") == load_problems("congruence", "train")


def test_another_seed_gives_other_splits_of_the_same_problems():
    other = [p for split in SPLITS for p in load_problems("congruence", split, seed=1)]
    assert sorted(p.question for p in other) == sorted(p.question for p in ALL)
    assert other != ALL


def test_limit_takes_the_first_problems_of_the_split():
    assert load_problems("congruence", "test", limit=7) == load_problems("congruence", "test")[:7]


def test_every_split_holds_every_modulus():
    for split in SPLITS:
        assert {p.question[-3:-1] for p in load_problems("congruence", split)} == {str(p) for p in MODULI}


def test_every_gold_is_the_only_solution_by_brute_force():
    for problem in ALL:
        a, b, p = int(problem.question[:2]), int(problem.question[6:8]), int(problem.question[-3:-1])
        assert problem.question == f"{a:02d}x = {b:02d} (mod {p})"
        assert [x for x in range(p) if a * x % p == b] == [int(problem.gold)], problem


def respond(answer: str) -> str:
    return f"<think>tried</think>05<answer>{answer}</answer>"


@pytest.mark.parametrize("answer", ["07", "7", " 07 ", "\n07\n", "007"])
def test_checker_accepts_the_residue_in_digits(answer):
    assert congruence_correct(respond(answer), "07")


@pytest.mark.parametrize(
    "answer",
    [
        "08", "", " ", "70", "0 7", "07 08", "07, 08", "07 or 08", "7.0", "+7", "-7", "7/1", "0x7", "x = 07",
        "$7$", "[7]", "{7}", "７", "٧", "७", "²", "07\n08", "seven", "00007", "7" * 5000, "24", "26",
    ],
)  # fmt: skip
def test_checker_refuses_everything_else(answer):
    assert not congruence_correct(respond(answer), "07"), "a list, a formula or another spelling scored as 7"


def test_checker_reads_nothing_but_the_block():
    assert not congruence_correct("<think>07</think>07", "07")
    assert not congruence_correct("<think><answer>07</answer></think>", "07")
    assert not congruence_correct("<answer>07</answer>", "07")
    assert not congruence_correct("", "07")


def test_checker_accepts_every_gold_and_no_other_residue():
    for problem in ALL[::7]:
        right = [x for x in range(23) if is_correct(problem, respond(f"{x:02d}"))]
        assert right == [int(problem.gold)]


@pytest.mark.parametrize(
    "text",
    ["14x = 9 (mod 19)", "14x = 09 (mod 19)", " 14 x=9( mod 19 ) \n", "14*x = 9 (mod 19)", "14 * x = 9 (mod  19)"],
)
def test_congruence_reads_the_users_spelling(text):
    assert congruence(text) == Problem("14x = 09 (mod 19)", "02")  # 14 * 2 = 28 = 19 + 9


def test_congruence_reads_every_built_in_question_back():
    assert [congruence(p.question) for p in ALL] == ALL


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "14x = 9", "x = 9 (mod 19)", "14x + 9 (mod 19)", "14x = 9 mod 19", "14y = 9 (mod 19)",
        "-14x = 9 (mod 19)", "1.5x = 9 (mod 19)", "114x = 9 (mod 19)", "14x = 9 (mod 19) please", "14x = 9 (mod 190)",
        "14x = 9 (mod 20)", "13x = 9 (mod 20)", "14x = 9 (mod 29)",
        "14x = 9 (mod 0)", "01x = 9 (mod 19)", "0x = 9 (mod 19)", "19x = 9 (mod 19)",
        "14x = 0 (mod 19)", "14x = 19 (mod 19)", "20x = 9 (mod 19)", "what is 14x = 9 (mod 19)", "<answer>02</answer>",
    ],
)  # fmt: skip
def test_congruence_refuses_what_it_cannot_pose(text):
    with pytest.raises(ValueError) as caught:
        congruence(text)
    assert len(str(caught.value).splitlines()) == 1 and str(caught.value)


@pytest.mark.parametrize("name, split", [("math", "train"), ("", "train"), ("congruence", "valid"), ("congruence", "")])
def test_unknown_names_and_splits_raise_value_error(name, split):
    with pytest.raises(ValueError, match="known:"):
        load_problems(name, split)
