"""The data sets of reward.py: what is read, what is dropped and why, the splits, and what is said of a broken file.

The sample files of tests/data have the columns of the real sets and rows of our own; parquet is made from them here.

Run:  pytest tests/test_data.py
"""

import hashlib
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import reward
from reward import SOURCES, Problem, load_problems

HERE = Path(__file__).parent
SAMPLES, SHARED = HERE / "data", HERE.parents[1] / "shared" / "data"
SPLITS = ("train", "validation", "test")
OURS = {name: [s for s in SPLITS if s in SOURCES[name].splits] for name in SOURCES}


@pytest.fixture(autouse=True)
def quick_and_private(monkeypatch, tmp_path):
    """No maths child, no cache of the user's: whatever the grader would take 10 ms for, this one refuses "@@" only."""
    checked = []
    monkeypatch.setattr(reward, "math_equal", lambda a, g, limit_s=3.0: checked.append((a, g)) or "@@" not in a)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    reward.gradable.cache_clear()
    yield checked
    reward.gradable.cache_clear()


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (SAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def write_parquet(path: Path, rows: list[dict], **options) -> str:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **options)
    return str(path)


def write_lines(path: Path, rows: list, end: str = "\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + end for row in rows), encoding="utf-8", newline="")
    return str(path)


def all_of(name: str, **options) -> list[Problem]:
    """The problems of all splits that are not empty."""
    problems = []
    for split in OURS.get(name, SPLITS):
        try:
            problems += load_problems(name, split, **options)
        except ValueError as error:
            assert "no problem in this split" in str(error)
    return problems


def refusal(*args, **options) -> str:
    """The one line of the ValueError that the call must raise."""
    with pytest.raises(ValueError) as caught:
        load_problems(*args, **options)
    message = str(caught.value)
    assert message and len(message.splitlines()) == 1, f"not one line: {message!r}"
    return message


def split_of(question: str, seed: int = 0) -> str:
    """The rule, written once more in the plain form of the documentation."""
    u = int(hashlib.sha256(f"{seed}\0{question}".encode()).hexdigest(), 16) / 2**256
    return "test" if u < 0.15 else "validation" if u < 0.20 else "train"


def placed(text: str, split: str = "train") -> str:
    """A question that begins with the text and falls into the split."""
    return next(q for q in (f"{text} {n}?" for n in range(1000)) if split_of(q.lower()) == split)


def by_question(problems: list[Problem], words: str) -> list[Problem]:
    return [p for p in problems if words in p.question]


# ---------------------------------------------------------------------------------------------------------------
# DeepMath


def test_deepmath_keeps_difficulty_8_with_gradable_answers():
    kept = all_of("deepmath", data=str(SAMPLES / "deepmath.jsonl"))
    assert {p.gold for p in kept} == {"12", r"\frac{3}{2}", "4", r"\dfrac{1}{2}", r"\text{No solution}"}
    assert {(p.kind, p.tests) for p in kept} == {("math", ())}
    assert len(by_question(kept, "units")) == 1, "the same question with another spacing stands there twice"


GUESSABLE = ["Yes", "no", "TRUE", "false", r"\text{Yes}", r"\textbf{No}", r"$\text{True}$", "Yes.", r"\mathrm{False}"]
GUESSABLE += ["**Yes**", "Yes, by compactness", "No; it is not", '"No"', " yes\n", r"\boxed{\text{No}}"]
UNPROVABLE = ["Proof", r"\text{Proved}", "Q.E.D.", "The proof is complete", "See proof above", "", "  "]
GRADABLE = ["No solution", r"\text{None}", "n", "N_0", "trueness", "yesterday", "42", "T", "o(n)", "0"]


@pytest.mark.parametrize("gold, kept", [(g, False) for g in GUESSABLE + UNPROVABLE] + [(g, True) for g in GRADABLE])
def test_deepmath_drops_guessable_and_unprovable_golds(gold, kept, tmp_path):
    rows = [{**rows_of("deepmath")[0], "question": "What is it?", "final_answer": gold}]
    assert bool(all_of("deepmath", data=write_parquet(tmp_path / "a.parquet", rows))) == kept


@pytest.mark.parametrize(
    "question", ["Prove that 2 = 2.", "  Show that x.", "Please prove or disprove: x.", "DISPROVE x"]
)
def test_deepmath_drops_questions_that_ask_for_a_proof(question, tmp_path):
    rows = [
        {**rows_of("deepmath")[0], "question": question},
        {**rows_of("deepmath")[0], "question": "Proven bound? Find it."},
    ]
    assert [p.question for p in all_of("deepmath", data=write_parquet(tmp_path / "a.parquet", rows))] == [
        rows[1]["question"]
    ]


def test_only_the_named_columns_of_a_parquet_file_are_read(tmp_path):
    """The bytes of every other column are overwritten: whoever reads them fails."""
    import pyarrow.parquet

    rows = [{**row, **{f"r1_solution_{k}": f"{k} is long. " * 4000 for k in (1, 2, 3)}} for row in rows_of("deepmath")]
    path = write_parquet(tmp_path / "train.parquet", rows, compression="none", use_dictionary=False)
    clean = all_of("deepmath", data=path)
    group = pyarrow.parquet.ParquetFile(path).metadata.row_group(0)
    with open(path, "r+b") as file:
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema not in ("question", "final_answer", "difficulty"):
                file.seek(column.data_page_offset)
                file.write(b"\xff" * column.total_compressed_size)
    assert all_of("deepmath", data=path) == clean and clean
    with pytest.raises(OSError):
        pyarrow.parquet.read_table(path)  # or this test would prove nothing


def test_default_sizes_of_deepmath_are_those_of_the_paper(tmp_path, caplog):
    rows = [
        {**rows_of("deepmath")[0], "question": f"What is {n} + 1?", "final_answer": str(n + 1)} for n in range(4200)
    ]
    path = write_parquet(tmp_path / "a.parquet", rows)
    sizes = {split: len(load_problems("deepmath", split, data=path)) for split in SPLITS}
    assert sizes == {"train": 3000, "validation": 100, "test": 300}
    assert not caplog.records, "nothing was dropped and nothing is missing"


# ---------------------------------------------------------------------------------------------------------------
# CodeContests


def test_codecontests_keeps_easy_stdin_problems_with_tests():
    kept = all_of("codecontests", data=str(SAMPLES / "codecontests.jsonl"))
    assert {p.question.split("\n")[0] for p in kept} == {
        "Read two numbers and print their sum.",
        "Print the name that you read, after “hi ”.",
        "For any i from 1 to n print a_i doubled.",
        "Print the larger of the two numbers, if any is positive, and 0 otherwise.",
    }
    assert {(p.kind, p.gold) for p in kept} == {("code", "")}


def test_codecontests_tests_are_public_then_private_then_generated_and_never_in_the_question():
    (problem,) = by_question(all_of("codecontests", data=str(SAMPLES / "codecontests.jsonl")), "print their sum")
    assert problem.tests == (("2 3\n", "5\n"), ("70 7007\n", "7077\n"), ("-1 1\n", "0\n")), "the repeated stdin goes"
    assert "7007" not in problem.question and "7077" not in problem.question
    assert problem.question == rows_of("codecontests")[0]["description"]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json"])
@pytest.mark.parametrize("name", ["deepmath", "codecontests"])
def test_every_form_of_a_local_copy_gives_the_same_problems(name, kind, tmp_path):
    path = tmp_path / f"copy.{kind}"
    if kind == "parquet":
        write_parquet(path, rows_of(name))
    elif kind == "jsonl":
        write_lines(path, rows_of(name))
    else:
        path.write_text(json.dumps(rows_of(name)), encoding="utf-8")
    assert all_of(name, data=str(path)) == all_of(name, data=str(SAMPLES / f"{name}.jsonl")) != []


def table(*pairs: tuple[str, str]) -> dict:
    return {"input": [i for i, _ in pairs], "output": [o for _, o in pairs]}


def contest(tmp_path: Path, public=(), private=(), generated=(), **cells) -> list[Problem]:
    tests = {"public_tests": table(*public), "private_tests": table(*private), "generated_tests": table(*generated)}
    row = {**rows_of("codecontests")[0], **tests, **cells}
    return all_of("codecontests", data=write_lines(tmp_path / "c.jsonl", [row, rows_of("codecontests")[0]]))


def test_tests_are_capped_in_number_and_in_bytes_and_never_cut(tmp_path):
    (many,) = by_question(contest(tmp_path, [(f"{n}", f"{n}") for n in range(30)], description="Many."), "Many")
    assert many.tests == tuple((f"{n}", f"{n}") for n in range(20))
    sizes = [(("é" * 32_001) + "1", "1"), ("x" * 63_998, "é"), ("y" * 63_999, "é"), ("z", "1")]  # bytes, not letters
    (long,) = by_question(contest(tmp_path, sizes, description="Long."), "Long")
    assert [len(i) for i, _ in long.tests] == [63_998, 1]
    (heavy,) = by_question(
        contest(tmp_path, [(f"{n}" * 59_999, "1") for n in range(1, 10)], description="Heavy."), "Heavy"
    )
    assert sum(len(i) + len(o) for i, o in heavy.tests) == 480_000, "512 kB in all"


@pytest.mark.parametrize(
    "cells", [{"input_file": "in.txt"}, {"output_file": "o"}, {"difficulty": 0}, {"difficulty": 7}]
)
def test_codecontests_drops_files_and_other_difficulties(cells, tmp_path):
    assert not by_question(contest(tmp_path, [("1", "1")], description="Drop me.", **cells), "Drop me")


def test_tests_that_do_not_pair_up_drop_the_row_alone(tmp_path, caplog):
    broken = {"input": ["1", "2"], "output": ["1"]}
    assert len(contest(tmp_path, private_tests=broken, description=placed("Broken"))) == 1
    assert "1 problems with broken tests" in caplog.text


@pytest.mark.parametrize("tests", [[], [("1\n", "")], [("1\n", " \n")], [("1 2 ...", "3")], [("1", "1 2...\n")]])
def test_a_row_without_usable_tests_is_dropped_and_counted(tests, tmp_path, caplog):
    assert not by_question(contest(tmp_path, tests, description=placed("Empty")), "Empty")
    assert "1 without a question or tests" in caplog.text


SEVERAL = [
    "If there are several answers, print any of them.", "If there are multiple solutions, you may output any.",
    "Print any valid permutation.", "You can print the numbers in any order.", "Multiple solutions are accepted.",
    "If multiple answers exist, you can print any of them.", "In case of multiple answers, print any one.",
    "If there is more than one solution, print any.", "Note that there may be multiple correct answers.",
    "Any correct answer will be accepted.", "If there are many optimal sequences, find any of them.",
    "Output an arbitrary one.", "There can be several solutions.", "If there exist several such pairs, report any.",
    "Print one of them if there are several ways.", "The answers can be printed in arbitrary order.",
    "Print the k indices. They may be in any order.", "You are allowed to print any such string.",
    "If there are several possible strings, print\nany of them.", "Your program may return any of the answers.",
    "If there are several ways to reach the minimum, output any of them.", "Any of the solutions is fine.",
    "If there are multiple ways to do it, output either of them.", "OUTPUT ANY ONE OF THE POSSIBLE STRINGS",
    "If several plans have the minimal cost, any is good.", "Print\nany  valid plan.",
]  # fmt: skip
ONE = [
    "For any i the value a_i is at most 9.", "Print the sum, if any.", "At any time at most one lamp is on.",
    "You may choose any two adjacent cells.", "There can be any number of spaces in the input.",
    "Do not print any extra spaces.", "Your program must not output any additional text.", "Don't print any prompt.",
    "Print -1 if any of the numbers is negative.", "Is there any way to do that? Print YES or NO.",
    "If there are multiple answers, print the lexicographically smallest one.", "Chef does not like any of them.",
    "If there are several such numbers, print the smallest.", "The edges are given in any order.",
    "You can perform the operations in any order.", "Print YES if there is any solution and NO otherwise.",
    "If there are multiple test cases, print each answer on a line of its own.", "Print them in increasing order.",
    "How many different solutions does it have?", "Several friends share many sweets.", "All answers fit into 64 bits.",
    "Count the number of solutions; there are many solutions, so print it modulo 7.", "Print the answers in order.",
    "Print the result with an absolute error of at most 1e-6.", "Print one of the following words: YES, NO.",
    "Without any doubt the answer fits into 64 bits.", "For each of them print one number.",
]  # fmt: skip


@pytest.mark.parametrize("sentence, several", [(s, True) for s in SEVERAL] + [(s, False) for s in ONE])
def test_statements_that_allow_several_outputs_are_told_from_other_uses_of_any(sentence, several):
    assert reward.any_output(f"Alice has n cards.\n\nOutput\n\nPrint n. {sentence}\n\nExample") == several


# ---------------------------------------------------------------------------------------------------------------
# GSM8K and MATH-500


def test_gsm8k_gold_stands_after_the_mark_without_commas(tmp_path, caplog):
    folder = tmp_path / "gsm8k"
    rows = rows_of("gsm8k_train")
    write_parquet(folder / "main" / "train-00000-of-00001.parquet", rows)
    write_parquet(folder / "main" / "test-00000-of-00001.parquet", rows_of("gsm8k_test"))
    write_parquet(
        folder / "socratic" / "train-00000-of-00001.parquet", [{"question": "Wrong set?", "answer": "#### 1"}]
    )
    test = load_problems("gsm8k", "test", data=str(folder))
    assert {p.gold for p in test} == {"2400", "-7"}, "the hub's own test split is the test split"
    rest = all_of("gsm8k", data=str(folder))
    assert len(rest) == 12 and by_question(rest, "Ann has 32 bags")[0].gold == "1054"
    assert not by_question(rest, "cats"), "an answer without #### has no gold"
    assert "1 without '####'" in caplog.text
    assert not by_question(rest, "Wrong set")


def test_the_last_mark_of_gsm8k_counts(tmp_path):
    path = write_lines(tmp_path / "test.jsonl", [{"question": "Q", "answer": "#### 1 is the first part\n#### $2"}])
    assert [p.gold for p in load_problems("gsm8k", "test", data=path)] == ["$2"]


def test_a_copy_of_gsm8k_must_tell_train_from_test(tmp_path):
    assert "'test' in its name" in refusal("gsm8k", "test", data=str(SAMPLES / "gsm8k_train.jsonl"))
    path = write_lines(tmp_path / "test" / "rows.jsonl", rows_of("gsm8k_test"))
    assert "'train' in its name" in refusal("gsm8k", "train", data=path)
    assert "'test' in its name" in refusal("gsm8k", "test", data=path), "a folder above the copy tells nothing"


def test_math500_is_a_test_set_only():
    assert len(load_problems("math500", "test", data=str(SAMPLES / "math500.jsonl"))) == 2
    for split in ("train", "validation", "valid"):
        assert "(known: test)" in refusal("math500", split, data=str(SAMPLES / "math500.jsonl"))


@pytest.mark.skipif(not (SHARED / "math500.jsonl").exists(), reason="the real sets lie beside the checkout only")
def test_real_math500_and_gsm8k_are_read_whole(caplog):
    math = load_problems("math500", "test", data=str(SHARED / "math500.jsonl"))
    gsm = load_problems("gsm8k", "test", data=str(SHARED / "gsm8k_test_400.jsonl"))
    assert (len(math), len(gsm)) == (500, 400)
    assert not caplog.records
    assert all(re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", p.gold) for p in gsm)


@pytest.mark.skipif(not hasattr(reward, "rational"), reason="needs the grader")
def test_the_real_grader_accepts_plain_golds_and_refuses_broken_ones(monkeypatch, tmp_path):
    monkeypatch.undo()
    golds = ["42", r"\frac{3}{4}", "x^2+1", r"\text{Tuesday}", "(3, 4)", "@@"]
    path = write_lines(tmp_path / "a.jsonl", [{"question": f"Q{n}?", "answer": gold} for n, gold in enumerate(golds)])
    assert {p.gold for p in all_of(path)} == set(golds) - {"@@"}


# ---------------------------------------------------------------------------------------------------------------
# Splits, limits, the check of the golds


def many(name: str, count: int = 400) -> list[dict]:
    """Rows of a named set with distinct questions."""
    row, question = rows_of("gsm8k_train" if name == "gsm8k" else name)[0], SOURCES[name].columns[0]
    return [{**row, question: f"What is {n} + 1?"} for n in range(count)]


def copy_of(name: str, folder: Path, rows: list[dict] | None = None) -> str:
    rows = many(name) if rows is None else rows
    if name == "gsm8k":
        write_parquet(folder / "test.parquet", [{**row, "question": row["question"] + " Say it."} for row in rows[:50]])
    if name == "math500":
        return write_lines(folder / "test.jsonl", rows)
    write_parquet(folder / "train.parquet", rows)
    return str(folder)


@pytest.mark.parametrize("name", ["own", *SOURCES])
def test_splits_are_disjoint_whole_and_shuffled(name, tmp_path):
    data = None if name == "own" else copy_of(name, tmp_path / "copy")
    path = write_lines(tmp_path / "own.jsonl", [{"question": f"What is {n} + 1?", "answer": n + 1} for n in range(400)])
    call = (path,) if name == "own" else (name,)
    got = {s: [p.question for p in load_problems(*call, s, limit=1000, data=data)] for s in OURS.get(name, SPLITS)}
    total = [q for questions in got.values() for q in questions]
    assert len(total) == len(set(total)) == (450 if name == "gsm8k" else 400), "a question is lost or in two splits"
    shares = {"gsm8k": (340, 5, 50), "math500": (0, 0, 400)}.get(name, (290, 8, 40))
    assert all(len(got.get(split, [])) >= least for split, least in zip(SPLITS, shares, strict=True))
    assert all(questions != sorted(questions, key=lambda q: int(q.split()[2])) for questions in got.values())
    again = {s: [p.question for p in load_problems(*call, s, limit=1000, data=data)] for s in got}
    assert again == got
    if name != "math500":
        other = [p.question for p in load_problems(*call, "train", limit=1000, seed=1, data=data)]
        assert set(other) != set(got["train"]), "another seed must give another split"


def test_rows_may_be_shuffled_repeated_and_added_without_moving_a_problem(tmp_path):
    rows = [{"question": f"What is {n}  + 1?", "answer": str(n + 1)} for n in range(200)]
    base = {s: load_problems(write_lines(tmp_path / "a.jsonl", rows), s) for s in SPLITS}
    copies = [{"question": f" what is {n} +\n1? ", "answer": str(n + 1)} for n in range(200)]
    more = rows + copies + [{"question": f"What is {n}  - 1?", "answer": str(n - 1)} for n in range(100)]
    random.Random(0).shuffle(more)
    for split in SPLITS:
        found = load_problems(write_lines(tmp_path / "b.jsonl", more), split)
        assert len({" ".join(p.question.lower().split()) for p in found}) == len(found), "a repeated question"
        plus = [p for p in found if "+" in p.question]
        assert [p.gold for p in plus] == [p.gold for p in base[split]]
    both = load_problems(write_lines(tmp_path / "c.jsonl", more[::-1]), "train")
    assert both == load_problems(write_lines(tmp_path / "b.jsonl", more), "train"), "the order of the rows decides"


def test_repeated_questions_are_counted(tmp_path, caplog):
    path = write_lines(tmp_path / "a.jsonl", [{"question": "One?", "answer": 1}, {"question": "one? ", "answer": 1}])
    assert len(all_of(path)) == 1
    assert "1 of 2 rows dropped: 1 repeated questions" in caplog.text


def test_the_split_is_the_documented_hash(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"question": f"what is {n}?", "answer": n} for n in range(300)])
    for seed in (0, 7):
        for split in SPLITS:
            expected = {f"what is {n}?" for n in range(300) if split_of(f"what is {n}?", seed) == split}
            assert {p.question for p in load_problems(path, split, seed=seed)} == expected


SCRIPT = """
import hashlib, sys, reward
reward.math_equal = lambda a, g, limit_s=3.0: True
calls = [(sys.argv[1], None), ("codecontests", sys.argv[2])]
found = [reward.load_problems(name, split, data=data) for name, data in calls for split in ("train", "test")]
print(hashlib.sha256(repr(found).encode()).hexdigest(), ascii(found[1][0].question))
"""


def test_the_same_list_in_a_fresh_process_whatever_the_hash_seed_and_the_locale(tmp_path):
    own = write_lines(tmp_path / "own.jsonl", [{"question": f"Grüße × {n}?", "answer": "π"} for n in range(50)])
    copy = copy_of("codecontests", tmp_path / "copy", many("codecontests", 40))
    out = []
    for hash_seed, extra in [("1", {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}), ("2", {})]:
        env = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "HF_HOME": str(tmp_path / "hf"),
            "PYTHONPATH": str(HERE.parent),
            **extra,
        }
        done = subprocess.run([sys.executable, "-c", SCRIPT, own, copy], env=env, capture_output=True, timeout=60)
        out.append(done.stdout.decode())
        assert done.returncode == 0, done.stderr.decode()
    assert out[0] == out[1]
    assert r"Gr\xfc\xdfe \xd7 " in out[0]


@pytest.mark.parametrize("limit, count", [(0, 0), (1, 1), (7, 7), (None, 50), (50, 50), (51, 50), (10**9, 50)])
def test_limit_takes_the_first_problems_and_says_when_there_are_fewer(limit, count, tmp_path, caplog):
    rows = [{"question": placed(f"what is {n} and", "validation"), "answer": "1"} for n in range(50)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    found = load_problems(path, "validation", limit)
    assert found == load_problems(path, "validation")[:count] and len(found) == count
    assert ("problems wanted, 50 there" in caplog.text) == (limit is not None and limit > 50)


@pytest.mark.parametrize("name", ["congruence", "gsm8k", "own.jsonl"])
def test_a_negative_limit_is_refused(name):
    assert "-1" in refusal(name, "test", -1)


def test_golds_are_checked_in_order_once_and_only_as_far_as_needed(quick_and_private, tmp_path, caplog):
    rows = [{"question": f"what is {n}?", "answer": "@@" if n % 3 == 0 else str(n % 7)} for n in range(300)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    first = load_problems(path, "train", limit=6)
    assert len(first) == 6 and all(p.gold != "@@" for p in first)
    assert all(a == g for a, g in quick_and_private), "the gold against itself"
    assert len(quick_and_private) == len(set(quick_and_private)) <= 8, "every gold once, and none beyond the limit"
    assert "golds that the grader refuses" in caplog.text
    assert load_problems(path, "train", limit=3) == first[:3], "the limit must not change which golds are good"


def test_every_drop_is_counted_in_one_line(tmp_path, caplog):
    rows = rows_of("deepmath")
    rows = [{**row, "question": placed(row["question"].split()[0] + row["final_answer"])} for row in rows]
    found = load_problems("deepmath", "train", data=write_lines(tmp_path / "a.jsonl", rows))
    record, size = caplog.records
    assert (record.levelno, record.name) == (logging.WARNING, "reward")
    head, _, reasons = record.getMessage().partition(" rows dropped: ")
    assert head == "deepmath train: 9 of 14", "rows of another difficulty are not part of the set"
    assert set(reasons.split(", ")) == {
        "4 yes/no answers", "2 proofs", "1 without a question or an answer", "1 repeated questions",
        "1 golds that the grader refuses",
    }  # fmt: skip
    assert len(found) == 5 and size.getMessage() == "deepmath train: 3,000 problems wanted, 5 there"


def test_an_empty_split_says_how_much_there_is(tmp_path):
    rows = [{"question": placed("Four"), "answer": 4}, {"question": placed("Broken", "test"), "answer": "@@"}]
    path = write_lines(tmp_path / "a.jsonl", rows)
    assert len(load_problems(path, "train")) == 1
    hint = "of 2 rows (a file of your own should have some 100 rows, so that each split gets a few)"
    assert refusal(path, "validation") == f"{path} validation: no problem in this split {hint}"
    assert refusal(path, "test").endswith(hint + "; 1 of 1 rows dropped: 1 golds that the grader refuses")
    assert load_problems(path, "validation", limit=0) == []


# ---------------------------------------------------------------------------------------------------------------
# Local copies and the hub


def hub_folder(tmp_path: Path) -> Path:
    """As `huggingface-cli download` leaves it."""
    folder = tmp_path / "test" / "copy"  # "test" above the copy must not be taken for a split
    write_parquet(folder / "data" / "train-00000-of-00002.parquet", many("deepmath", 30)[:15])
    write_parquet(folder / "data" / "train-00001-of-00002.parquet", many("deepmath", 30)[15:])
    for name in ("README.md", ".gitattributes", "dataset_infos.json", ".cache/huggingface/download/data/x.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def test_a_downloaded_folder_is_read_with_its_sub_folders(tmp_path):
    folder = hub_folder(tmp_path)
    assert len(all_of("deepmath", data=str(folder))) == 30
    write_parquet(
        folder / "data" / "test-00000-of-00001.parquet", [{**many("deepmath", 1)[0], "question": "Other split?"}]
    )
    assert len(all_of("deepmath", data=str(folder))) == 30, "the hub's other splits stay out"
    write_lines(folder / "data" / "more.jsonl", many("deepmath", 2))
    assert "of one type" in refusal("deepmath", data=str(folder))


@pytest.mark.parametrize("make", [lambda p: p / "none.jsonl", lambda p: p / "empty", lambda p: p / "notes.txt"])
def test_a_local_copy_that_is_none_is_refused(make, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    path = str(make(tmp_path))
    assert path in refusal("deepmath", data=path)


def test_a_local_copy_without_a_column_lists_the_columns(tmp_path):
    rows = [{k: v for k, v in row.items() if k != "final_answer"} for row in rows_of("deepmath")]
    for path in (write_parquet(tmp_path / "a.parquet", rows), write_lines(tmp_path / "a.jsonl", rows)):
        message = refusal("deepmath", data=path)
        assert path in message and "no column final_answer" in message and "r1_solution_3" in message


def fake_hub(monkeypatch, rows):
    calls = []

    def load_dataset(*args, **options):
        calls.append((args, options))
        return iter(rows)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    return calls


@pytest.mark.parametrize("name", SOURCES)
def test_the_hub_is_asked_for_a_pinned_revision_and_the_needed_columns(name, monkeypatch):
    calls = fake_hub(monkeypatch, many(name))
    found = load_problems(name, "test", limit=5)
    ((place, options),) = calls
    assert len(found) == 5
    assert place == (SOURCES[name].hub, "main" if name == "gsm8k" else None)
    assert re.fullmatch("[0-9a-f]{40}", options["revision"])
    assert options["split"] == ("test" if name in ("gsm8k", "math500") else "train")
    assert options["streaming"] == (name == "codecontests")
    assert options.get("columns") == (None if name == "math500" else list(SOURCES[name].columns))


@pytest.mark.parametrize("split", SPLITS)
def test_the_stream_is_read_only_until_the_limit(split, monkeypatch):
    read = []
    fake_hub(monkeypatch, (read.append(row) or row for row in many("codecontests", 5000)))
    assert len(load_problems("codecontests", split, limit=4)) == 4
    questions = [" ".join(row["description"].lower().split()) for row in read]
    assert [split_of(q) for q in questions].count(split) == 4 and split_of(questions[-1]) == split
    assert load_problems("codecontests", split, limit=0) == []
    assert len(read) == len(questions), "limit 0 reads nothing"


def test_no_network_is_said_in_one_line_that_names_the_way_out():
    for name in SOURCES:  # conftest.py switches the hub off
        message = refusal(name, "test")
        assert "--data" in message and SOURCES[name].hub in message


def test_no_route_to_the_hub_is_said_within_seconds(tmp_path):
    script = "import reward\ntry: reward.load_problems('gsm8k')\nexcept ValueError as error: print(error)"
    env = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script], env={**env, "PYTHONPATH": str(HERE.parent)}, capture_output=True, timeout=60
    )
    out = done.stdout.decode()
    assert "openai/gsm8k" in out and "--data" in out and len(out.splitlines()) == 1, done.stderr.decode()
    assert time.monotonic() - start < 15, "`datasets` alone retries for 23 s, and for minutes where packets are lost"


@pytest.mark.parametrize("package", ["datasets", "pyarrow"])
def test_a_missing_package_is_named(package, monkeypatch):
    for module in [m for m in sys.modules if m.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    message = refusal("deepmath")
    assert package in message and "pip install" in message and "--data" in message


# ---------------------------------------------------------------------------------------------------------------
# A file of one's own


@pytest.mark.parametrize("question", ["question", "problem", "prompt"])
@pytest.mark.parametrize("answer", ["answer", "final_answer", "gold", "solution"])
def test_columns_go_by_their_usual_names(question, answer, tmp_path):
    rows = [{"id": n, answer: f"{n}", question: f"what is {n}?"} for n in range(20)]
    paths = write_lines(tmp_path / "a.jsonl", rows), write_parquet(tmp_path / "a.parquet", rows)
    for path in paths:
        assert {(p.question, p.gold, p.kind) for p in all_of(path)} == {
            (f"what is {n}?", f"{n}", "math") for n in range(20)
        }


def test_columns_can_be_named_and_the_first_usual_name_wins(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl", [{"q": "Q?", "question": "no", "a": 1, "gold": 2, "answer": 3, "solution": 4}]
    )
    (problem,) = all_of(path)
    assert (problem.question, problem.gold) == ("no", "3")
    (problem,) = all_of(path, question_column="q", answer_column="a")
    assert (problem.question, problem.gold) == ("Q?", "1")
    assert "no column cases" in refusal(path, tests_column="cases"), "not silently graded by another column"
    message = refusal(path, answer_column="b")
    assert "no column b" in message and "q, question, a, gold" in message and path in message


def test_numbers_are_kept_as_they_are_spelled(tmp_path):
    numbers = ["4", "-3.50", "0.1000000000000000055", "1e22", "7" * 5000]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(f'{{"question": "Q{n}", "answer": {x}}}\n' for n, x in enumerate(numbers))
        + '{"question": "Q", "answer": "4"}'
    )
    assert sorted(p.gold for p in all_of(str(path))) == sorted([*numbers, "4"])


def test_gsm8k_marks_mean_nothing_in_a_file_of_ones_own(tmp_path):
    (problem,) = all_of(write_lines(tmp_path / "a.jsonl", [{"question": "Q", "answer": "so #### 18"}]))
    assert problem.gold == "so #### 18"


def test_text_that_looks_like_a_schema_or_a_date_stays_text(tmp_path):
    rows = [
        {"question": "action: string, datetime: timestamp", "answer": "2020-01-01"},
        {"question": "a\u2028b", "answer": "1"},
    ]
    assert {(p.question, p.gold) for p in all_of(write_lines(tmp_path / "a.jsonl", rows))} == {
        (row["question"], row["answer"]) for row in rows
    }


@pytest.mark.parametrize(
    "encoding, end", [("utf-8", "\n"), ("utf-8-sig", "\n"), ("utf-8", "\r\n"), ("utf-8-sig", "\n\n")]
)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_byte_order_marks_line_ends_and_blank_lines_do_not_matter(encoding, end, ending, tmp_path):
    rows = [{"question": f"Größe {n}?", "answer": "π"} for n in range(9)]
    text = (
        json.dumps(rows, ensure_ascii=False)
        if ending == "json"
        else end.join(json.dumps(r, ensure_ascii=False) for r in rows)
    )
    path = tmp_path / f"a.{ending}"
    path.write_text(text, encoding=encoding, newline="")
    assert {p.question for p in all_of(str(path))} == {row["question"] for row in rows}


@pytest.mark.parametrize(
    "tests", [[{"stdin": "1\n", "stdout": "2\n"}, {"stdin": "", "stdout": 3}], table(("1\n", "2\n"), ("", "3"))]
)
def test_rows_with_tests_are_programs(tests, tmp_path):
    rows = [{"question": "Add one.", "tests": tests}, {"question": "Math?", "answer": 7, "tests": None}]
    for path in (write_lines(tmp_path / "a.jsonl", rows), write_lines(tmp_path / "b.jsonl", rows[::-1])):
        assert set(all_of(path)) == {
            Problem("Add one.", "", "code", (("1\n", "2\n"), ("", "3"))),
            Problem("Math?", "7", "math"),
        }
    rows = [{"question": "Add one.", "cases": tests, "answer": "ignored"}]
    assert all_of(write_lines(tmp_path / "c.jsonl", rows), tests_column="cases")[0].kind == "code"


def test_a_program_of_ones_own_is_capped_and_dropped_like_any_other(tmp_path, caplog):
    rows = [
        {"question": "Q", "tests": [{"stdin": f"{n}", "stdout": "1"} for n in range(30)]},
        {"question": "R", "tests": []},
    ]
    (problem,) = all_of(write_lines(tmp_path / "a.jsonl", rows))
    assert len(problem.tests) == 20
    caplog.set_level(logging.WARNING)
    assert "without a question or tests" in caplog.text + refusal(
        write_lines(tmp_path / "b.jsonl", rows[1:]), split_of("r")
    )


@pytest.mark.parametrize("question, answer", [("", 1), ("Q", " "), (None, 1), ("Q", None), (" \n", ""), (None, None)])
def test_empty_questions_and_golds_are_dropped_and_counted(question, answer, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"question": question, "answer": answer}])
    assert "1 without a question or an answer" in " ".join(refusal(path, split) for split in SPLITS)


GOOD = '{"question": "Q", "answer": "1"}\n'
BROKEN = [
    ("a truncated last line", "a.jsonl", GOOD + '{"question": "R", "ans', "line 2"),
    ("a bad line in the middle", "a.jsonl", GOOD + "nonsense\n" + GOOD, "line 2"),
    ("a list in a .jsonl", "a.jsonl", "[" + GOOD + "]", "line 1"),
    ("a list on one line of a .jsonl", "a.jsonl", f"[{GOOD.strip()}]\n", "line 1 is a list, not an object"),
    ("a number on a line", "a.jsonl", GOOD + "7\n", "line 2"),
    ("two objects on a line", "a.jsonl", GOOD.strip() + GOOD, "line 1"),
    ("lines in a .json", "a.json", GOOD + GOOD, "line 2"),
    ("an item that is no object", "a.json", f"[{GOOD}, 7]", "item 2"),
    ("an object in a .json", "a.json", '{"rows": []}', "item 1: no column question, answer (found: rows)"),
    ("a missing column later", "a.jsonl", GOOD + '{"question": "R"}\n', "line 2: no column answer"),
    ("no question column", "a.jsonl", '{"q": "Q", "answer": 1}\n', "line 1: no column question (found: q, answer)"),
    ("an answer that is a list", "a.jsonl", GOOD + '{"question": "R", "answer": [1]}\n', "line 2: a list"),
    ("a question that is a chat", "a.jsonl", '{"prompt": [{"role": "user"}], "answer": 1}\n', "line 1: a list"),
    ("half a surrogate pair", "a.jsonl", GOOD + '{"question": "\\ud800", "answer": 1}\n', "line 2"),
    ("deep nesting", "a.jsonl", "[" * 100_000, "line 1"),
    ("tests of another form", "a.jsonl", '{"question": "Q", "tests": ["assert f(1) == 2"]}\n', "line 1: tests are"),
    ("tests of unequal length", "a.jsonl", '{"question": "Q", "tests": {"input": ["1"], "output": []}}\n', "line 1"),
    (
        "tests that are no text",
        "a.jsonl",
        '{"question": "Q", "tests": [{"stdin": [], "stdout": ""}]}\n',
        "line 1: a list",
    ),
    ("an empty file", "a.jsonl", "", "of 0 rows"),
    ("an empty .json", "a.json", "", "of 0 rows"),
    ("no parquet", "a.parquet", GOOD, "a.parquet"),
]


@pytest.mark.parametrize("file, text, words", [pytest.param(*rest, id=name) for name, *rest in BROKEN])
def test_a_broken_file_is_refused_with_its_name_and_the_place(file, text, words, tmp_path):
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    message = refusal(str(path))
    assert str(path) in message and words in message
    places = re.findall(r"(?:line|item) [0-9]+", message)
    assert places == re.findall(r"(?:line|item) [0-9]+", words), "another place, or two of them"


def test_bytes_that_are_no_utf8_are_refused_with_the_line(tmp_path):
    for encoding in ("utf-16", "latin-1"):
        path = tmp_path / "a.jsonl"
        path.write_bytes((GOOD + '{"question": "Größe", "answer": "1"}\n').encode(encoding))
        line = 1 if encoding == "utf-16" else 2
        assert f"{path}: line {line} " in refusal(str(path)) and "UTF-8" in refusal(str(path))


def test_paths_that_cannot_be_read_are_refused(tmp_path):
    assert "No such file" in refusal(str(tmp_path / "none.jsonl"))
    assert "No such file" in refusal(str(tmp_path / "none.parquet"))
    (tmp_path / "dir.jsonl").mkdir()
    assert "directory" in refusal(str(tmp_path / "dir.jsonl"))
    for name in (str(tmp_path), str(tmp_path / "a.csv"), "deepmath2", "math", "a\nb"):
        assert "known: congruence, deepmath" in refusal(name)
    if os.geteuid() != 0:
        (tmp_path / "secret.jsonl").touch(mode=0)
        assert "Permission denied" in refusal(str(tmp_path / "secret.jsonl"))


@pytest.mark.parametrize("name", ["own", "deepmath"])
@pytest.mark.parametrize("error", ["ArrowNotImplementedError", "ArrowTypeError", "ArrowKeyError"])
def test_arrow_errors_that_are_no_value_errors_are_one_line_too(name, error, tmp_path, monkeypatch):
    import pyarrow.parquet

    def fail(*args, **options):
        raise getattr(pyarrow, error)("this column\ncannot be read")

    path = write_parquet(tmp_path / "a.parquet", rows_of("deepmath"))
    monkeypatch.setattr(
        *(("datasets.load_dataset", fail) if name == "deepmath" else (pyarrow.parquet, "ParquetFile", fail))
    )
    message = refusal(name, data=path) if name == "deepmath" else refusal(path)
    assert path in message and "this column" in message


def test_unknown_splits_and_misplaced_options_are_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"question": "Q", "answer": 1}])
    for name in ("congruence", "deepmath", "codecontests", "gsm8k", path):
        for split in ("valid", "dev", ""):
            assert "known: train, validation, test" in refusal(name, split)
    assert "--data is for" in refusal(path, data=path)
    assert "--data is for" in refusal("congruence", data=path)
    assert "column names are for" in refusal("gsm8k", answer_column="a")
    assert "column names are for" in refusal("congruence", tests_column="a")


def test_the_built_in_task_is_what_it_was():
    first = [("train", 408, "10x = 04 (mod 17)"), ("validation", 100, "14x = 03 (mod 17)")]
    for split, size, question in [*first, ("test", 500, "13x = 01 (mod 19)")]:
        found = load_problems("congruence", split)
        assert (len(found), found[0].question, found[0].kind) == (size, question, "congruence")


# ---------------------------------------------------------------------------------------------------------------
# Whatever stands in a file: problems, or one line


def survives(*args, **options) -> None:
    try:
        problems = load_problems(*args, **options)
    except ValueError as error:
        assert str(error) and len(str(error).splitlines()) == 1
    else:
        assert problems and all(p.question and (p.gold or p.tests) for p in problems)


def damage(good: bytes, draw) -> bytes:
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(good)))
        junk = draw(st.one_of(st.binary(max_size=6), st.sampled_from([b"\n", b"{", b"]", b'"', b"\\", b"null", b"\0"])))
        good = good[:at] + junk + good[at + draw(st.integers(0, 12)) :]
    return good[: draw(st.integers(0, len(good)))] if draw(st.booleans()) else good


FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(["input", "output", "stdin", "stdout"])
CELLS = st.recursive(PLAIN, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x), max_leaves=6)
ROWS = st.lists(
    st.dictionaries(st.sampled_from(["question", "answer", "tests", "prompt", "x"]), CELLS) | CELLS, max_size=5
)


@FUZZ
@given(st.data())
def test_damaged_json_gives_problems_or_one_line(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / data.draw(st.sampled_from(["a.jsonl", "a.json"]))
    good = json.dumps([{"question": f"Q{n}?", "answer": n, "tests": table(("1", "2"))} for n in range(4)])
    good = good if path.suffix == ".json" else good[1:-1].replace("}, {", "}\n{")
    path.write_bytes(damage(good.encode(), data.draw))
    survives(str(path), data.draw(st.sampled_from(SPLITS)))


@FUZZ
@given(ROWS, st.sampled_from(SPLITS))
def test_odd_cells_give_problems_or_one_line(tmp_path_factory, rows, split):
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.json").write_text(json.dumps(rows))
    survives(str(folder / "a.json"), split)
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    survives(str(folder / "a.jsonl"), split)


@FUZZ
@given(st.data())
def test_damaged_parquet_gives_problems_or_one_line(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("fuzz")
    good = Path(
        write_parquet(folder / "good.parquet", [{"question": f"Q{n}?", "answer": "1"} for n in range(4)])
    ).read_bytes()
    (folder / "a.parquet").write_bytes(damage(good, data.draw))
    survives(str(folder / "a.parquet"))


@settings(FUZZ, max_examples=25)
@given(st.data())
@pytest.mark.parametrize("name", ["deepmath", "codecontests"])
def test_damaged_local_copies_give_problems_or_one_line(tmp_path_factory, name, data):
    folder = tmp_path_factory.mktemp("fuzz")
    path = folder / data.draw(st.sampled_from(["a.jsonl", "a.parquet"]))
    rows = rows_of(name)[:3]
    good = (
        write_lines(folder / "g.jsonl", rows) if path.suffix == ".jsonl" else write_parquet(folder / "g.parquet", rows)
    )
    path.write_bytes(damage(Path(good).read_bytes(), data.draw))
    survives(name, data=str(path))
