"""Grading mathematics: the cases, what holds for every answer, and a child process that cannot hurt its parent.

Run:  pytest tests/test_math.py
"""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reward
from reward import EVENTS, GRADER, math_correct, math_equal, rational

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared"
CASES = [json.loads(line) for line in (HERE / "math_cases.jsonl").read_text(encoding="utf-8").splitlines()]
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the shared cases are not here")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def respond(answer: str) -> str:
    return f"<think>work</think>So it is.<answer>{answer}</answer>"


# ---------------------------------------------------------------------------------------------------------------
# Verdicts


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in CASES} - {"bomb"}))
def test_every_case_of_a_kind(kind):
    """tests/math_cases.jsonl: gold, answer, whether they are equal, and why."""
    rows = [case for case in CASES if case["kind"] == kind]
    wrong = [case for case in rows if math_correct(respond(case["answer"]), case["gold"]) != case["equal"]]
    assert wrong == []


def test_a_bomb_is_refused_within_its_limit():
    for case in (case for case in CASES if case["kind"] == "bomb"):
        start = time.monotonic()
        assert math_correct(respond(case["answer"]), case["gold"], limit_s=0.5) is case["equal"] is False, case
        # a replaced child costs its start (about a second), which is not the answer's time but is the caller's
        assert time.monotonic() - start < 0.5 + 5, case


@needs_shared
def test_every_handed_case():
    wrong = [
        row["id"]
        for row in lines(SHARED / "cases" / "math.jsonl")
        if math_correct(row["response"], row["gold"]) != row["correct"]
    ]
    assert wrong == []


@needs_shared
def test_every_real_gold_equals_itself():
    golds = [row["answer"] for row in lines(SHARED / "data" / "math500.jsonl")]
    golds += [row["answer"].split("####")[1].strip() for row in lines(SHARED / "data" / "gsm8k_test_400.jsonl")]
    assert [gold for gold in golds if not math_equal(gold, gold)] == []
    assert len(golds) == 900


@needs_shared
def test_verdicts_on_real_answers_are_those_of_math_verify():
    """No verdict on 300 answers of a small model differs from plain math-verify. (It differs on the made-up cases.)"""
    import math_verify

    differ = []
    for row in lines(SHARED / "data" / "math500_model_answers.jsonl"):
        gold = math_verify.parse(rf"\boxed{{{row['answer']}}}")
        plain = math_verify.verify(gold=gold, target=math_verify.parse(row["prediction"]))
        if math_equal(row["prediction"], row["answer"]) != plain:
            differ.append(row)
    assert differ == []


@pytest.mark.parametrize(
    "response",
    [
        "<think>x</think>The answer is 42.",
        r"<think>\boxed{42}</think>done",
        "<think><answer>42</answer></think>",
        "<answer>42</answer>",
        "",
        "</think><answer>42</answer><answer>43</answer>",
        "</think><answer></answer>",
        r"</think><answer>\boxed{ANSWER}</answer>",
    ],
)
def test_only_the_answer_block_is_graded(response):
    assert not math_correct(response, "42")


def test_gold_comes_first():
    """verify(gold, answer) is not symmetric: a gold that says more than the answer is not matched, nor the reverse."""
    assert math_equal("5", "x = 5") and math_equal("x = 5", "5")
    assert not math_equal("2x + 3", "7 = 2x + 3")
    assert math_equal(r"(-793, 10)", "-793 < a < 10") and math_equal("-793 < a < 10", r"(-793, 10)")
    assert not math_equal(r"\int_0^1 x\,dx", r"\frac{1}{2}") and math_equal(r"\int_0^1 x\,dx", r"\int_0^1 x\,dx")


RATIONAL = [
    ("42", 42),
    ("-3.50", Fraction(-7, 2)),
    ("1,234", 1234),
    ("1,234,567.5", Fraction(2469135, 2)),
    (".4", Fraction(2, 5)),
    ("3/4", Fraction(3, 4)),
    (r"\frac34", Fraction(3, 4)),
    (r"\dfrac{-3}{4}", Fraction(-3, 4)),
    ("2 1/2", Fraction(5, 2)),
    (r"1\frac{4}{5}", Fraction(9, 5)),
    (r"28\%", Fraction(7, 25)),
    ("1.5e3", 1500),
    (r"6.72 \times 10^{-5}", Fraction(21, 312500)),
    (r"0.\overline{3}", Fraction(1, 3)),
    (r"0.1\overline{6}", Fraction(1, 6)),
    ("0.(3)", Fraction(1, 3)),
    ("007", 7),
    ("-0", 0),
    (r"\boxed{42}", 42),
    ("$5$", 5),
    (r"\( 5 \)", 5),
    (r"10,\!080", 10080),
    ("42.", 42),
    ("\u22125", -5),
]
NOT_RATIONAL = [
    "0,1",
    "4 10/3",
    "2 -1/2",
    "1/0",
    "x",
    "",
    "1 2",
    "1,23",
    "12,34,567",
    "1e99999",
    "0x1f",
    "1_000",
    "\u0663",
]
NOT_RATIONAL += ["--5", "1.2.3", "5" * 401, "nan", "inf", "24!", r"\frac{1}{}"]
RATIONAL += [(text, None) for text in NOT_RATIONAL]


@pytest.mark.parametrize("text, value", RATIONAL)
def test_rational_reads_plain_numbers_exactly(text, value):
    assert rational(text) == value


# ---------------------------------------------------------------------------------------------------------------
# Properties

numbers = st.one_of(
    st.integers(-(10**9), 10**9).map(str),
    st.decimals(-1000, 1000, places=3).map(str),
    st.tuples(st.integers(-99, 99), st.integers(2, 99)).map(lambda f: rf"\frac{{{f[0]}}}{{{f[1]}}}"),
)
symbols = st.sampled_from(
    [r"\sqrt{2}", r"\pi", "x^2 + 1", r"\frac{x}{y}", r"e^{-1}", r"2\sqrt{3}", r"\ln 2", "3i", "a_1 + 2"]
)
scalars = st.one_of(numbers, symbols)
prose = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=40)


@settings(max_examples=60, deadline=None)
@given(scalars, prose)
def test_an_answer_equals_itself_in_any_wrapping(answer, text):
    for wrapped in (answer, f"${answer}$", rf"\boxed{{{answer}}}", rf"\({answer}\)", f"  {answer} \n", f"{answer}."):
        assert math_correct(f"{text}</think>{text}<answer>{wrapped}</answer>", answer), wrapped


@settings(max_examples=40, deadline=None)
@given(
    st.lists(scalars, min_size=2, max_size=5, unique_by=lambda s: rational(s) or s), st.randoms(use_true_random=False)
)
def test_order_matters_in_a_tuple_and_not_in_a_set(elements, random):
    shuffled = elements[:]
    random.shuffle(shuffled)
    assert math_equal(r"\{" + ", ".join(shuffled) + r"\}", r"\{" + ", ".join(elements) + r"\}")
    assert math_equal(", ".join(shuffled), ", ".join(elements))
    same_order = all(x == y for x, y in zip(shuffled, elements, strict=True))
    assert math_equal("(" + ", ".join(shuffled) + ")", "(" + ", ".join(elements) + ")") == same_order


@settings(max_examples=40, deadline=None)
@given(st.fractions(max_denominator=500), st.fractions(max_denominator=500))
def test_numbers_are_compared_exactly(x, y):
    as_latex = rf"\frac{{{y.numerator}}}{{{y.denominator}}}"
    assert math_equal(str(x), as_latex) == (x == y)
    assert math_equal(rf"\sqrt{{2}} + {x}", rf"\sqrt{{2}} + {as_latex}") == (x == y)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=60), st.sampled_from(["42", r"\frac{1}{2}", r"(1, \pi)", "x^2", r"\text{no}", r"\{1, 2\}"]))
def test_no_text_breaks_the_grader(text, gold):
    before = EVENTS["error"] + EVENTS["crash"]
    assert math_equal(text, gold) in (True, False)
    assert EVENTS["error"] + EVENTS["crash"] == before


LATEX = (
    r"{ } ( ) [ ] , = ^ _ \frac \sqrt \boxed \{ \} \pm \cup or < \le 1 2 x . % \% \text{ \infty - / ! | & \\ \ldots \in"
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(LATEX.split()), max_size=14).map("".join))
def test_no_broken_latex_breaks_the_grader(text):
    before = EVENTS["error"] + EVENTS["crash"]
    assert math_equal(text, r"\frac{3}{7}") in (True, False)
    assert math_equal(text, r"(1, 2] \cup \{5\}") is False
    assert EVENTS["error"] + EVENTS["crash"] == before


@pytest.mark.parametrize(
    "junk", ["(", "[", "{", r"\{", "1,", "x=", "^", r"\boxed{", r"\frac", "-", "1 ", "$", r"\text{", " or "]
)
def test_long_junk_takes_no_long_time(junk):
    start = time.monotonic()
    assert not math_equal(junk * (4000 // len(junk)), "42", limit_s=3)
    assert not math_equal(junk * 100_000, "42", limit_s=3)
    assert time.monotonic() - start < 3.5


# ---------------------------------------------------------------------------------------------------------------
# The child process


def children() -> set[int]:
    """Process ids of living maths graders started by this process."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            if parent == os.getpid() and b"--grader-child" in (stat.parent / "cmdline").read_bytes():
                found.add(int(stat.parent.name))
        except OSError:  # ended while we looked
            continue
    return found


def test_a_stuck_answer_is_killed_counted_and_does_not_disturb_the_next():
    math_equal("x", "y")  # started
    before, events = children(), EVENTS["timeout"]
    start = time.monotonic()
    assert not GRADER.ask("(10^9)!", "1", 0.5)
    assert 0.4 < time.monotonic() - start < 1.5
    assert EVENTS["timeout"] == events + 1
    assert math_equal(r"\sqrt{8}", r"2\sqrt{2}")  # by a new child
    assert len(before) == len(children()) == 1 and before != children()


def test_an_answer_that_eats_memory_is_refused_and_counted():
    script = (
        "import reward; reward.Grader.MEMORY = 300 << 20;"
        "reward.equivalent = lambda a, g: bool(bytearray(1 << 30)) if a != 'x+1' else True; reward.grader_child()"
    )
    child = subprocess.run(
        [sys.executable, "-c", script], input=b'["1", "2", 3]\n', capture_output=True, cwd=HERE.parent
    )
    ready, reply = [json.loads(line) for line in child.stdout.splitlines()]
    assert ready == {"ready": True} and reply == {"equal": False, "event": "memory", "last": True}


def test_a_large_parent_does_not_count_as_the_childs_memory():
    script = (
        "import reward; ballast = bytearray(b'x' * (1100 << 20)); pids = set()\n"
        "for k in range(3): assert reward.math_equal('x+1', '1+x'); pids.add(reward.GRADER.process.pid)\n"
        "print(len(pids), dict(reward.EVENTS))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=HERE.parent)
    assert out.stdout == "1 {}\n", out


def test_an_exception_in_the_child_is_reported_by_type_and_the_child_goes_on():
    script = (
        "import reward; real = reward.equivalent\n"
        "reward.equivalent = lambda a, g: real(a, g) if a != 'bad' else {}['key that may be long']\n"
        "reward.grader_child()"
    )
    questions = b'["bad", "2", 3]\n["1+x", "x+1", 3]\n'
    child = subprocess.run([sys.executable, "-c", script], input=questions, capture_output=True, cwd=HERE.parent)
    assert [json.loads(line) for line in child.stdout.splitlines()] == [
        {"ready": True},
        {"equal": False, "event": "error: KeyError", "last": False},
        {"equal": True, "last": False},
    ]


def test_an_exception_is_counted_every_time_and_logged_once(caplog, monkeypatch):
    math_equal("x", "y")
    GRADER.logged.clear()
    replies = [{"equal": False, "event": "error: KeyError"}] * 3 + [{"equal": False, "event": "error: TypeError"}]
    monkeypatch.setattr(GRADER, "reply", lambda limit_s: replies.pop(0))
    before = EVENTS["error"]
    with caplog.at_level(logging.WARNING, "reward"):
        assert [math_equal("x" * 500, "x^" + "2" * 300) for _ in range(4)] == [False] * 4
    assert EVENTS["error"] == before + 4
    assert ["KeyError" in line for line in caplog.messages] == [True, False] and len(caplog.messages[0]) < 300
    GRADER.close()  # its real replies are still in the pipe


def test_grading_works_from_any_thread_and_leaves_signals_alone():
    fired = []
    handler = signal.signal(signal.SIGALRM, lambda *_: fired.append(True))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.8)
        with ThreadPoolExecutor(8) as pool:
            rows = [(str(k), k) for k in range(40)]
            verdicts = list(
                pool.map(lambda r: math_equal(rf"\sqrt{{{r[1] ** 2 + 1}}}", rf"\sqrt{{{r[0]}^2 + 1}}"), rows)
            )
        time.sleep(1.0)
        assert verdicts == [True] * 40
        assert fired == [True] and threading.active_count() < 20
        assert callable(signal.getsignal(signal.SIGALRM))
    finally:
        signal.signal(signal.SIGALRM, handler)


def test_a_child_that_died_is_replaced_without_a_wrong_verdict():
    math_equal("x", "y")
    crashes = EVENTS["crash"]
    for _ in range(3):
        os.kill(next(iter(children())), signal.SIGKILL)
        time.sleep(0.05)
        assert math_equal(r"\frac{\pi}{2}", "pi/2")
    assert EVENTS["crash"] == crashes


def test_an_interrupt_leaves_no_old_reply_for_the_next_question(monkeypatch):
    math_equal("x", "y")
    real = GRADER.reply

    def interrupted(limit_s):
        time.sleep(0.3)  # the child's reply is in the pipe by now
        monkeypatch.setattr(GRADER, "reply", real)
        raise KeyboardInterrupt

    monkeypatch.setattr(GRADER, "reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        math_equal("x + 1", "1 + x")
    assert not math_equal("x + 1", "x + 2")


def test_a_forked_process_gets_a_grader_of_its_own():
    math_equal("x", "y")
    pid = os.fork()
    if pid == 0:
        os._exit(0 if reward.GRADER.process is None and math_equal("x + 1", "1 + x") else 1)
    assert math_equal("x + y", "y + x")
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize(
    "ending", ["pass", "import os; os._exit(3)", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_no_child_survives_its_parent(ending):
    script = "import reward; assert reward.math_equal('x+1', '1+x'); print(reward.GRADER.process.pid, flush=True)"
    out = subprocess.run([sys.executable, "-c", f"{script}; {ending}"], capture_output=True, text=True, cwd=HERE.parent)
    pid = int(out.stdout)
    assert out.stderr == ""
    for _ in range(50):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.1)
    pytest.fail(f"grader {pid} is still there")


def test_a_lost_computation_ends_with_its_parent():
    """Killed parent, computing child: it cannot see its input end, but it has a CPU limit."""
    script = (
        "import reward, threading, os, signal; reward.math_equal('x', 'y');"
        "print(reward.GRADER.process.pid, flush=True);"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start();"
        "reward.GRADER.ask('(10^9)!', '1', 1.0)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=HERE.parent)
    pid = int(out.stdout)
    for _ in range(100):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the child computes on")


def test_a_missing_library_is_an_error_and_not_a_wrong_answer():
    script = (
        "import reward; reward.Grader.start.__globals__['__file__'] = 'fake.py'\n"
        "try: reward.math_equal('x', 'x+0')\nexcept reward.GradingError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=HERE.parent)
    assert out.stdout.startswith("the maths grader does not start") and out.stdout.count("\n") == 1


def resident(pid: int) -> int:
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) // 1024  # MiB


def test_a_thousand_bad_answers_leave_processes_and_memory_flat():
    bad = [rf"\frac{{x^{{{k}}} + {k}}}{{\sqrt{{y + {k}}}}}" + "}" * (k % 2) for k in range(1000)]
    for answer in bad[:100]:
        math_equal(answer, "x")
    own, child, count = resident(os.getpid()), resident(next(iter(children()))), len(children())
    for answer in bad[100:]:
        assert not math_equal(answer, "x")
    assert len(children()) == count == 1
    assert resident(os.getpid()) < own + 10 and resident(next(iter(children()))) < child + 60


def test_a_thousand_ordinary_gradings_take_seconds():
    rows = [case for case in CASES if case["kind"] != "bomb"]
    rows = (rows * (1000 // len(rows) + 1))[:1000]
    math_equal("x", "y")  # the child's start is not counted
    start = time.monotonic()
    for case in rows:
        math_equal(case["answer"], case["gold"])
    assert time.monotonic() - start < 20


# ---------------------------------------------------------------------------------------------------------------
# python reward.py FILE.jsonl


def grade(tmp_path, rows, *flags, **run) -> subprocess.CompletedProcess:
    path = tmp_path / "responses.jsonl"
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    command = [sys.executable, str(HERE.parent / "reward.py"), str(path), *flags]
    return subprocess.run(command, capture_output=True, text=True, **run)


def test_a_file_is_graded_and_its_verdicts_are_written_beside_it(tmp_path):
    rows = [
        {"response": respond("4/3"), "gold": r"\frac43"},
        {"response": respond("4/3"), "gold": 1},
        {"response": "4/3", "gold": "4/3", "more": "columns"},
        {"response": respond("(10^9)!"), "gold": "3"},
        {"response": "x</think>é<answer>5</answer> and more", "gold": "5"},
    ]
    out = grade(tmp_path, rows)
    assert out.returncode == 0, out
    assert "2 right" in out.stdout and "5 responses" in out.stdout and "5/5" in out.stderr
    verdicts = lines(tmp_path / "responses.verdicts.jsonl")
    assert [v["verdict"] for v in verdicts] == ["right", "wrong", "no answer", "timeout", "right"]
    assert [v["phi"] for v in verdicts] == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert [v["answer"] for v in verdicts] == ["4/3", "4/3", None, "(10^9)!", "5"]


@pytest.mark.parametrize(
    "rows, named",
    [
        (["{"], "line 1"),
        ([{"response": "a", "gold": "1"}, {"response": "a"}], "line 2"),
        ([{"response": "a", "gold": "1"}, {"gold": "1"}], "line 2"),
        ([{"response": ["5"], "gold": "1"}], "line 1"),
        ([{"response": None, "gold": "1"}], "line 1"),
        ([{"response": "a", "gold": ""}], "line 1"),
        ([{"response": "a", "gold": ["1"]}], "line 1"),
        ([{"response": "a", "tests": []}], "line 1"),
        ([{"response": "a", "tests": [{"stdin": "1"}]}], "line 1"),
        ([[{"response": "a", "gold": "1"}]], "line 1"),
    ],
)
def test_a_bad_row_is_named_before_anything_is_graded(tmp_path, rows, named):
    out = grade(tmp_path, rows)
    assert out.returncode == 2 and out.stderr.count("\n") == 1, out
    assert named in out.stderr and "responses.jsonl" in out.stderr
    assert not (tmp_path / "responses.verdicts.jsonl").exists()


def test_verdicts_that_are_there_are_not_overwritten(tmp_path):
    kept = tmp_path / "responses.verdicts.jsonl"
    kept.write_text("mine")
    out = grade(tmp_path, [{"response": respond("1"), "gold": "1"}])
    assert out.returncode == 2 and "--out" in out.stderr and kept.read_text() == "mine"
    assert grade(tmp_path, [{"response": respond("1"), "gold": "1"}], "--out", str(tmp_path / "o")).returncode == 0
    assert lines(tmp_path / "o")[0]["verdict"] == "right" and kept.read_text() == "mine"


def test_programs_are_refused_in_one_line_without_a_sandbox(tmp_path):
    rows = [{"response": respond("```python\nprint(3)\n```"), "tests": [{"stdin": "", "stdout": "3"}]}]
    out = grade(tmp_path, rows, env={**os.environ, "PATH": str(tmp_path)})
    assert out.returncode == 2 and out.stderr.count("\n") == 1, out
    assert "bubblewrap" in out.stderr and "--allow-unsandboxed-code" in out.stderr
    out = grade(tmp_path, rows, "--allow-unsandboxed-code", env={**os.environ, "PATH": str(tmp_path)})
    assert out.returncode == 0 and "1 right" in out.stdout, out


def test_a_file_that_is_not_there_is_named(tmp_path):
    out = subprocess.run(
        [sys.executable, str(HERE.parent / "reward.py"), str(tmp_path / "no.jsonl")], capture_output=True, text=True
    )
    assert out.returncode == 2 and "no.jsonl" in out.stderr and out.stderr.count("\n") == 1


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
def test_every_test_of_a_program_in_a_file_is_run(tmp_path):
    program = respond("```python\nn = int(input())\nprint(n if n < 24 else 0)\n```")
    tests = [{"stdin": str(n), "stdout": str(n)} for n in range(25)]
    silent = [{"stdin": "1", "stdout": ""}]
    out = grade(tmp_path, [{"response": program, "tests": t} for t in (tests, tests[:24], silent)])
    assert out.returncode == 0, out
    assert [v["verdict"] for v in lines(tmp_path / "responses.verdicts.jsonl")] == ["wrong", "right", "wrong"]
