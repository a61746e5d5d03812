"""Code grading: the program of an answer, its sandbox and limits, and the comparison of outputs.

Run:  pytest tests/test_code.py
Most programs run twice: in bubblewrap (skipped where it does not work), and as --allow-unsandboxed-code runs them.
"""

import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import reward
from reward import Result, SandboxError, code_correct, code_status, extract_program, run_program, same_output

HERE = Path(__file__).resolve().parent
CASES = HERE.parents[1] / "shared" / "cases" / "code.jsonl"
BWRAP = shutil.which("bwrap")
PROBE = [BWRAP, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
WORKS = BWRAP is not None and subprocess.run(PROBE, capture_output=True).returncode == 0
needs_bwrap = pytest.mark.skipif(not WORKS, reason="bubblewrap is not installed or may not make namespaces here")
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs Linux")
ADD = "a, b = map(int, input().split())\nprint(a + b)\n"


def answer(program: str) -> str:
    return f"<think>easy</think>\nWe add.\n<answer>\n```python\n{program}\n```\n</answer>"


def unsandboxed(monkeypatch, tmp_path) -> None:
    (tmp_path / "empty").mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(reward, "ALLOW_UNSANDBOXED", True)


@pytest.fixture(autouse=True, scope="module")
def no_maths_grader():
    """Other test files leave its child running, and here every child of this process is counted."""
    reward.GRADER.close()


@pytest.fixture(params=[pytest.param("bwrap", marks=needs_bwrap), "plain"])
def mode(request, monkeypatch, tmp_path) -> str:
    if request.param == "plain":
        unsandboxed(monkeypatch, tmp_path)
    return request.param


@pytest.fixture
def mark() -> str:
    return f"mark-{uuid.uuid4().hex}"


def marked(program: str, mark: str) -> str:
    """The program under a command line that can be found in /proc, and so under all its forks."""
    again = f"os.execv(sys.executable, [sys.executable, __file__, {mark!r}])"
    return f"import os, sys\nif len(sys.argv) == 1: {again}\n{program}"


def alive(mark: str) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path("/proc", pid, "cmdline").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


def until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


def gone(mark: str) -> bool:
    """The kernel ends a program soon after its bwrap or launcher was killed by others, but nobody waits for that."""
    return until(lambda: not alive(mark))


def children() -> list[str]:
    """The state lines of all children of this process: a zombie is one."""
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except OSError:  # a thread that has just ended
            continue
        found += [Path("/proc", pid, "stat").read_text() for pid in pids]
    return found


# ---------------------------------------------------------------------------------------------------------------
# extract_program

EXTRACT = [
    ("tag python", "```python\nprint(1)\n```", "print(1)"),
    ("tag py", "```py\nprint(1)\n```", "print(1)"),
    ("tag in capitals", "```PYTHON3\nprint(1)\n```", "print(1)"),
    ("blank before the tag, words behind", "``` python title=a.py\nprint(1)\n```", "print(1)"),
    ("no tag: the first identifier is program", "```\nprint(1)\n```", "print(1)"),
    ("no tag: a first line like a language", "```\npython = 1\n```", "python = 1"),
    ("no tag: a first line of one word", "```\npass\n```", "pass"),
    ("no fence: all of it", "\nprint(1)\nprint(2)\n", "print(1)\nprint(2)"),
    ("no fence, one line", " print(1) ", "print(1)"),
    ("the last of two", "```python\nprint(1)\n```\nbetter:\n```python\nprint(2)\n```", "print(2)"),
    ("a tagged one before an untagged one", "```python\nprint(1)\n```\nprints\n```\n1\n```", "print(1)"),
    ("the last of two untagged", "```\nprint(1)\n```\n\n```\nprint(2)\n```", "print(2)"),
    ("another language after it", "```python\nprint(1)\n```\n```cpp\nint main(){}\n```", "print(1)"),
    ("another language only", "```cpp\nint main(){}\n```", None),
    ("another language before an untagged one", "```bash\npip install x\n```\n```\nprint(1)\n```", "print(1)"),
    ("python2 is another language", "```python2\nprint 1\n```", None),
    ("a word that starts like python", "```pytorch\nprint(1)\n```", None),
    ("not closed", "```python\nprint(1)\n", "print(1)\n"),
    ("the second not closed", "```python\nprint(1)\n```\n```python\nprint(2)", "print(2)"),
    ("a fence inside a string of the program", '```python\nprint("```")\nprint(2)\n```', 'print("```")\nprint(2)'),
    ("a fence inside a docstring, indented", '```python\ndef f():\n    """\n    ```\n    """\n```', None),
    ("a longer fence holds a shorter one", "````python\nprint('''\n```\n''')\n````", "print('''\n```\n''')"),
    ("closed by a longer one", "```python\nprint(1)\n````\nDone.", "print(1)"),
    ("closed with blanks behind", "```python\nprint(1)\n```  \nDone.", "print(1)"),
    ("opened behind words", "The program: ```python\nprint(1)\n```", "print(1)"),
    ("code span in prose", "Use ```print``` here:\n```python\nprint(1)\n```", "print(1)"),
    (
        "in a list: indentation of the fence is not program",
        "1. so\n   ```python\n   if 1:\n     f()\n   ```",
        "if 1:\n  f()",
    ),
    ("indentation of the program is", "```python\nif 1:\n    f()\n```", "if 1:\n    f()"),
    ("CRLF", "```python\r\nprint(1)\r\n```\r\nDone.", "print(1)\r"),
    ("byte order mark", "```python\n\ufeffprint(1)\n```", "\ufeffprint(1)"),
    ("nothing in the block", "```python\n```", None),
    ("blanks in the block", "```python\n  \n\n```", None),
    ("nothing in the answer", " \n ", None),
]
EXTRACT = [(w, a, '\ndef f():\n    """\n    ```\n    """'[1:] if "docstring" in w else p) for w, a, p in EXTRACT]


@pytest.mark.parametrize(("text", "program"), [row[1:] for row in EXTRACT], ids=[row[0] for row in EXTRACT])
def test_the_program_of_an_answer(text, program):
    assert extract_program(f"<think>x</think><answer>{text}</answer>") == program


def test_only_the_answer_block_holds_programs():
    block = "```python\nprint(1)\n```"
    assert extract_program(f"<think>{block}</think>{block}") is None
    assert extract_program(f"<think>{block}</think>{block}<answer>print(2)</answer>{block}") == "print(2)"
    assert extract_program(f"<think>x<answer>{block}</answer>") is None
    assert extract_program("") is None


@pytest.mark.parametrize(
    "text",
    [
        "`" * 300_000,
        "```\n" * 70_000,
        "```py" * 60_000,
        "`" * 100_000 + "x`",
        "```" + " " * 300_000 + "`",
        "\n`" * 150_000,
    ],
    ids=["backticks", "fences", "tags on a line", "tail", "blanks", "single"],
)
def test_extraction_takes_linear_time(text):
    start = time.perf_counter()
    extract_program(f"</think><answer>{text}</answer>")
    assert time.perf_counter() - start < 2.0


# ---------------------------------------------------------------------------------------------------------------
# same_output

SAME = [
    ("3", "3\n"), ("3 \n\n", "3\n"), ("3\r\n", "3\n"), ("1 2\n3", "1\n2 3\n"), ("", ""), ("\n \n", ""), ("\t3", "3"),
    ("YES", "YES"), ("nan", "nan"), ("inf", "inf"), ("1e999", "1e999"), ("007", "007"), ("x.y", "x.y"), ("é", "é"),
    ("3", "3.0"), ("3.0", "3.00"), ("3.", "3.0"), ("0.3000000001", "0.3"), (".5", "0.5"), ("+0.5", "0.5"),
    ("-0.0", "0.0"),
    ("1000000.5", "1000000.0"), ("1e3", "1000.0"), ("1000", "1E3"), ("0.0000005", "0.0"), ("2.5e-7", "1e-7"),
]  # fmt: skip
OTHER = [
    ("4", "3"), ("", "3"), ("3", ""), ("3 4", "3"), ("3", "3 4"), ("12", "1 2"), ("1 2", "12"), ("3x", "3"),
    ("x3", "3"),
    ("yes", "YES"), ("True", "1"), ("1", "True"), ("1_000", "1000"), ("1_000.0", "1000.0"), ("٣", "3"), ("٣.٠", "3.0"),
    ("3.0", "3"), ("3e0", "3"), ("+3", "3"), ("03", "3"), ("0x3", "3"), ("-0", "0"), ("Infinity", "inf"),
    ("NaN", "nan"),
    ("10000000000000000000001", "10000000000000000000000"), ("50000001", "50000000"), ("3.0000000001", "3"),
    ("0.300002", "0.3"), ("1000002.0", "1000000.0"), ("0.000002", "0.0"), ("-0.5", "0.5"), ("1e3", "1e4"),
    ("nan", "1.5"), ("inf", "1.5"), ("1e999", "1.5"), ("-1e999", "1e999"), ("1e998", "1e999"), ("nan", "1e999"),
    ("1,5", "1.5"), ("1.5f", "1.5"), ("1.5.0", "1.5"), ("1/2", "0.5"), ("1.5", "1.5x"), ("1.50", "1.5.0"), ("e", "."),
    ("3 1.0 2", "3 2 1.0"), ("[1, 2]", "1 2"),
]  # fmt: skip


@pytest.mark.parametrize(("stdout", "expected"), SAME)
def test_outputs_that_are_the_same(stdout, expected):
    assert same_output(stdout, expected)


@pytest.mark.parametrize(("stdout", "expected"), OTHER)
def test_outputs_that_are_not_the_same(stdout, expected):
    assert not same_output(stdout, expected)


@pytest.mark.parametrize(
    "token", ["1" * 900_000 + "x", "0." + "1" * 900_000 + "x", "1e" + "9" * 900_000, "." * 900_000]
)
def test_comparison_takes_linear_time(token):
    start = time.perf_counter()
    assert not same_output(token, "1.5")
    assert not same_output("1.5", token)
    assert time.perf_counter() - start < 2.0


# ---------------------------------------------------------------------------------------------------------------
# What programs do, right and wrong, each in the sandbox and without it

DEEP = "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n"
PASSED = [
    ("input", ADD, "3 4\n", "7\n"),
    ("input rebound", f"import sys\ninput = sys.stdin.readline\n{ADD}", "3 4\n", "7"),
    ("stdin.buffer", "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", "3 4\n", "7"),
    ("iterate stdin.buffer", "import sys\nprint(sum(len(x) for x in sys.stdin.buffer))", "ab\ncd\n", "6"),
    ("readline, read", "import sys\nb = sys.stdin.buffer\nprint(b.readline(), b.read())", "1\n2\n", r"b'1\n' b'2\n'"),
    ("input, then stdin.read", "import sys\nprint(input(), repr(sys.stdin.read()))", "1\n2\n", r"1 '2\n'"),
    ("open(0)", "print(open(0).read().split())", "3 4", "['3', '4']"),
    ("open(0) as bytes", "print(len(open(0, 'rb').read()))", "é\n", "3"),
    ("fstat of stdin", "import os\nprint(os.read(0, os.fstat(0).st_size))", "3 4\n", r"b'3 4\n'"),
    ("mmap of stdin", "import mmap\nprint(mmap.mmap(0, 0, access=mmap.ACCESS_READ)[:])", "3 4\n", r"b'3 4\n'"),
    ("end of input", "try:\n    while True: print(input())\nexcept EOFError: print('end')", "ab\ncd", "ab cd end"),
    ("no input", "print(repr(open(0).read()))", "", "''"),
    ("long input not read", "print('done')", "1\n" * 200_000, "done"),
    ("long input", "print(sum(map(int, open(0))))", "1\n" * 200_000, "200000"),
    ("UTF-8 in", "print(len(input()))", "naïve ☃\n", "7"),
    ("UTF-8 out", "print('naïve ☃')", "", "naïve ☃"),
    ("UTF-8 source", "π = 3\nprint(π)", "", "3"),
    ("main guard", "if __name__ == '__main__':\n    print(3)", "", "3"),
    ("byte order mark", "\ufeffprint(3)", "", "3"),
    ("CRLF", "if True:\r\n    print(3)\r\n", "", "3"),
    ("stderr is not output", "import sys\nprint('debug', file=sys.stderr)\nprint(3)", "", "3"),
    ("nothing printed, nothing expected", "x = 3", "", ""),
    ("sys.exit", "import sys\nprint(3)\nsys.exit()", "", "3"),
    ("exit from site", "print(3)\nexit(0)", "", "3"),
    ("hard exit", "import os\nprint(3, flush=True)\nos._exit(0)", "", "3"),
    ("deep recursion, raised limit", f"import sys\nsys.setrecursionlimit(10**6)\n{DEEP}print(f(15000))", "", "15000"),
    ("deeper", "import resource as r\ns = r.RLIMIT_STACK\nr.setrlimit(s, (16 << 20, r.getrlimit(s)[1]))", "", ""),
    (
        "a thread with a large stack",
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(512 << 20)\n"
        f"{DEEP}t = threading.Thread(target=lambda: print(f(50000)))\nt.start()\nt.join()",
        "",
        "50000",
    ),
    (
        "200 threads",
        "import threading\nb = threading.Barrier(201)\n"
        "for _ in range(200): threading.Thread(target=b.wait, daemon=True).start()\nb.wait()\nprint(3)",
        "",
        "3",
    ),
    (
        "a pool of processes",
        "from multiprocessing import Pool\ndef f(x): return x * x\n"
        "if __name__ == '__main__':\n    with Pool(3) as p: print(sum(p.map(f, range(4))))",
        "",
        "14",
    ),
    (
        "shared memory",
        "from multiprocessing.shared_memory import SharedMemory\n"
        "s = SharedMemory(create=True, size=9)\ns.buf[0] = 3\nprint(s.buf[0])\ns.close()\ns.unlink()",
        "",
        "3",
    ),
    ("a child's output", "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(3)'])", "", "3"),
    ("a temporary file", "import tempfile\nf = tempfile.TemporaryFile()\nf.write(b'3')\nprint(f.tell())", "", "1"),
    ("its own folder", "open('x', 'w').write('3')\nprint(open('x').read())", "", "3"),
    ("numpy", "import numpy as np\nprint(np.arange(9).reshape(3, 3) @ np.ones(3))", "", "[ 3. 12. 21.]"),
    ("a lone surrogate", "print('\ud800' == '?')", "", "True"),
]  # fmt: skip
CRASHED = [
    ("an exception, nothing expected", "raise ValueError", "", "", 1),
    ("an exception after the right output", "print(3, flush=True)\n1 / 0", "", "3", 1),
    ("sys.exit(1) after the right output", "print(3)\nexit(1)", "", "3", 1),
    ("sys.exit with a message", "import sys\nprint(3)\nsys.exit('no')", "", "3", 1),
    ("end of input", "input()\ninput()", "3\n", "", 1),
    ("syntax", ">>> print(3)", "", "", 1),
    ("segmentation fault", "import ctypes\nctypes.string_at(0)", "", "", -signal.SIGSEGV),
    ("killed by itself", "import os\nos.kill(os.getpid(), 9)", "", "", -9),
    ("recursion at the default limit", f"{DEEP}f(20000)", "", "", 1),
    ("recursion beyond the stack", "import sys\nsys.setrecursionlimit(10**9)\nf = lambda: f()\nf()", "", "", None),
    ("long integers", "str(10 ** 5000)", "", "", 1),
    ("bwrap's message from a program", "import sys\nsys.exit('bwrap: Creating new namespace failed')", "", "", 1),
    ("text that is no program", "Just add the two numbers.", "", "", 1),
    ("a large file", "open('x', 'wb').write(bytes(30 << 20))", "", "", 1),
    ("input written to", "import os\nos.write(0, b'3')", "", "", 1),
]


@pytest.mark.parametrize(("program", "stdin", "expected"), [r[1:] for r in PASSED], ids=[r[0] for r in PASSED])
def test_a_right_program_passes(mode, program, stdin, expected):
    result = run_program(program, stdin, expected)
    assert (result.status, result.returncode) == ("passed", 0), result


@pytest.mark.parametrize(
    ("program", "stdin", "expected", "code"), [r[1:] for r in CRASHED], ids=[r[0] for r in CRASHED]
)
def test_a_crash_never_passes(mode, program, stdin, expected, code):
    result = run_program(program, stdin, expected)
    if code is None:  # whether endless recursion overflows the stack or fills the memory is up to the version of Python
        assert result.status in ("crashed", "memory") and result.returncode != 0, result
    else:
        assert (result.status, result.returncode) == ("crashed", code), result


def test_a_null_byte_is_no_crash_of_the_grader(mode):
    assert run_program("print(3)\0", "", "4").status in ("wrong", "crashed")  # Python 3.11.4 and later refuse it
    assert run_program("print(len(input()))", "\0\ud800", "2").status == "passed"


def test_bytes_that_are_not_utf8_are_replaced(mode):
    result = run_program("import sys\nsys.stdout.buffer.write(b'3\\xff')", "", "3\ufffd")
    assert result.status == "passed" and result.stdout == "3\ufffd"


def test_the_locale_of_the_grader_does_not_matter(mode, monkeypatch):
    for name in ("LC_ALL", "LANG", "PYTHONIOENCODING"):
        monkeypatch.setenv(name, "POSIX" if name != "PYTHONIOENCODING" else "ascii")
    program = "import sys\nprint(input(), len(sys.stdin.read()), open('x', 'w').encoding.lower(), sys.flags.utf8_mode)"
    assert run_program(program, "ü\nü", "ü 1 utf-8 1").status == "passed"


def test_what_a_result_holds(mode):
    result = run_program("import sys, time\nsys.stderr.write('e')\ntime.sleep(0.3)\nprint(4)", "", "3")
    assert isinstance(result, Result)
    assert (result.status, result.stdout, result.stderr, result.returncode) == ("wrong", "4\n", "e", 0)
    assert 0.3 <= result.seconds < 3.0
    assert run_program("print(4)").status == "passed"  # nothing is expected
    assert run_program("print(4)", "", "").status == "wrong"  # an empty output is


def test_all_tests_must_pass_and_the_first_failure_ends_it(mode, monkeypatch):
    runs = []
    real = reward.run_program
    monkeypatch.setattr(reward, "run_program", lambda *a, **k: runs.append(a[1]) or real(*a, **k))
    assert code_correct(answer(ADD), [("1 2\n", "3\n"), ("10 -4\n", "6\n")])
    assert runs == ["1 2\n", "10 -4\n"]
    assert not code_correct(answer("print(3)"), [("1 2\n", "3\n"), ("10 -4\n", "6\n"), ("1 2\n", "3\n")])
    assert len(runs) == 4


def test_no_test_no_program_no_credit(mode):
    assert not code_correct(answer("print(3)"), [])
    assert not code_correct(answer("print(3)"), ())
    assert not code_correct("<think>x</think>print(3)", [("", "3")])
    assert not code_correct("<think>x</think><answer></answer>", [("", "")])
    assert not code_correct("<think>x</think><answer>```c\nint main(){}\n```</answer>", [("", "")])
    assert not code_correct(answer("import sys\nsys.exit(0)"), [("", "3")])


def test_the_status_of_an_answer_is_that_of_its_first_failure(mode):
    tests = [("1 2\n", "3"), ("x\n", "3"), ("3 4\n", "8")]
    assert code_status(answer(ADD), tests[:1]) == "passed"
    assert code_status(answer(ADD), tests) == "crashed"
    assert code_status(answer(ADD), tests[::-1]) == "wrong"
    assert code_status(answer("while True: pass"), tests, limit_s=0.2) == "timeout"
    assert code_status(answer(ADD), []) == "wrong"
    assert code_status("<think>x</think>3", tests) == "no program"


def test_each_test_gets_a_fresh_folder(mode):
    shy = "import os\nassert os.listdir() == ['main.py'] or 'stdin' in os.listdir() and len(os.listdir()) == 2\n"
    assert code_correct(answer(shy + "open('x', 'w')\nopen('/tmp/x-of-a-test', 'w')\nprint(3)"), [("", "3")] * 2)
    gone = "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\nos.chdir('/tmp')\nprint(3)"
    assert code_correct(answer(gone), [("", "3")] * 2)
    Path("/tmp/x-of-a-test").unlink(missing_ok=True)  # without the sandbox it is there


# ---------------------------------------------------------------------------------------------------------------
# Limits

IGNORE = "import signal\nfor s in (1, 2, 14, 15, 24): signal.signal(s, signal.SIG_IGN)\n"
ENDLESS = {
    "loop": ("while True: pass", "timeout"),
    "sleep": ("import time\nprint(3, flush=True)\ntime.sleep(60)", "timeout"),
    "signals ignored": (f"{IGNORE}while True: pass", "timeout"),
    "one instruction": ("x = 10 ** (10 ** 8)", "timeout"),
    "one pattern": ("import re\nre.match('(a+)+b', 'a' * 60)", "timeout"),
    "stopped": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", "timeout"),
    "a thread that never ends": (
        "import threading\nthreading.Thread(target=threading.Event().wait).start()",
        "timeout",
    ),
    "a pool": ("from multiprocessing import Pool\nimport time\nPool(2).map(time.sleep, [60, 60])", "timeout"),
    "output": ("while True: print('1234567890')", "output-limit"),
    "output, one write": ("print('3')\nprint('x' * (200 << 20))", "output-limit"),
    "stderr": ("import sys\nwhile True: sys.stderr.write('e' * 1000)", "output-limit"),
    "output of a child": ("import subprocess\nsubprocess.run(['yes'])", "output-limit"),
}


@needs_proc
@pytest.mark.parametrize(("program", "status"), ENDLESS.values(), ids=ENDLESS)
def test_what_never_ends_is_ended(mode, mark, program, status):
    before, start = Counter(reward.EVENTS), time.monotonic()
    result = run_program(marked(program, mark), "", "3", limit_s=0.3 if status == "timeout" else 9)
    assert (result.status, result.returncode) == (status, None), result
    assert time.monotonic() - start < 5.0
    assert not alive(mark) and not children()
    assert reward.EVENTS - before == Counter({f"code-{status}": 1})
    assert max(len(result.stdout), len(result.stderr)) <= 1_000_000


def test_truncated_output_is_never_compared(mode):
    ok = run_program("print('x' * 99)", "", "x" * 99, output_bytes=100)
    assert ok.status == "passed"
    over = run_program("print('x' * 99, end='\\n\\n')", "", "x" * 99, output_bytes=100)
    assert over.status == "output-limit" and len(over.stdout) == 100
    assert run_program("import sys\nsys.stderr.write('x' * 101)", output_bytes=100).status == "output-limit"


@needs_bwrap
def test_only_the_program_is_charged_for_time(monkeypatch, tmp_path):
    fake_bwrap(tmp_path, monkeypatch, f'[ "$1" = --help ] || sleep 0.8\nexec {BWRAP} "$@"')
    result = run_program("print(3)", "", "3", limit_s=0.7)
    assert result.status == "passed" and result.seconds < 0.7


def test_the_limit_is_the_one_given(mode):
    assert run_program("import time\ntime.sleep(0.5)", limit_s=0.3).status == "timeout"
    assert run_program("import time\ntime.sleep(0.5)", limit_s=9).status == "passed"


FORKS = (
    "import os, time\nfor _ in range(9):\n    if not os.fork():\n        x = b'x' * (60 << 20)\n        time.sleep(5)\n"
)
MEMORY = {
    "one process, untouched": "x = bytearray(5 << 30)",
    "one process, all at once": "import time\nx = b'x' * (700 << 20)\ntime.sleep(5)",
    "one process, bit by bit": "x = []\nwhile True: x.append(b'x' * 10 ** 7)",
    "across forks": f"{FORKS}time.sleep(5)",
}


@needs_proc
@pytest.mark.parametrize("program", MEMORY.values(), ids=MEMORY)
def test_memory_is_bounded(mode, mark, program):
    before, start = reward.EVENTS["code-memory"], time.monotonic()
    result = run_program(marked(program, mark), memory_mb=256, limit_s=5)
    assert result.status == "memory", result
    assert time.monotonic() - start < 4.0 and not alive(mark) and not children()
    assert reward.EVENTS["code-memory"] == before + 1


@needs_proc
def test_memory_that_forks_share_counts_once(mode):
    program = (
        "import os, time\nx = b'x' * (120 << 20)\nfor _ in range(5):\n    if not os.fork():\n        time.sleep(0.4)\n"
        "        os._exit(0)\nfor _ in range(5): os.wait()\nprint(3)"
    )
    assert run_program(program, "", "3", memory_mb=256).status == "passed"


@needs_proc
def test_a_memory_error_that_is_handled_is_none(mode):
    program = "try:\n    x = bytearray(5 << 30)\nexcept MemoryError:\n    print(3)"
    assert run_program(program, "", "3").status == "passed"


@needs_proc
def test_a_storm_of_forks_ends(mode, mark):
    storm = (  # bounded: it stops by itself at 400, and then they sleep
        "import os, time\ntry:\n    for _ in range(400):\n        if not os.fork():\n            time.sleep(30)\n"
        "            os._exit(0)\nexcept OSError: pass\ntime.sleep(5)\nprint(3)"
    )
    start = time.monotonic()
    result = run_program(marked(storm, mark), "", "3", processes=60, limit_s=3)
    assert result.status in ("crashed", "timeout") and result.returncode is None, result
    if os.geteuid() == 0 or mode == "plain":  # the kernel does not count here: the grader saw too many
        assert result.status == "crashed"
    assert time.monotonic() - start < 8.0 and not alive(mark) and not children()


@needs_proc
def test_threads_count_as_processes(mode):
    program = (
        "import threading, time\nthreading.stack_size(64 << 10)\n"
        "for _ in range(100): threading.Thread(target=time.sleep, args=(2,)).start()"
    )
    assert run_program(program, processes=40).status == "crashed"
    assert run_program(program.replace("(2,)", "(0.1,)"), processes=150).status == "passed"


LEAVES = {
    "a daemon": """
if not os.fork():
    os.setsid()
    if not os.fork(): {sleep}
    os._exit(0)
""",
    "a daemon that closes its files": """
if not os.fork():
    os.setsid()
    if os.fork(): os._exit(0)
    os.closerange(0, 9)
    {sleep}
""",
    "a child that holds stdout": """
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)", {mark!r}])
""",
    "a child that ignores signals": """
import signal
if not os.fork():
    for s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)
    {sleep}
""",
    "a manager of lists": """
from multiprocessing import Manager
x = Manager().list([1])
""",
    "thirty children": """
for _ in range(30):
    if not os.fork(): {sleep}
""",
    "a process group of its own": """
if not os.fork():
    os.setpgid(0, 0)
    {sleep}
""",
}


SEEN = """
import glob, time
def seen(path):
    try: return {mark!r} in open(path).read()
    except OSError: return False
while sum(map(seen, glob.glob("/proc/[0-9]*/cmdline"))) < 2: time.sleep(0.01)
print(3, flush=True)
"""


@needs_proc
@pytest.mark.parametrize("left", LEAVES.values(), ids=LEAVES)
def test_nothing_outlives_the_call(mode, mark, left):
    sleep = f"os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(60)', {mark!r}])"
    program = marked(left.format(sleep=sleep, mark=mark) + SEEN.format(mark=mark), mark)  # ends once it is not alone
    result = run_program(f"{program}os._exit(0)", "", "3")
    assert not alive(mark) and not children()
    assert result.status == "passed" and result.seconds < 5.0, result
    result = run_program(f"{program}time.sleep(60)", limit_s=0.3)
    assert result.status == "timeout" and not alive(mark) and not children()


@needs_proc
def test_many_ends_leave_no_zombie_no_file_and_no_folder(mode, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = sorted(os.listdir(tmp_path)), len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(6):
        run_program("while True: pass", limit_s=0.05)
        run_program("while True: print(1)", output_bytes=10)
        run_program("import os\nos.mkdir('a')\nopen('a/b', 'w')\nos.chmod('a', 0)\n1 / 0")
        run_program("print(1)", "x" * 100_000, "2")
    assert not children()
    assert (sorted(os.listdir(tmp_path)), len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_signals_and_timers_of_the_grader_are_left_alone(mode):
    rang = []
    before = [signal.getsignal(s) for s in range(1, 32)]
    old = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        assert run_program("import time\ntime.sleep(0.6)\nprint(3)", "", "3").status == "passed"
        assert rang == [1]
    finally:
        signal.signal(signal.SIGALRM, old)
    assert [signal.getsignal(s) for s in range(1, 32)] == before


def test_many_threads_grade_at_once(mode):
    jobs = [("print(3)", "passed"), ("print(4)", "wrong"), ("1/0", "crashed"), ("while True: pass", "timeout")] * 4
    jobs += [("while True: print(1)", "output-limit"), ("x = bytearray(9 << 30)", "memory")] * 4
    with ThreadPoolExecutor(8) as pool:
        results = list(
            pool.map(lambda job: run_program(job[0], "", "3", limit_s=0.5 if "pass" in job[0] else 30), jobs)
        )
    assert [r.status for r in results] == [status for _, status in jobs]
    if os.path.isdir("/proc"):
        assert not children()


def test_the_limits_that_a_program_sees(mode):
    report = "import resource as r\nfor n in {names}: print(n, *r.getrlimit(getattr(r, 'RLIMIT_' + n)))"
    names, mib = ["CORE", "CPU", "AS", "FSIZE", "NOFILE", "STACK", "NPROC"], 1 << 20
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (4 << 20, hard))  # lower than the program's
    try:
        result = run_program(report.format(names=names), limit_s=2.5, file_mb=5, memory_mb=300, processes=77)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
    seen = {line.split()[0]: [int(n) for n in line.split()[1:]] for line in result.stdout.splitlines()}
    assert (seen["CORE"], seen["FSIZE"], seen["NOFILE"]) == ([0, 0], [5 * mib] * 2, [256] * 2), result
    assert (seen["CPU"][0], seen["STACK"]) == (4, [8 * mib, hard])
    if sys.platform == "linux":
        assert seen["AS"] == [1324 * mib] * 2
    if mode == "bwrap" and [int(n) for n in os.uname().release.split(".")[:2]] >= [5, 14]:
        assert seen["NPROC"] == [78] * 2  # the launcher is one; outside the sandbox it would count the user's own


def test_cpu_time_beyond_the_wall_clock_is_a_timeout(mode):
    program = "import time\nfrom threading import Thread\nwhile time.process_time() < 9: pass"
    early = f"import resource as r\nr.setrlimit(r.RLIMIT_CPU, (1, 9))\n{program}"
    assert run_program(early, limit_s=6).status == "timeout"


# ---------------------------------------------------------------------------------------------------------------
# What a program can see and touch

WALK = """
import os, sys
skip = ("/proc", "/usr", "/sys", sys.prefix, sys.base_prefix)
for top, folders, files in os.walk("/"):
    folders[:] = [f for f in folders if not os.path.join(top, f).startswith(skip)]
    for name in files:
        path = os.path.join(top, name)
        if "SECRET" in name: print("name", path)
        try:
            if os.path.isfile(path) and os.path.getsize(path) < 9999 and b"SECRET-" in open(path, "rb").read():
                if path != os.path.abspath(__file__): print("content", path)
        except OSError: pass
print("end")
"""


@needs_bwrap
def test_no_file_of_the_user_can_be_found(monkeypatch, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    with tempfile.NamedTemporaryFile("w", dir=HERE.parent, prefix=".tmp-SECRET", suffix=".txt") as in_repo:
        (home / "SECRET.txt").write_text("SECRET-1")
        print("SECRET-2", file=in_repo, flush=True)
        monkeypatch.chdir(HERE.parent)
        assert run_program(WALK, "", "end", limit_s=20).stdout == "end\n"
        for path in (
            home,
            home / "SECRET.txt",
            in_repo.name,
            HERE,
            "/etc/passwd",
            "/etc/hostname",
            "/home",
            "/sys",
            "/run",
        ):
            assert run_program(f"import os\nprint(os.path.exists({str(path)!r}))", "", "False").status == "passed", path


@needs_bwrap
def test_a_project_that_is_its_own_environment_stays_hidden(monkeypatch, tmp_path):
    """After `python -m venv .` sys.prefix is the project's folder, after `conda create` it may hold anything."""
    (tmp_path / "lib").mkdir()
    for name in ("SECRET.txt", "lib/module.py"):
        (tmp_path / name).write_text("SECRET")
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert run_program(f"import os\nprint(os.listdir({str(tmp_path)!r}))").stdout == "['lib']\n"


def test_the_walk_finds_what_is_there(tmp_path, monkeypatch):
    unsandboxed(monkeypatch, tmp_path)
    (tmp_path / "SECRET.txt").write_text("SECRET-1")
    result = run_program(WALK.replace('os.walk("/")', f"os.walk({str(tmp_path)!r})"), "", "end")
    assert "name" in result.stdout and "content" in result.stdout


def test_the_environment_is_scrubbed(mode, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "SECRET")
    monkeypatch.setenv("PYTHONPATH", "/SECRET")
    result = run_program("import os\nfor k, v in sorted(os.environ.items()): print(k, v)")
    names = {line.split()[0] for line in result.stdout.splitlines()}
    assert "SECRET" not in result.stdout and {"PATH", "HOME", "LANG"} <= names
    known = set(reward.ENVIRONMENT) | {"PWD", "LC_CTYPE", "__CF_USER_TEXT_ENCODING"}
    assert names <= known
    assert (
        run_program("print(hash('a'), sorted(map(hash, 'bc')))").stdout
        == run_program("print(hash('a'), sorted(map(hash, 'bc')))").stdout
    )


@needs_bwrap
def test_no_process_of_the_grader_can_be_seen(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "SECRET")  # in the environment of what this process starts
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(30)", "SECRET"])
    look = (
        "import os\npids = sorted(int(p) for p in os.listdir('/proc') if p.isdigit())\nprint(pids, os.getppid())\n"
        "for p in pids:\n    for n in ('environ', 'cmdline', 'mem', 'fd/1', 'fd/3', 'cwd', 'root'):\n        try:\n"
        "            f = f'/proc/{p}/{n}'\n            t = open(f, 'rb').read(9999) if p != os.getpid() else b''\n"
        "            print(p, n, b'SEC' b'RET' in t, '424' '242' in str(t))\n        except OSError: pass\n"
    )
    try:
        result = run_program(look, "", "424242")
    finally:
        sleeper.kill()
        sleeper.wait()
    assert result.status == "wrong" and "[1, 2] 1" in result.stdout and "True" not in result.stdout, result
    assert "1 environ" not in result.stdout and "1 mem" not in result.stdout and "1 fd" not in result.stdout


@needs_bwrap
def test_the_report_of_the_launcher_cannot_be_forged():
    forge = """
import os
for path in [f"/proc/{p}/fd/{fd}" for p in (1, os.getpid()) for fd in range(3, 20)]:
    try:
        os.write(os.open(path, os.O_WRONLY), b"0\\n")
        print("forged", path)
    except OSError: pass
for fd in range(3, 20):
    try: print("forged", os.write(fd, b"0\\n"))
    except OSError: pass
os._exit(5)
"""
    result = run_program(forge, "", "")
    assert (result.status, result.returncode, result.stdout) == ("crashed", 5, "")


@needs_bwrap
def test_nothing_outside_can_be_written():
    writes = """
import os, sys
folders = ["/", "/usr", "/usr/lib", "/etc", "/dev", "/home", "/root", "/var"]
folders += [os.path.dirname(os.__file__), sys.prefix + "/lib"]
paths = [os.path.join(f, "x-of-a-test") for f in folders]
paths += ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname"]
for path in paths:
    try:
        os.close(os.open(path, os.O_WRONLY | (0 if path.startswith("/proc") else os.O_CREAT)))
        print("opened", path)
    except OSError: pass
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print([name for name in status if name.startswith("Cap") and int(status[name], 16)], int(status["NoNewPrivs"]))
"""
    assert run_program(writes).stdout == "[] 1\n"


FILL = {
    "folder": "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').write(bytes(1 << 20))",
    "tmp": "n = 0\nwhile True:\n    n += 1\n    open(f'/tmp/f{n}', 'wb').write(bytes(1 << 20))",
    "shm": "n = 0\nwhile True:\n    n += 1\n    open(f'/dev/shm/f{n}', 'wb').write(bytes(1 << 20))",
}


@needs_bwrap
@pytest.mark.parametrize("program", FILL.values(), ids=FILL)
def test_what_can_be_written_is_bounded(program):
    result = run_program(program, file_mb=2)
    assert result.status == "crashed" and "No space left" in result.stderr, result


@needs_bwrap
@pytest.mark.parametrize("program", FILL.values(), ids=FILL)
def test_an_old_bwrap_without_sizes_is_watched(monkeypatch, program):
    monkeypatch.setattr(reward, "sizes_tmpfs", lambda bwrap: False)
    result = run_program(program, file_mb=2)
    assert (result.status, result.returncode) == ("memory", None), result
    assert run_program("open('x', 'w').write('3')\nprint(open('x').read())", "", "3").status == "passed"


@needs_bwrap
def test_empty_files_are_bounded():
    result = run_program("n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'wb').close()", file_mb=1, limit_s=20)
    assert result.status == "memory", result


def test_the_network(mode):
    connect = (
        "import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}), timeout=2)\n    print('connected')\n"
        "except OSError: print('no')"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run_program(connect.format(port=server.getsockname()[1]))
    assert result.stdout == {"bwrap": "no\n", "plain": "connected\n"}[mode]  # outside of it nothing is isolated


@needs_bwrap
def test_an_abstract_socket():
    name = f"\0{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        connect = f"socket.socket(socket.AF_UNIX).connect({name!r})"
        program = f"import socket\ntry:\n    {connect}\n    print('connected')\nexcept OSError: print('no')"
        assert run_program(program).stdout == "no\n"
        socket.socket(socket.AF_UNIX).connect(name)  # from here it can be reached


HARM = {
    "kills its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kills all": "try: os.kill(-1, signal.SIGKILL)\nexcept OSError: pass",
    "stops its parent": "os.kill(os.getppid(), signal.SIGSTOP)",
    "sends everything": "for s in range(1, 65):\n    try: os.kill(1, s)\n    except OSError: pass",
    "kills its group": "os.killpg(os.getpgid(os.getppid()), signal.SIGKILL) if os.getpgid(os.getppid()) else None",
}


@needs_bwrap
@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_program_cannot_hurt_its_parents(harm):
    result = run_program(f"import os, signal, time\n{harm}\ntime.sleep(0.1)\nprint(3)", "", "3")
    assert result.status == "passed", result


@needs_proc
@pytest.mark.parametrize("harm", ["stops its parent", "kills its parent"])
def test_an_unprotected_program_only_hurts_its_launcher(monkeypatch, tmp_path, mark, harm):
    unsandboxed(monkeypatch, tmp_path)
    program = (
        f"import os, signal, time\n{HARM[harm]}\ntime.sleep({30 if 'kills' in harm else 0.1})\nprint(3, flush=True)"
    )
    start = time.monotonic()
    assert code_correct(answer(marked(program, mark)), [("", "3")], limit_s=0.5) is False  # and no SandboxError
    assert time.monotonic() - start < 1.5  # a stopped launcher would reap nothing
    assert gone(mark) and not children()


# ---------------------------------------------------------------------------------------------------------------
# Where the machinery fails


def fake_bwrap(tmp_path, monkeypatch, script: str) -> None:
    (tmp_path / "bin").mkdir(exist_ok=True)
    path = tmp_path / "bin" / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(reward, "RETRY_S", (0.01, 0.01, 0.01))


def test_without_bwrap_nothing_runs(monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert reward.ALLOW_UNSANDBOXED is False
    grade = lambda: code_correct(answer("print(3)"), [("", "3")])  # noqa: E731
    for call in (lambda: run_program("print(3)"), grade, reward.check_sandbox):
        with pytest.raises(SandboxError) as error:
            call()
        message = str(error.value)
        assert "apt install bubblewrap" in message and "--allow-unsandboxed-code" in message and "\n" not in message
    assert issubclass(SandboxError, OSError)
    assert not code_correct("<think>x</think>no answer", [("", "3")])  # there is nothing to run


BROKEN = {
    "no namespaces": ("echo 'bwrap: Creating new namespace failed' >&2; exit 1", "namespace failed"),
    "a missing mount": ("exec {bwrap} --ro-bind /does/not/exist /x \"$@\"", "does/not/exist"),
    "no interpreter": ("exec {bwrap} --unshare-all --tmpfs / -- \"$@\"", "bwrap"),
    "no message": ("exit 0", ""),
    "a false start": ("echo 3; exit 0", ""),
    "killed": ("kill -9 $$", ""),
}  # fmt: skip


@pytest.mark.parametrize(("script", "message"), BROKEN.values(), ids=BROKEN)
def test_a_sandbox_that_fails_is_no_verdict(monkeypatch, tmp_path, script, message):
    if "{bwrap}" in script and not WORKS:
        pytest.skip("needs bubblewrap")
    fake_bwrap(tmp_path, monkeypatch, script.format(bwrap=BWRAP))
    before = reward.EVENTS["sandbox-error"]
    result = run_program("print(3)", "", "3")
    assert (result.status, result.returncode) == ("sandbox-error", None) and message in result.stderr, result
    with pytest.raises(SandboxError, match="--allow-unsandboxed-code"):
        code_correct(answer("print(3)"), [("", "3")])
    assert reward.EVENTS["sandbox-error"] == before + 5
    monkeypatch.setattr(reward, "ALLOW_UNSANDBOXED", True)
    assert run_program("print(3)", "", "3").status == "passed"
    assert not code_correct(answer("print(4)"), [("", "3")])


@needs_bwrap
def test_a_sandbox_that_fails_twice_is_tried_again(monkeypatch, tmp_path):
    count = tmp_path / "count"
    fake_bwrap(
        tmp_path,
        monkeypatch,
        f'[ "$1" = --help ] || echo x >> {count}\n[ $(wc -l < {count}) -gt 2 ] || exit 1\nexec {BWRAP} "$@"',
    )
    before = reward.EVENTS["sandbox-error"]
    assert code_correct(answer("print(3)"), [("", "3")])
    assert reward.EVENTS["sandbox-error"] == before + 2


def test_a_sandbox_that_never_starts(monkeypatch, tmp_path):
    fake_bwrap(tmp_path, monkeypatch, 'echo "bwrap: waiting" >&2; [ "$1" = --help ] || sleep 30')
    monkeypatch.setattr(reward, "START_S", 0.3)
    start = time.monotonic()
    result = run_program("print(3)", limit_s=0.1)
    assert result.status == "sandbox-error" and "waiting" in result.stderr and time.monotonic() - start < 3.0


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_machine_without_room_is_no_verdict(mode, monkeypatch, code):
    def full(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    fds = len(os.listdir("/dev/fd"))
    run_program("print(3)")  # what is looked up once is
    monkeypatch.setattr(subprocess, "Popen", full)
    monkeypatch.setattr(reward, "RETRY_S", (0.01,))
    result = run_program("print(3)", "", "3")
    assert result.status == "sandbox-error" and os.strerror(code) in result.stderr
    with pytest.raises(SandboxError):
        code_correct(answer("print(3)"), [("", "3")])
    assert len(os.listdir("/dev/fd")) == fds


def test_an_interpreter_that_vanishes_is_no_verdict(monkeypatch, tmp_path):
    unsandboxed(monkeypatch, tmp_path)
    once = tmp_path / "python"
    once.write_text(f'#!/bin/sh\nrm {once}\nexec {sys.executable} "$@"\n')
    once.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(once))
    result = run_program("print(3)", "", "3")
    assert result.status == "sandbox-error" and not once.exists(), result


@needs_bwrap
def test_a_sandbox_killed_from_outside_is_no_verdict(mark):
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_program, marked("import time\ntime.sleep(20)", mark), "", "", limit_s=10)
        assert until(lambda: alive(mark))
        for line in children():
            if "(bwrap)" in line:
                os.kill(int(line.split()[0]), signal.SIGKILL)
        assert run.result().status == "sandbox-error"
    assert gone(mark) and not children()


@needs_proc
def test_the_death_of_the_grader_ends_its_programs(mode, mark, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # its folder is the one thing that a killed grader leaves
    code = "import sys, reward\nreward.ALLOW_UNSANDBOXED = True\nreward.run_program(sys.stdin.read(), limit_s=60)"
    grader = subprocess.Popen([sys.executable, "-c", code], cwd=HERE.parent, stdin=subprocess.PIPE)
    grader.stdin.write(marked("import time; time.sleep(60)", mark).encode())
    grader.stdin.close()
    assert until(lambda: alive(mark))
    grader.kill()
    grader.wait()
    assert gone(mark)


# ---------------------------------------------------------------------------------------------------------------
# The cases handed to this project, where they are at hand


@needs_bwrap
@pytest.mark.skipif(not CASES.exists(), reason="the shared cases are not here")
def test_handed_cases(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "x")

    def check(row: dict) -> str | None:
        given = {"limit_s": row.get("limits", {}).get("wall_s", 6.0)}
        given |= {k: v for k, v in row.get("limits", {}).items() if k in ("output_bytes", "memory_mb")}
        tests = [(t["stdin"], t["stdout"]) for t in row["tests"]]
        response = row.get("response") or answer(row["program"])
        got, want = code_status(response, tests, **given), row["expect"]
        ok = want == "any" or (got == "timeout" if want == "timeout" else (got == "passed") == (want == "pass"))
        return None if ok else f"{row['id']}: {got}"

    rows = [json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()]
    with ThreadPoolExecutor(6) as pool:
        assert not [fault for fault in pool.map(check, rows) if fault]
    assert len(rows) > 50 and not children()
