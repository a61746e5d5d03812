"""Prompts, the exchange (a draft's summary with its answer withheld), and the batched KV-cache sampler.

Read `sample_naive` first: ten lines, no cache, no batch, and what `sample` computes faster.
The shape alphabet stands at the head of model.py.
"""

from __future__ import annotations

import copy
import math
import re
import sys
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import takewhile

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from model import Pair, cache_argument, first_line, next_logits
from reward import THINK_CLOSE, THINK_OPEN, extract_answer, math_equal, rational

# ---------------------------------------------------------------------------------------------------------------
# Prompts. Both open with the problem, so the N challenges of one problem share a long beginning, which the sampler
# computes once. No worked example stands in them: a small model copies whatever answer an example shows.

FORMAT = (
    "Think step by step inside <think> </think>, then summarize your work in a few sentences, "
    "then give the final answer alone inside <answer> </answer>."
)
DRAFT_PROMPT = "{problem}\n\nSolve this problem. " + FORMAT
CHALLENGE_PROMPT = (
    "{problem}\n\nAnother solver worked on this problem. Its summary follows; its final answer is withheld, and its "
    "work may be wrong. Use what helps and solve the problem yourself. " + FORMAT + "\n\nSummary:\n{summary}"
)
NO_SUMMARY = "(the other solver ran out of room before it could summarize)"
WITHHELD = "[withheld]"


def draft_prompt(tokenizer, question: str) -> list[int]:
    """Prompt ids of the drafter: the plain problem."""
    return chat_ids(tokenizer, DRAFT_PROMPT.replace("{problem}", question))


def challenge_prompt(tokenizer, question: str, summary: str) -> list[int]:
    """Prompt ids of the challenger: (x, s(a)), a fresh single turn. It is built without access to the gold answer."""
    # Cut at the placeholder first: whatever question and summary hold, even "{summary}", is data, never formatted.
    head, tail = CHALLENGE_PROMPT.split("{summary}")
    return chat_ids(tokenizer, head.replace("{problem}", question) + summary + tail)


def chat_ids(tokenizer, content: str) -> list[int]:
    """Ids of one user turn through the family's own chat template, thinking on, with the assistant to speak.

    A template ignores the switches that it does not know. Llama 3.2 would write today's date: prompts, and with them
    the noise that is keyed by their ids, would change overnight.
    """
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=True,
        date_string="26 Jul 2024",
    )
    return tokenizer.encode(text, add_special_tokens=False)  # the template wrote its BOS already; a second one hurts


def opens_thought(tokenizer, prompt: Sequence[int]) -> bool:
    """Does the prompt end with an opening think tag, so that no completion will hold one? (Qwen3.5 does, Qwen3 not.)"""
    return tokenizer.decode(prompt[-8:], skip_special_tokens=False).rstrip().endswith(THINK_OPEN)


# ---------------------------------------------------------------------------------------------------------------
# s(a): what the challenger reads. First goes what tells the answer by its place or its words alone (blocks, program
# text, boxes, CUTS), then the draft's own answer where the rest concludes with it (`concludes`). Repetitions are
# bounded and loops are one pass each: a policy that loops writes 100,000 characters of anything.

INVISIBLE = re.compile(r"[\xad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0000-\U000e01ef]")
WIDE = str.maketrans("＜＞｜［］／＝％＋−", "<>|[]/=%+-")  # DeepSeek writes <｜User｜>; U+2212 is the printed minus
ANSWER_TAG = re.compile(r"(?i)<\s{0,4}(/?)\s{0,4}(?:final[_ -]?)?answer\b[^<>]{0,40}>")
FENCE = re.compile(r"(`{3,8}|~{3,8}).*?(?:\1|\Z)", re.DOTALL)
BOX = re.compile(
    r"\\?\b(?:f?boxed|fbox|framebox|bbox)\s{0,4}(?:\[[^\[\]\n]{0,40}\]\s{0,4}){0,2}\{|\\(?:boxed|fbox|framebox)(?![a-z])"
)
BARE_BOX = re.compile(r"[^\n$]{0,400}?(?=\$|\\[)\]]|[.;!?](?:\s|\Z)|\n|\Z)|[^\n$]{400}")  # "\boxed 42 is it."
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
PROGRAM_LINE = re.compile(  # a line that can only be program text
    r"[ \t]{0,40}(?:import \w|from \w+ import |def \w+ ?\(|class \w+[(:]|print ?\(|#include|using namespace |for ?\(|"
    r"if __name__|(?:int|void) main ?\(|for [\w, ]{1,30} in \w+\(|[\w, *]{1,40} = (?:int|list|map|sorted|input|sys)\b)"
)
STRUCTURE = re.compile(  # what some tokenizer reads as structure; all read it out of plain text
    r"<\|[^|<>]{0,40}\|?>|<[^|<>]{1,40}\|>"  # Qwen, Llama 3, DeepSeek; Gemma 4 has <|turn> and <turn|>
    r"|</?(?:s|bos|eos|pad|unk|mask|cls|sep|unused[0-9]{1,4}|(?:start|end)_of_[a-z]{1,20}|fim_[a-z]{1,12})>|<</?SYS>>"
    r"|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_[A-Z]{1,12}|ARGS|CALL_ID|IMG[A-Z_]{0,6}|THINK|PREFIX|SUFFIX)\]"
    r"|(?i:<\s{0,4}/?\s{0,4}(?:(?:final[_ -]?)?answer|think(?:ing)?|thought|tools?|tool_\w{1,9}|function)\b"
    r"[^<>]{0,40}>)"
)

# Statements that go whatever they state; group 1 stays, the last group is what they said.
ANSWER = "answers?|ans|réponse|antwort|respuesta|risposta|resposta|ответ(?:ом)?"
RESULT = "results?|solutions?|résultat|ergebnis|lösung|resultado|solución|risultato|solução|результат"
IS = r"(?:is|are|was|be|equals?|est|ist|lautet|es|è|é|равен|равно|является)(?![^\W_])"
IS += r"(?!\s{1,2}(?:(?:obtained|found|given|computed|reached|derived)\s)?by\s[a-z]+ing\b)"  # "is found by adding ..."
REST = r"(\S[^\n]*?)(?=[.!?]{1,3}[\"'”»)*_$]{0,4}(?:\s|\Z)|[。！？\n]|\Z)"  # to the sentence's end; 3.5 does not end it
GAP, OPEN = r"(?:[^\w.!?\n]|_){0,8}", r"[\W_]{0,8}"
SHORT = r"(\S[^\n]{0,30}?)(?=[.!]?[ *_$]{0,4}(?:\n|\Z))"
CUTS = [
    # "**Final Answer:** 42", "the answer is $42$, as wanted."
    rf"(?i)(?<![^\W_])({ANSWER}){GAP}(?:{IS}|[:：=≈≡→⇒—–]|->|- ){OPEN}{REST}",
    # "the result is 42."; "Result: 42", but a long text after "Solution:" is the work
    rf"(?i)(?<![^\W_])(?<!general )(?<!particular )({RESULT}){GAP}(?:{IS}{OPEN}{REST}|[:：=]{OPEN}{SHORT})",
    # "the answer to part (b) must be 42", "the correct choice is (C)"
    r"(?i)\b((?:the|my|our|final|correct|right|best)\s(?:answer|choice|option))\b"
    rf"[^.!?\n=:]{{0,60}}?\b{IS}\s{{1,4}}{REST}",
    # "## Final Answer", the value on a line below
    rf"(?im)(^[ \t>#*_]{{0,8}}(?:(?:final )?(?:{ANSWER})|final result)[ \t*_:#]{{0,8}}\n)\s{{0,8}}{REST}",
    # 答案是 42。
    r"((?:答案|答え|解答|正解|结果|정답|답)[^。，,\n]{0,6}?(?:是|为|為|等于|[:：=]|は|은|는))\s{0,4}" + REST,
]
CUTS = [re.compile(pattern) for pattern in CUTS]

# Numbers as people write them: NUMBER finds them, `exact` reads them.
ONES = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
ONES, TENS = ONES + " seventeen eighteen nineteen", "twenty thirty forty fifty sixty seventy eighty ninety"
NUMERALS = {word: i for i, word in enumerate(ONES.split())} | {word: 10 * i for i, word in enumerate(TENS.split(), 2)}
PARTS = "half third fourth fifth sixth seventh eighth ninth tenth"
PARTS = {word: i for i, word in enumerate(PARTS.split(), 2)} | {"halve": 2, "quarter": 4, "hundredth": 100}
WORD, PART = "|".join(sorted(NUMERALS, key=len, reverse=True)), "|".join(PARTS)
COMMA = r"(?:,|\{,\}|,?\\!|\\[,;]|[ \xa0\u2009\u202f'])"  # 1,234  1{,}234  1\,234  1 234
GROUPED = rf"(?<=[0-9]){COMMA}(?=[0-9]{{3}}(?![0-9]))"
INTEGER = rf"(?:[0-9]{{1,3}}(?:{COMMA}[0-9]{{3}}){{1,20}}(?![0-9])|[0-9]{{1,400}})"
ARG = r"\s?(?:[0-9]|\{\s?-?[0-9]{1,30}\s?\})"
PERCENT = r"(?:\s?(?:\\?%|(?i:per ?cent|prozent|pour cent|por ciento)\b))"
NUMBER = re.compile(
    rf"(?<![0-9A-Za-z_.])(?:(?:[-+]|(?<=[=≡≈] )-\s|(?<=[=≡≈])-\s)?(?:"  # "x = - 5" has a sign, "12 - 5" has none
    rf"(?:[0-9]{{1,9}}\s?)?(?:\\[dtc]?frac{ARG}{ARG}|[¼-¾⅐-⅞])"
    rf"|0x[0-9a-fA-F]{{1,30}}|[0-9]{{1,9}} [0-9]{{1,9}} ?/ ?[0-9]{{1,9}}|{INTEGER} ?/ ?{INTEGER}|0,[0-9]{{1,30}}"
    rf"|(?:{INTEGER}?\.[0-9]{{1,400}}|{INTEGER})(?:\\overline\s?(?:[0-9]|\{{[0-9]{{1,9}}\}}))?"
    r"(?:[eE][-+]?[0-9]{1,3}|\s?(?:\\times|\\cdot|[×·*])\s?10\s?\^\s?(?:-?[0-9]{1,3}|\{\s?-?[0-9]{1,3}\s?\}))?"
    rf")|(?i:(?:(?:minus|negative) )?(?:a (?:half|third|quarter|hundred|thousand)|half|{WORD})\b"
    rf"(?:[ -](?:hundred(?: and)?|thousand|{WORD}|(?:{PART})s?)\b"
    rf"| and (?:a|one|two|three) (?:half|thirds?|quarters?)\b){{0,6}})){PERCENT}?"
)
UNIT = re.compile(  # "42 cm^2", "42^\circ", "42 (mod 100)"
    r"(?:\s{0,3}(?:\^\s?\{?\s?\\circ\s?\}?|°|(?!(?:pi|sqrt|exp|ln|log|sin|cos|tan|mod)\b)[A-Za-z]{2,20}(?![A-Za-z])"
    r"|\(mod [^()]{1,20}\)|\\pmod\s?\{[^{}]{1,20}\})(?:\^?[23²³])?[./]?){0,5}\s{0,3}"
)

# The conclusion position: what stands before a value (FILL may lie between), and after it.
FILL = (
    r"(?:[\s$*_`\"'“‘~&{(\[,…€£±]|\\[(\[,;:! $]|<[a-z]{1,6}>|\\(?:q?quad|left|bf|emph|underline|pm"
    r"|(?:text|math|display)\w{0,5})(?![A-Za-z])|\b(?:an?|the|just|only|exactly|simply|precisely|therefore|thus|then|also"
    r"|indeed|about|approximately|of course|again)\b){0,10}$"
)
STATES = re.compile(  # "x = 42", "it equals 42", "adds up to 42", "plugging in 42"; "[withheld], or 42"
    r"(?i)(?:(?<![!<>])[=≡≈≅:：→⇒⟹∴]|[-=]>|\\(?:equiv|approx|simeq|Rightarrow|implies|therefore)(?![A-Za-z])|是|为|為|等于"
    r"|得到?|即|共有?|有|故|因此|所以|は|은|는|\[withheld\]\W{0,3}(?:or|i\.e\.|that is|which is|and|\()|[a-z]{2}\sto"
    r"|(?<![^\W_])(?:is|are|was|were|be|been|equals?|gets?|got|gives|gave|giving|yields?|yielding|obtain\w{0,3}|find"
    r"|found|becomes?|leaves|leaving|makes?|totals?|totalling|answer(?: of)?|namely|i\.e\.|that is|value"
    r"|(?:plug|substitut|verif|check)\w{0,5}(?: back)?(?: in| with| for)?|est|vaut|donne|égale?(?: à)?|ist|sind|beträgt"
    r"|ergibt|gleich|lautet|es|son|vale|igual a|da|равен|равно|равна|равняется|получаем|составляет))" + FILL
)
HINTS = re.compile(  # the same where the clause ends after the value: "so 42.", "we have 42 in total"
    r"(?i)(?<![^\W_])(?:so|hence|thus|therefore|then|give|have|has|only|as|at|remains?|count|(?<![0-9$] )or|to"
    r"|(?:total|sum|factor|remainder|maximum|minimum)(?: of)?)[,:]?" + FILL
)
ENDS = re.compile(
    r"(?:\s(?:in total|in all|altogether|overall)|[\s$*_`\"'”’)\]}]|\\[)\],;:! ]|\\\\){0,6}"
    r"(?:[.;!?。；|](?![0-9])|[,，](?!\s?[0-9$])|\n|\Z)"
)
ALONE = [  # (before, after)
    (  # on a line, in a table cell, after a bullet or #### or in display mathematics
        r"[\n|][ \t>#]{0,8}(?:(?:[-*+•]|\(?[0-9a-z][.)])[ \t]{1,3})?"
        r"(?:[ \t$*_`±]|\\[(\[]|\\pm|\\(?:text|math)\w{0,4}\{){0,6}$",
        r"(?:[ \t$*_`}]|\\[)\]]){0,8}[.!。]?(?:[ \t$*_`]|\\[)\]]){0,6}[\n|]",
    ),
    (r"(?:\*\*|__)\$?$", r"\$?(?:\*\*|__)"),
    (r"\A\n[$*\s]{0,4}$", r"[$*]{0,4}(?:[.!,]\s|\s?[—–]|\s-\s)"),  # the first word: "42. We count ..."
    (  # "42 is the answer", "C is correct", "42 works"
        r"$",
        r"(?i)\W{0,4}(?:works|satisfies|(?:is|must be|as)(?: indeed)?(?: the| our)?(?: final| only)? (?:answer|result"
        r"|solution|total|correct|right|required|desired|wanted))\b",
    ),
]
ALONE = [(re.compile(before), re.compile(after)) for before, after in ALONE]
# Never: in a sub- or superscript, inside a longer number or word, as the first term of "1 - 1/n".
SCRIPT = re.compile(r"(?:(?<!_)_|\^)\s?(?:\{[^{}]{0,40})?$")
GOES_ON = re.compile(
    r"[0-9A-Za-z_]|\((?![A-Za-z]{2})|[.,][0-9]|-[A-Za-z]|!\s?[-+=*/^]|\s(?:times|plus|minus)\s[\d$(\\]|\s(?:hundred|thousand)\b"
    r"|[)\]}]{0,2}[ \t]{0,3}(?:[-+/·×÷⋅]|\*(?!\*)|\^(?!\s?\{?\s?\\circ))[ \t]{0,3}(?:[0-9\\({]|[A-Za-z](?![A-Za-z]))"
    r"|\s?\\(?:cdot|times|div|pm|mp|[dt]?frac|sqrt|pi|binom|ln|log|sin|cos|tan|infty)(?![A-Za-z])"
)
EQUATES = re.compile(r"(?:[\s$*)\]}]|\\[)\]]){0,4}(?:[=≡≈<>≤≥]|\\(?:equiv|approx|leq?|geq?)(?![A-Za-z]))")
OPERATOR = re.compile(
    r"(?:[+/^·×÷⋅<>≤≥]|(?:[0-9)}\]]|\b[A-Za-z])\s?[-*]|\\(?:cdot|times|div|pm|leq?|geq?)|mod|modulo)[\s({$]{0,4}$"
)
PROSE = (  # a word before or after the value
    re.compile(
        r"(?i)(?<![\\^_])\b(?!(?:[pb]?mod|modulo|steps?|cases?|equation|lemma|part|withheld)\b)[^\W\d_]{2,30}"
        r"(?:[^\w\\]|\\[(\[]){0,4}$"
    ),
    re.compile(r"(?:[^\w\\]|\\[)\]]){1,4}(?!withheld|[pb]?mod)[^\W\d_]{2}"),
)
# Answers that are no numbers
FORMULA = re.compile(  # after a sign or word of STATES, up to the next word or sign
    r"(?:[=≡≈:]|withheld\]\W{0,3}or\s|\\(?:equiv|approx)(?![a-z])|\$\$|\\\[|\b(?:is|are|be|equals?|gives?|get|yields?|obtain|to)\s)[\s$]{0,4}"
    r"(?:\\[(\[])?\s{0,3}((?:\\[a-zA-Z]{1,20}|\\[{},;:!% |]|(?:pi|sqrt|exp|ln|log|sin|cos|tan)(?![A-Za-z])"
    r"|[A-Za-z](?![A-Za-z])|[^\\A-Za-z\n$;:=≡≈。|]){1,120})"
)
OPTION = re.compile(r"(?i)(?:\b(?:option|choice|answer|choose|pick|select|letter)|选)\W{0,4}\Z")
CONCLUDING = re.compile(
    r"(?i)\b(?:so(?! that| far)|hence|thus|therefore|conclu\w{1,6}|consequently|it follows|which means|indeed)\b"
    r"|∴|因此|所以|故"
)


def summarize(response: str) -> str:
    """s(a): what the drafter wrote after its closed thought, with its final answer withheld. Never sees the gold.

    Gone: answer blocks, boxes, program text, sentences and headings that conclude ("so the answer is ..."), and the
    draft's own answer, in every spelling that is equal, where the text concludes with it ("= 42", "forty-two in
    total", a table cell). Kept: the worked steps and the given data. Role tokens and tags are defused, because they
    would be tokenised as structure in the challenger's prompt. NO_SUMMARY if the thought never closed.
    Does not know: a code agreed upon; a sum left to the reader ("6 times 7"); a small number in passing ("the 42
    pairs"); Yes or No told in other words, outside a conclusion; an answer never tagged, boxed or announced.
    """
    _, closed, text = response.rpartition(THINK_CLOSE)
    if not closed:
        return NO_SUMMARY
    text = plain_characters(text)
    answer = plain_characters(extract_answer(response) or "").strip()
    # 1. answer blocks, from the first opening tag to the last closing one; an unclosed block runs to the end
    tags = list(ANSWER_TAG.finditer(text))
    if opening := next((tag for tag in tags if not tag[1]), None):
        end = max((tag.end() for tag in tags if tag[1] and tag.start() > opening.start()), default=len(text))
        text = text[: opening.start()] + text[end:]
    # 2. program text: for programming problems the program is the answer
    text = mask_program(FENCE.sub(WITHHELD, text), answer)
    # 3. boxes, structure, conclusions; what they said last is the draft's answer where no block says it
    text, said = mask_boxes(text)
    text = STRUCTURE.sub(" ", text)

    def cut(match: re.Match) -> str:
        said.append(match[match.lastindex][:60])
        return match[1] + " " * match[1][-1].isalpha() + WITHHELD

    for pattern in CUTS:
        text = pattern.sub(cut, text)
    # 4. the draft's own answer
    answer = answer or (said[-1] if said else "")
    return (mask_answer(f"\n{text}\n", answer) if answer and not is_program(answer) else text).strip()


def plain_characters(text: str) -> str:
    """Without invisible characters, and with 0-9 for every script's digits: ４２ and 4<zero-width space>2 are 42."""
    text = INVISIBLE.sub("", text).translate(WIDE)
    return re.sub(r"(?![0-9])\d", lambda digit: str(unicodedata.decimal(digit[0])), text)


def mask_spans(text: str, spans) -> str:
    """Replace (start, end) pieces of a text, in order, by WITHHELD; pieces that overlap an earlier one are left out."""
    out, at = [], 0
    for start, end in spans:
        if start >= at:
            out += [text[at:start], WITHHELD]
            at = end
    return "".join(out) + text[at:]


def mask_boxes(text: str) -> tuple[str, list[str]]:
    r"""Mask \boxed{...} and its like, braces balanced; one never closed runs to the end. Returns the contents too."""
    spans, said, at = [], [], 0
    for box in BOX.finditer(text):
        if box.start() < at:
            continue  # inside the box just masked
        at, depth = len(text), 1
        if box[0][-1] != "{":
            at = BARE_BOX.match(text, box.end()).end()
        else:
            for brace in BRACES.finditer(text, box.end()):
                depth += {"{": 1, "}": -1}.get(brace[0], 0)
                if depth == 0:
                    at = brace.end()
                    break
        spans.append((box.start(), at))
        said.append(text[box.end() : at].removesuffix("}"))
    return mask_spans(text, spans), said


def is_program(answer: str) -> bool:
    return bool(FENCE.search(answer)) or any(PROGRAM_LINE.match(line) for line in answer.split("\n"))


def mask_program(text: str, answer: str) -> str:
    """Mask bare program text: lines of the answer's program, lines that can only be a program's, what they indent."""
    lines = [line.strip() for line in answer.split("\n")] if is_program(answer) else []
    program = {line: "".join(line.split()) for line in lines if line and not FENCE.match(line)}
    squeezed, whole = set(program.values()), "".join(program.values())
    out, inside = [], False
    for line in text.split("\n"):
        inside = inside and (line[:1] in ("", " ", "\t") or not line.strip())
        inside = inside or "".join(line.split()) in squeezed or bool(PROGRAM_LINE.match(line))
        if not (inside and out and out[-1] == WITHHELD):
            out.append(WITHHELD if inside else line)
    text = "\n".join(out)
    for line in sorted(program, key=len)[-50:]:  # inside a sentence
        text = text.replace(line, WITHHELD) if len(line) > 11 and not line.isalpha() else text
    inline = ((m.span(), "".join(m[1].split())) for m in re.finditer(r"`([^`\n]{1,300})`", text))
    return mask_spans(text, [span for span, code in inline if len(code) > 5 and code in whole])  # `4 9` may be a sample


def mask_answer(text: str, answer: str) -> str:
    """Mask the draft's answer (number, option, words or LaTeX) where a text, framed by line ends, concludes with it."""
    flat = re.sub(r"\\(?:text|math)[a-z]{0,4}\s?\{([^{}]*)\}", r" \1 ", answer).strip(" .$*")
    if option := re.fullmatch(r"\(?\s*([A-Z])\s*[).]?", flat):
        return mask_spans(text, option_spans(text, option[1]))
    if numbers := values(flat):
        text = mask_spans(text, number_spans(text, numbers))
        return mask_spans(text, number_spans(text, numbers)) if WITHHELD in text else text  # "[withheld], or 50%"
    if re.fullmatch(r"[^\W\d_]+(?:[\s'-]+[^\W\d_]+){0,9}", flat):
        return mask_spans(text, word_spans(text, flat))
    for spelling in dict.fromkeys(
        (answer, re.sub(r"\A\s*\S{1,4}\s*(?:=|\\in(?![a-z]))", "", answer))
    ):  # y = -2x, x \in [-2, 7]
        text = mask_spans(text, literal_spans(text, spelling.strip(" .$*")))
    if re.search(r"[\\^√π/]|[+*-]\s?[a-z]|[a-z]\s?[+*-]|[0-9]\s?i\b", answer) and not STRUCTURE.search(answer):
        masked = mask_spans(text, equal_spans(text, answer))
        return masked if masked == text else mask_spans(masked, equal_spans(masked, answer))
    return text


def concludes(text: str, start: int, end: int, unusual: bool = False) -> bool:
    """Does a text conclude with the value it holds at start:end? An unusual value (4242, 0.375) can only be the answer:
    it concludes wherever prose holds it and it is neither a term nor a left side."""
    return concluding(text[max(0, start - 60) : start], text[end : end + 60], unusual)


@lru_cache(maxsize=4096)  # a loop repeats its contexts
def concluding(before: str, after: str, unusual: bool) -> bool:
    if SCRIPT.search(before) or GOES_ON.match(after):
        return False
    if STATES.search(before) or any(b.search(before) and a.match(after) for b, a in ALONE):
        return True
    if EQUATES.match(after):
        return False
    if HINTS.search(before) and ENDS.match(after):
        return True
    return unusual and not OPERATOR.search(before) and bool(PROSE[0].search(before) or PROSE[1].match(after))


@lru_cache(maxsize=4096)
def exact(number: str) -> Fraction | None:
    """The value of a match of NUMBER, None where that took too much for a number."""
    bare = re.sub(PERCENT + r"\Z", "", number)
    percent = bare != number
    if not re.search("[0-9¼-¾⅐-⅞]", bare):
        words = re.findall("[a-z]+", bare.lower())
        value = -spelled(words[1:]) if words[0] in ("minus", "negative") else spelled(words)
    elif bare.startswith("0x"):
        value = Fraction(int(bare, 16))
    else:
        bare = bare if "/" in bare else re.sub(GROUPED, ",", bare)
        bare = re.sub(r"\A0,(?=[0-9])", "0.", re.sub("([0-9])(?=[¼-¾⅐-⅞])", r"\1 ", bare))  # 2½ is 2 1/2
        value = rational(unicodedata.normalize("NFKC", re.sub("[×·]", "*", bare)).replace("⁄", "/"))
    return value / 100 if percent and value is not None else value


def spelled(words: list[str]) -> Fraction:
    """forty two, a hundred and one, three eighths, two and a half. Well formed, because NUMBER matched it."""
    if words[-3:-2] == ["and"] and words[-1].removesuffix("s") in PARTS:
        return spelled(words[:-3]) + spelled(words[-2:])
    done = run = 0
    for word in words:
        if word in ("hundred", "thousand"):
            run = (run or 1) * (100 if word == "hundred" else 1000)
            done, run = (done + run, 0) if word == "thousand" else (done, run)
        elif (part := word.removesuffix("s")) in PARTS:
            return Fraction(done + run or 1, PARTS[part])
        else:
            run += NUMERALS.get(word, 0)  # "a" and "and" count nothing
    return Fraction(done + run)


def values(answer: str) -> set[Fraction]:
    """The numbers an answer consists of, without names and units: itself, or all parts of a list. Else nothing."""
    answer = re.sub(GROUPED, ",", answer[:400])
    answer = re.sub(r"\\[()\[\]]|\\(?:left|right)(?![a-z])|\\?[$€£]|\*", "", answer).strip()
    inner, found = re.fullmatch(r"(?:\\\{|[(\[])(.*)(?:\\\}|[)\]])", answer), set()
    for part in re.split(r",(?![0-9]{3}(?![0-9]))|\band\b|\bor\b", inner[1] if inner else answer):
        part = re.sub(r"\A\s*[A-Za-z](?:_\w)?\s*(?:=|\\in\b)", "", part).strip()  # x = 2
        unsigned = re.sub(r"\A(?:\\pm|±)\s*", "", part)
        number = NUMBER.match(unsigned)
        if not number or not UNIT.fullmatch(unsigned, number.end()) or (value := exact(number[0])) is None:
            return set()
        found |= {value} if unsigned == part else {value, -value}
        found |= {100 * value} if re.search(PERCENT, number[0]) else set()  # 28 for 28% tells as much
    return found


def tells(token: str, numbers: frozenset[Fraction]) -> tuple[int, bool, bool] | None:
    """(its length, is it 10 or more, is it too common to be told from other numbers) where a match of NUMBER equals one
    of `numbers`, or is one rounded to two places or more; else None."""
    value = exact(token)
    if value not in numbers and " " in token and token[0].isdigit() and "/" not in token:
        token = token.split(" ")[0]  # "gives 42 100 times"
        value = exact(token)
    if value is None:
        return None
    percent = re.search(PERCENT + r"\Z", token)
    if percent and 100 * value in numbers:
        value *= 100  # 60% says 60
    places = re.search(r"\.([0-9]{2,9})", token)
    rounded = places and any(abs(value - n) * 10 ** len(places[1]) * 2 <= 1 for n in numbers)
    if value not in numbers and not rounded:
        return None
    digits = token[: percent.start()] if percent else token
    common = abs(value.numerator) < 1000 and value.denominator < 5 and (digits.isdigit() or abs(value) <= 12)
    return len(token), abs(value) >= 10, common


def number_spans(text: str, numbers: set[Fraction]):
    """(start, end) of the conclusions that tell one of `numbers`."""
    last = max((m.end() for m in re.finditer(r"(?<=\S)(?:[.!?]\s|\n)", text.rstrip(" .!?\n"))), default=0)
    told: dict[str, tuple | None] = {}  # a loop repeats its numbers
    matches = list(NUMBER.finditer(text))
    for match in matches:
        token, start = match[0], match.start()
        if token not in told:
            told[token] = tells(token, frozenset(numbers))
        if told[token] is None:
            continue
        if token[0] in "+-" and re.search(r"(?:[0-9)}\]]|\b[A-Za-z])\s?\Z", text[max(0, start - 3) : start]):
            continue  # 12 - 5
        length, large, common = told[token]
        end = start + length
        first_item = text[start:end] == "1" and start < 9 and not text[:start].strip()
        if first_item or (text[start:end].lower() == "one" and not ENDS.match(text, end)):
            continue
        # in the last sentence, or last of all: "Each child receives 84 candies."
        closing = large and (start > last > 0 or (last == 0 and match is matches[-1]))
        if concludes(text, start, end, closing or not common):
            yield start, end


def equal_spans(text: str, answer: str) -> list[tuple[int, int]]:
    """(start, end) of the conclusions among the last 20 formulas that the checker finds equal: some ms each."""
    found: dict[str, list[int]] = {}
    for match in FORMULA.finditer(text):
        formula = match[1].rstrip(" .,")
        if re.search("[0-9A-Za-z]", formula) and concludes(text, match.start(1), match.start(1) + len(formula)):
            found.setdefault(formula, []).append(match.start(1))
    equal = [formula for formula in list(found)[-20:] if math_equal(formula, answer)]
    return sorted((at, at + len(formula)) for formula in equal for at in found[formula])


def option_spans(text: str, letter: str):
    """(start, end) of "(C)", of the C in "option C", and of a C that the text concludes with."""
    for match in re.finditer(rf"(?<![0-9A-Za-z\\_])\(?{letter}\)?(?![0-9A-Za-z_'])", text):
        start, end = match.span()
        named = OPTION.search(text[max(0, start - 20) : start])
        concluded = concludes(text, start, end) and (ENDS.match(text, end) or ALONE[-1][1].match(text, end))
        if named or concluded or match[0] == f"({letter})":
            yield start, end


def word_spans(text: str, answer: str):
    """(start, end) of an answer in words where a sentence concludes with it. Any conclusion could tell a Yes or a No:
    of those, everything from the concluding word on."""
    verdict, word = answer.lower() in ("yes", "no", "true", "false"), rf"(?i)(?<![^\W_]){re.escape(answer)}(?![^\W_])"
    sentences = list(re.finditer(r"\s{0,9}((?:[^.!?。！？\n]|\.(?=\S))+)", text))
    for match in sentences:
        start, end = match.span(1)
        if verdict:
            opens = re.match(r"\W{0,6}(?i:yes|no|true|false)\W{0,2}(?:[,:—-]|\Z)", match[1])
            sign = opens or CONCLUDING.search(match[1]) or (match is sentences[-1] and re.search(word, match[1]))
            if sign:
                yield (start if opens or not CONCLUDING.match(sign[0]) else start + sign.start()), end
            continue
        for says in re.finditer(word, match[1]):
            at = start + says.start(), start + says.end()
            if match is sentences[-1] or CONCLUDING.search(match[1]) or concludes(text, *at):
                yield at


def literal_spans(text: str, answer: str):
    """(start, end) of the copies of an answer in LaTeX, whatever the blanks and brackets' sizes, that conclude."""
    size = r"(?:\\(?:left|right|[,;! ]|displaystyle)(?![a-zA-Z])|\s){0,4}"
    tokens = [re.sub(r"\\[dt]frac", r"\\frac", t) for t in re.findall(r"\\[a-zA-Z]+|[0-9]+|\S", answer)]
    tokens = [t for t in tokens if t not in (r"\left", r"\right", r"\displaystyle", "$")][:80]
    spelled = size.join(re.escape(t).replace(r"\\frac", r"\\[dt]?frac") for t in tokens)
    for match in re.finditer(rf"(?<![0-9A-Za-z\\]){spelled}(?![0-9A-Za-z])", text) if len(tokens) > 2 else ():
        if concludes(text, *match.span(), len(tokens) > 4 or ":" in tokens):
            yield match.span()


# ---------------------------------------------------------------------------------------------------------------
# The sampler


@dataclass
class Rollouts:
    """B sampled rows, prompt-major: row i * n + j is the j-th completion of prompt i.

    A completion keeps the end-of-turn id it stopped at (it is a decision of the policy and must be trained); a row
    with finished = False was cut at the cap. logprobs[r][t] is the sampler's own log-prob, at its temperature.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    finished: list[bool]
    logprobs: list[list[float]]

    def texts(self, pair: Pair) -> list[str]:
        """Responses y as text, without their end-of-turn id, in one form for all families. Only for reading: what is
        trained is the ids. An opening think tag that the template wrote stands before them; Gemma 4's own marks of a
        thought, special tokens, are read as think tags. Text after the end was never sampled."""
        tokenizer, texts = pair.tokenizer, []
        opened = {p: opens_thought(tokenizer, p) for p in set(map(tuple, self.prompts))}
        channels = any(token.content == "<channel|>" for token in tokenizer.added_tokens_decoder.values())
        for prompt, completion, finished in zip(self.prompts, self.completions, self.finished, strict=True):
            text = tokenizer.decode(completion[:-1] if finished else completion, skip_special_tokens=False)
            if channels:
                text = text.replace("<|channel>thought", THINK_OPEN).replace("<channel|>", THINK_CLOSE)
            texts.append(THINK_OPEN * opened[tuple(prompt)] + text)
        return texts


def row_noise(prompt: Sequence[int], k: int, steps: int, seed: int) -> np.ndarray:
    """One uniform number per token for the k-th row of this prompt, (C,) float64.

    Keyed by the prompt's own ids: a row draws the same numbers whatever else is in the batch.
    """
    return np.random.default_rng([seed, k, *prompt]).random(steps)


def choose(logits: torch.Tensor, noise: torch.Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0):
    """Pick one token per row. logits (B, V), noise (B,) in [0, 1) -> (token ids (B,), their log-probs (B,) float32).

    Inverse-CDF sampling: with the noise given, the choice is a plain function of the logits. temperature 0 is greedy.
    top_k 0 and top_p 1 are off; top-k goes first, and top-p > 0 counts what it left. The log-prob is that of the
    tempered softmax (greedy: of temperature 1) before either cuts its tail; not finite where the row's logits are not.
    """
    device = logits.device
    if device.type == "mps":  # Apple's GPU has no float64
        logits = logits.cpu()
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)  # (B, V)
    if temperature == 0:
        token = logp.argmax(-1)  # (B,)
    else:
        probs = logp.exp()  # (B, V)
        if top_p < 1 or top_k:
            ranked, order = probs.double().sort(dim=-1, descending=True)  # (B, V)
            if top_k:
                ranked[:, top_k:].zero_()
                ranked /= ranked.sum(-1, keepdim=True)
            before = ranked.cumsum(-1) - ranked  # (B, V) of the best token 0, so that it always stays
            ranked.masked_fill_(before >= top_p, 0.0)
            probs = torch.zeros_like(ranked).scatter(-1, order, ranked)
        cdf = probs.cumsum(-1, dtype=torch.float64)  # (B, V)
        # First token whose cumulated probability exceeds u * total, so never one of probability 0. The factor keeps
        # u * total below the total where rounding would reach it and point past the last token; NaN still does.
        target = noise.to(cdf) * cdf[:, -1] * (1 - 1e-12)  # (B,)
        token = torch.searchsorted(cdf, target[:, None], right=True)[:, 0].clamp(max=cdf.shape[-1] - 1)  # (B,)
    return token.to(device), logp.gather(-1, token[:, None])[:, 0].to(device)


@torch.no_grad()
def sample_naive(pair: Pair, adapter, prompts, n=1, *, max_tokens: int, temperature=1.0, top_p=1.0, top_k=0, seed=0):
    """The oracle: one row at a time, a full forward per token, no cache. `sample` returns the same, but for rounding.
    (activate: the causal LM with that adapter switched on, for inference; stop_ids: what ends a turn.)"""
    model, stops, seen, rows = pair.activate(adapter), pair.of(adapter).stop_ids, Counter(), []
    for prompt in [p for p in prompts for _ in range(n)]:
        noise, ids, logprobs = row_noise(prompt, seen[tuple(prompt)], max_tokens, seed), list(prompt), []
        while len(logprobs) < max_tokens and not (logprobs and ids[-1] in stops):
            logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[:, -1]  # (1, V)
            token, logp = choose(logits, torch.tensor(noise[len(logprobs)])[None], temperature, top_p, top_k)
            ids, logprobs = [*ids, token.item()], [*logprobs, logp.item()]
        rows.append((list(prompt), ids[len(prompt) :], ids[-1] in stops, logprobs))
        seen[tuple(prompt)] += 1
    return Rollouts(*([row[i] for row in rows] for i in range(4)))


@torch.no_grad()
def sample(
    pair: Pair,
    adapter: str | None,
    prompts: Sequence[Sequence[int]],
    n: int = 1,
    *,
    max_tokens: int | Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    max_rows: int = 256,
    max_cache_tokens: int | None = None,
) -> Rollouts:
    """n completions of every prompt by one adapter, batched, with a KV cache. The result of `sample_naive`, whatever
    the batch, but for rounding: in fp32 the same tokens, while in bf16 near ties part rows after some tokens.

    max_tokens caps every completion (or each its own: one number per row, prompt-major). At most `max_rows` rows decode
    at once, and no more than `max_cache_tokens` tokens of keys and values exist at any time (None: what `max_rows` and
    one prefill take; not counted: a passing copy of one layer's, and recurrent states, whose size no length changes).
    A row that ends leaves its place to one that waits. Raises CacheTooSmall for a prompt that the cache
    has no room for, ValueError for settings that make no sense and for a family whose cache is of a kind not known
    here, FloatingPointError, with row and token, where logits are not finite.
    """
    model, stops = pair.activate(adapter), pair.of(adapter).stop_ids
    out = Rollouts([list(p) for p in prompts for _ in range(n)], [], [], [])
    total = len(out.prompts)
    out.completions, out.logprobs = [[] for _ in range(total)], [[] for _ in range(total)]
    caps = [max_tokens] * total if isinstance(max_tokens, int) else list(max_tokens)
    if not total:
        return out
    if len(caps) != total or min(caps) < 1:
        raise ValueError(f"max_tokens must be at least 1, one for all or one for each of the {total} rows")
    if not all(out.prompts):
        raise ValueError(f"prompt {out.prompts.index([]) // n} is empty: there is nothing to continue")
    if not (temperature == 0 or 1e-6 <= temperature < math.inf) or not 0 < top_p <= 1 or top_k < 0 or max_rows < 1:
        raise ValueError(
            f"sampling needs temperature 0 or at least 1e-6, 0 < top_p <= 1, top_k at least 0 (off) and max_rows at "
            f"least 1, not {temperature}, {top_p}, {top_k} and {max_rows}"
        )

    # 1. The rows of each distinct prompt. A row's number among them keys its noise, so it draws the same numbers
    #    whatever else is in the batch.
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for r, prompt in enumerate(out.prompts):
        rows_of.setdefault(tuple(prompt), []).append(r)
    number = {r: k for rows in rows_of.values() for k, r in enumerate(rows)}

    # 2. Places: each holds one row at its full length. What a prefill makes stands beside them until it is handed out.
    places, columns, prefill_room = divide_cache(out.prompts, caps, n, max_rows, max_cache_tokens)
    slots = Slots(model, places, columns, max(caps), stops, (temperature, top_p, top_k))

    # 3. Refill and decode, in turn.
    equal = any(isinstance(layer, LinearAttentionLayer) for layer in slots.cache.layers)
    groups = deque(prefill_groups(list(rows_of), prefill_room, places, equal))
    ready: deque[tuple[int, int]] = deque()  # rows that wait for a place only: (row, line of the last prefill)
    begun, start = (), None  # a beginning that prompts share, and its cache
    while groups or ready or slots.rows:
        if len(slots.rows) < places and (groups or ready):
            if not ready:
                group, shared = groups.popleft()
                if begun != group[0][:shared]:
                    start = None  # the old one goes before the new one comes
                    begun = group[0][:shared]
                    start = prefill(model, [begun])[0] if shared else None
                lines, logits = prefill(model, group, shared, start)  # logits (b, V)
                ready.extend((r, line) for line, prompt in enumerate(group) for r in rows_of[prompt])
            taken = [ready.popleft() for _ in range(min(len(ready), places - len(slots.rows)))]
            noise = [row_noise(out.prompts[r], number[r], caps[r], seed) for r, _ in taken]
            slots.fill(taken, out.prompts, noise, lines, logits)
            if not ready:
                del lines, logits  # before the next prefill comes
        else:
            slots.decode()
        slots.harvest(out)
    out.finished = [completion[-1] in stops for completion in out.completions]
    return out


def cache_columns(tokens: int) -> int:
    """The columns of cache for a row of so many tokens: GPU kernels like multiples of 8."""
    return -(-tokens // 8) * 8


def divide_cache(
    prompts: Sequence[Sequence[int]], caps: Sequence[int], n: int, max_rows: int, max_cache_tokens: int | None
) -> tuple[int, int, int]:
    """For rows of these prompts, n of each, and these caps: places, columns of each, tokens that one prefill may take.

    Raises CacheTooSmall, with the prompt that is to blame, where there is no room for one place and one prefill.
    """
    needs = [cache_columns(len(p) + cap) for p, cap in zip(prompts, caps, strict=True)]
    columns, places, prefill_room = max(needs), min(max_rows, len(prompts)), PREFILL_TOKENS
    if max_cache_tokens is not None:
        spare = min(max_cache_tokens // 4, max_cache_tokens - columns)  # the rest is for places
        prefill_room = max(min(PREFILL_TOKENS, spare), max(map(len, prompts)))
        places = min(places, (max_cache_tokens - prefill_room) // columns)
        if places < 1:
            worst = needs.index(columns)
            raise CacheTooSmall(
                f"prompt {worst // n} has {len(prompts[worst])} tokens: with a completion of {caps[worst]} and its "
                f"prefill it needs {columns + prefill_room} tokens of cache, and there is room for "
                f"{max_cache_tokens}: lower max_tokens, or allow more (--prompt-tokens of a run)"
            )
    return places, columns, prefill_room


PREFILL_TOKENS = 4096  # in one prefill, pads included: enough to keep a GPU busy, little beside the cache
SHARED_TOKENS = 64  # a common beginning as long as this may be computed once,
SAVED_TOKENS = 512  # if that saves so many: it costs a forward of its own
KNOWN_LAYERS = {  # by their names in a config, and as classes of cache (a dummy: a layer that reads another's cache)
    "full_attention", "sliding_attention", "linear_attention",
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer",
}  # fmt: skip


def common_tokens(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    same = (x == y for x, y in zip(a, b, strict=False))
    return sum(takewhile(bool, same))


def prefill_groups(prompts: list[tuple[int, ...]], room: int, places: int, equal: bool):
    """Cut distinct prompts into groups, one prefill each -> [(prompts, tokens that their family begins with), ...].

    The N challenges of a problem are a family, since they share the problem; what shares little goes by length. A
    group takes up to `room` tokens with its pads, but at least one prompt, and no more prompts than there are places;
    equal: all have one length.
    """
    families: list[list[tuple[int, ...]]] = []
    alone, alike, common = [], [], 0  # common: what all of the last family begin with; 0 for one prompt
    for prompt in sorted(prompts):  # in this order, those that begin alike are neighbours
        last = families[-1] if families else []
        own = common_tokens(last[-1], prompt) if last else 0
        own *= own >= SHARED_TOKENS
        all_of_it = min(common, own) if len(last) > 1 else own
        # What is saved if the prompt joins the family, if it opens the next one, or if it takes the last one with it:
        # all prompts share a template, those of one problem much more.
        join, leave, take = all_of_it * len(last), common * (len(last) - 1), common * (len(last) - 2) + own
        if join > leave and join >= take:
            last.append(prompt)
            common = all_of_it
        elif take > leave:
            families.append([last.pop(), prompt])
            common = own
        else:
            families.append([prompt])
            common = 0
    for family in families:  # first and last are the least alike; of each, one token is left for its logits
        shared = min(common_tokens(family[0], family[-1]), min(map(len, family)) - 1)
        fits = shared + max(map(len, family)) <= room  # the beginning has a line of its own
        if fits and shared * (len(family) - 1) >= SAVED_TOKENS:
            alike.append((family, shared))
        else:
            alone += family
    groups = []
    for family, shared in [(alone, 0), *alike]:
        group: list[tuple[int, ...]] = []
        for prompt in sorted(family, key=len):
            full = shared + (len(group) + 1) * len(prompt) > room or len(group) == places
            if group and (full or (equal and len(prompt) != len(group[0]))):
                groups.append((group, shared))
                group = []
            group.append(prompt)
        if group:
            groups.append((group, shared))
    return groups


def prefill_cache(model) -> DynamicCache:
    """Empty. Sliding layers keep all their tokens in it: their own kind would drop real ones for the pads."""
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer):
            cache.layers[i] = DynamicLayer()
    return cache


def prefill(model, prompts: Sequence[Sequence[int]], shared: int = 0, start: DynamicCache | None = None):
    """(cache of b prompts, one line each; logits (b, V) after their last token). start: of their first `shared` tokens.

    Prompts are padded on the right, where under the causal mask no real token sees the pads: so no mask is needed, and
    what the pads leave in the cache is overwritten or masked by length. (A layer with a recurrent state would digest
    them: for such families the prompts of a call have one length.)
    """
    decoder, lengths = model.get_decoder(), [len(p) - shared for p in prompts]
    cache = copy.deepcopy(start) if shared else prefill_cache(model)  # a model writes into the cache that it is given
    if shared:
        cache.reorder_cache(torch.zeros(len(prompts), dtype=torch.long, device=model.device))  # the line, b times
    ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)  # (b, P)
    for i, prompt in enumerate(prompts):
        ids[i, : lengths[i]] = torch.tensor(prompt[shared:])
    hidden = decoder(
        input_ids=ids.to(model.device),
        position_ids=torch.arange(shared, shared + max(lengths), device=model.device)[None],  # (1, P)
        use_cache=True,
        **{cache_argument(decoder): cache},
    ).last_hidden_state  # (b, P, D)
    last = torch.tensor(lengths, device=model.device) - 1  # (b,)
    return cache, next_logits(model, hidden[torch.arange(len(prompts), device=model.device), last])


class CacheTooSmall(ValueError):
    """A prompt and its completion need more tokens of cache than `sample` was given."""


# What the layers of one window (None: none) must know in a decode step: the rows (b,), the column (b,) where the new
# token of each goes, and how many columns are looked at.
Looks = dict[int | None, tuple[torch.Tensor, torch.Tensor, int]]


class SlotLayer(DynamicLayer):
    """Keys and values of one attention layer in a fixed buffer, (B, heads, columns, head size), written in place.

    transformers' own layer appends by torch.cat, which copies the whole cache for every token. Here token t of a row
    has column t; in a layer that sees W tokens, column t mod W, where it replaces the one that left the window. Their
    order does not matter to attention, since a key carries its position.
    """

    def __init__(self, places: int, capacity: int, window: int | None, looks: Looks):
        super().__init__()
        self.places, self.columns, self.window = places, min(capacity, window or capacity), window
        self.looks = looks  # what Slots.step says; a reference to Slots would be a cycle, which only gc could free

    def fill(self, at: slice, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> None:
        """Seat b rows from a prefill: keys, values (b, heads, P, head size), pads behind `lengths` (b,)."""
        if not self.is_initialized:  # zeros: a masked value counts 0 times, and 0 times NaN would be NaN
            size = [(self.places, x.shape[1], self.columns, x.shape[3]) for x in (keys, values)]
            self.keys, self.values = keys.new_zeros(size[0]), values.new_zeros(size[1])  # (B, heads, W, head size)
            self.is_initialized = True
        if keys.shape[2] > self.columns:  # each column takes its newest token
            last, column = lengths[:, None] - 1, torch.arange(self.columns, device=keys.device)  # (b, 1), (W,) columns
            # the last token t with t mod W = column, (b, W); negative: none yet, to be masked
            newest = last - (last - column) % self.columns
            newest = newest.clamp(min=0)[:, None, :, None]  # (b, 1, W, 1)
            keys, values = (torch.take_along_dim(x, newest, dim=2) for x in (keys, values))  # (b, heads, W, head size)
        self.keys[at, :, : keys.shape[2]], self.values[at, :, : keys.shape[2]] = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model with one new token per row, (b, heads, 1, head size); returns all it may look at."""
        row, column, columns = self.looks[self.window]
        self.keys[row, :, column], self.values[row, :, column] = keys[:, :, 0], values[:, :, 0]
        return self.keys[: len(row), :, :columns], self.values[: len(row), :, :columns]


class Slots:
    """Places for the rows that decode together. Those taken are the first ones: when a row ends, the last one moves
    into the gap, so that a step computes for no empty place (but for those that make a graph's shape up).

    All that a step reads or writes is a tensor with one line per place: on CUDA it needs nothing from the host, and can
    be captured as a graph. Who ended is looked up by `harvest`, on CUDA after every 16 steps and every refill only, for
    each look waits for the GPU; until then such a row idles: it writes one column after its end, again and again, and
    nobody reads it.
    """

    def __init__(self, model, places: int, capacity: int, cap: int, stops, how: tuple[float, float, int]):
        device = model.device
        self.model, self.decoder, self.places = model, model.get_decoder(), places
        self.how = how  # temperature, top-p, top-k
        self.cache = DynamicCache(config=model.config)
        self.forward = {"use_cache": True, cache_argument(self.decoder): self.cache}
        self.capacity = capacity  # columns
        self.rows: list[int] = []  # rows[i] decodes in place i
        self.width = self.left = 0  # columns that the longest row needs next; tokens that any row may still write
        self.every = 16 if device.type == "cuda" else 1  # steps from one harvest to the next
        self.stops = torch.tensor(sorted(stops), dtype=torch.long, device=device)  # (S,) S stop ids
        self.arange = torch.arange(max(capacity, places), device=device)

        def lines(*shape: int, dtype=torch.long) -> torch.Tensor:
            return torch.zeros(places, *shape, dtype=dtype, device=device)

        self.token, self.count, self.cap = lines(), lines(), lines()  # (B,) the last one, how many, at most how many
        self.prompt = lines() + 1  # (B,) tokens of the prompt
        self.live, self.bad = lines(dtype=torch.bool), lines()  # (B,) bad: tokens up to the first not finite; 0: none
        real = torch.float32 if device.type == "mps" else torch.float64  # Apple's GPU has no float64
        self.tokens, self.logprobs = lines(cap + 1), lines(cap + 1, dtype=torch.float32)  # (B, C + 1): one to idle in
        self.noise = lines(cap + 1, dtype=real)  # (B, C + 1)
        # What moves along when a row moves, together with its keys, values and recurrent states.
        self.state = [self.token, self.count, self.cap, self.prompt, self.live, self.bad]
        self.state += [self.tokens, self.logprobs, self.noise]

        self.windows: set[int | None] = set()
        self.looks: Looks = {}
        self.recurrent: dict[tuple[int, str, int], torch.Tensor] = {}  # states (B, ...) by layer, kind and number
        kinds = {type(layer).__name__ for layer in self.cache.layers}
        kinds |= set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if unknown := kinds - KNOWN_LAYERS:
            raise ValueError(f"the base has layers of a kind that the sampler does not know: {min(unknown)}")
        self.attention = model.config.get_text_config()._attn_implementation
        if self.attention not in ("sdpa", "eager"):
            raise ValueError(f"the sampler makes masks for sdpa and eager attention, not for {self.attention}")
        for i, layer in enumerate(self.cache.layers):
            if isinstance(layer, DynamicLayer):
                window = getattr(layer, "sliding_window", None)
                self.cache.layers[i] = SlotLayer(places, capacity, window, self.looks)
                self.windows.add(window)
        self.graphs: dict[tuple[int, int], Callable[[], None]] = {}
        self.uses: Counter[tuple[int, int]] = Counter()
        self.captures = device.type == "cuda" and type(self.decoder) not in NO_GRAPHS
        self.pool = torch.cuda.graph_pool_handle() if self.captures else None  # one for all graphs: they never overlap

    def fill(self, taken: list[tuple[int, int]], prompts, noise: list[np.ndarray], lines: DynamicCache, logits) -> None:
        """Seat rows, (row, line of the prefill) each, behind those that are there, and choose their first token."""
        device, at = self.model.device, slice(len(self.rows), len(self.rows) + len(taken))
        self.rows += [r for r, _ in taken]
        line = torch.tensor([line for _, line in taken], device=device)  # (b,)
        lengths = torch.tensor([len(prompts[r]) for r, _ in taken], device=device)  # (b,)
        for i, (own, new) in enumerate(zip(self.cache.layers, lines.layers, strict=True)):
            if isinstance(own, SlotLayer):
                own.fill(at, new.keys[line], new.values[line], lengths)
            for kind in ("conv_states", "recurrent_states") if isinstance(own, LinearAttentionLayer) else ():
                for j, state in getattr(new, kind).items():  # (b, ...)
                    if (i, kind, j) not in self.recurrent:
                        # also transformers' flags that there is a state: else it would take a step for a prefill
                        vars(own).update({key: copy.copy(value) for key, value in vars(new).items()})
                        self.recurrent[i, kind, j] = state.new_zeros(self.places, *state.shape[1:])  # (B, ...)
                    self.recurrent[i, kind, j][at] = state[line]
        self.prompt[at], self.cap[at] = lengths, torch.tensor([len(u) for u in noise], device=device)
        self.count[at], self.bad[at], self.live[at] = 0, 0, True
        for i, u in enumerate(noise, at.start):
            self.noise[i, : len(u)] = torch.from_numpy(u)
        self.pick(at, logits[line])

    def pick(self, at: slice, logits: torch.Tensor) -> None:
        """Choose and record the next token of the rows in the places `at`. logits (b, V)."""
        count, live, bad = self.count[at], self.live[at], self.bad[at]  # (b,) views: what is done to them stays
        u = self.noise[at].gather(1, count[:, None])[:, 0]  # (b,)
        token, logp = choose(logits, u, *self.how)  # (b,), (b,)
        self.tokens[at].scatter_(1, count[:, None], token[:, None])
        self.logprobs[at].scatter_(1, count[:, None], logp[:, None])
        self.token[at] = token
        count += live  # a row that idles stays where it ended
        bad += count * (live & (bad == 0) & ~logp.isfinite())
        live &= (token[:, None] != self.stops).all(-1) & (count < self.cap[at])

    def step(self, rows: int, width: int) -> None:
        """One token more for the first `rows` places, looking at `width` columns. Touches tensors alone."""
        position = self.prompt[:rows] + self.count[:rows] - 1  # (b,) of the last token, whose keys are still to come
        masks = {}
        for window in self.windows:
            columns = min(width, window or width)
            self.looks[window] = self.arange[:rows], position % window if window else position, columns
            seen = self.arange[:columns] <= position[:, None]  # (b, T) from lengths alone
            if self.attention == "eager":  # families without the fused kernel add the mask to the scores
                seen = torch.where(seen, 0.0, -torch.inf).to(self.model.dtype)  # (b, T)
            masks[window] = seen[:, None, None]  # (b, 1, 1, T)
        for (i, kind, j), state in self.recurrent.items():
            getattr(self.cache.layers[i], kind)[j] = state[:rows]  # a view: the model updates it in place
        if len(masks) + bool(self.recurrent) == 1:  # a decoder with layers of one kind takes its mask as it is
            (mask,) = masks.values()
        else:  # one of several kinds a mask for each
            mask = {"full_attention": masks.get(None), "linear_attention": None}
            mask["sliding_attention"] = next((m for window, m in masks.items() if window), None)
        hidden = self.decoder(
            input_ids=self.token[:rows, None],  # (b, 1)
            attention_mask=mask,
            position_ids=position[:, None],  # (b, 1)
            **self.forward,
        ).last_hidden_state[:, -1]  # (b, D)
        self.pick(slice(0, rows), next_logits(self.model, hidden))

    def decode(self) -> None:
        """Steps up to the next harvest; on CUDA as graphs, one for each shape that comes often."""
        for _ in range(min(self.every, self.left)):
            shape = rows, width = len(self.rows), self.width
            if self.captures:  # few shapes: rows in powers of two, columns in steps of 256; what is too much idles
                rows, width = 1 << (rows - 1).bit_length(), -(-width // 256) * 256
                shape = min(self.places, rows), min(self.capacity, width)
                self.uses[shape] += 1
                if self.uses[shape] == 16 and shape not in self.graphs:  # the steps before it were its warm-up
                    self.captures = self.capture(*shape)
            if shape in self.graphs:
                self.graphs[shape]()
            else:
                self.step(*shape)
            self.width = min(self.width + 1, self.capacity)  # no row that lives needs more

    def capture(self, rows: int, width: int) -> bool:
        """Record the kernels that a step launches, to launch them later all at once: Python is slower than a GPU.

        Recording runs nothing, so the first replay is the step that was recorded. Graphs go with their buffers: another
        call of `sample` captures its own. False: not possible with this base.
        """
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self.step(rows, width)
        except RuntimeError as error:  # the family waits for the GPU somewhere
            torch.cuda.set_stream(stream)  # torch.cuda.graph fails at its own end, before it would do that
            why = error.__context__ or error  # the end of a failed capture fails in turn, and says less
            if isinstance(why, torch.OutOfMemoryError):
                raise why from None
            NO_GRAPHS.add(type(self.decoder))  # once is enough: each try costs a step, and clears PyTorch's cache
            say(f"decoding without CUDA graphs, this base cannot be captured: {first_line(why)}")
            return False
        say("decoding with CUDA graphs")
        self.graphs[rows, width] = graph.replay
        return True

    def harvest(self, out: Rollouts) -> None:
        """Hand the rows that ended to `out`, and close the gaps. Raises FloatingPointError for logits not finite."""
        taken = len(self.rows)
        state = [x[:taken].long() for x in (self.live, self.bad, self.prompt, self.count, self.cap)]
        live, bad, prompt, count, cap = torch.stack(state).tolist()  # waits for the GPU
        for r, b in zip(self.rows, bad, strict=True):
            if b:
                raise FloatingPointError(f"non-finite logits in row {r} at completion token {b - 1}")
        stay, ended = [i for i in range(taken) if live[i]], [i for i in range(taken) if not live[i]]
        self.width = max((prompt[i] + count[i] for i in stay), default=0)
        self.left = max((cap[i] - count[i] for i in stay), default=0)
        if ended:
            written = zip(ended, self.tokens[ended].tolist(), self.logprobs[ended].tolist(), strict=True)
            for i, tokens, logprobs in written:
                out.completions[self.rows[i]], out.logprobs[self.rows[i]] = tokens[: count[i]], logprobs[: count[i]]
            gaps, movers = [i for i in ended if i < len(stay)], [i for i in stay if i >= len(stay)]
            if gaps:
                layers = [x for x in self.cache.layers if isinstance(x, SlotLayer)]
                caches = [x[:, :, : self.width] for layer in layers for x in (layer.keys, layer.values)]
                gap, mover = (torch.tensor(x, device=self.model.device) for x in (gaps, movers))
                for buffer in (*self.state, *self.recurrent.values(), *caches):
                    buffer[gap] = buffer[mover]
            for i, j in zip(gaps, movers, strict=True):
                self.rows[i] = self.rows[j]
            del self.rows[len(stay) :]
            self.live[len(stay) :] = False


NO_GRAPHS: set[type] = set()  # decoders that could not be captured


@lru_cache  # once
def say(text: str) -> None:
    print(text, file=sys.stderr)


def cache_budget(rows: int, prompt_tokens: int, max_tokens: int) -> int:
    """Tokens of cache with which `rows` rows decode at once, prompts up to `prompt_tokens`: longer ones cost places."""
    return rows * cache_columns(prompt_tokens + max_tokens) + max(PREFILL_TOKENS, prompt_tokens)


def rehearse(model, rows: int, prompt: int, completion: int, temperature: float, top_p: float) -> list[torch.Tensor]:
    """What `sample` makes of tensors at its fullest, for model.estimate on the "meta" device: `rows` rows are seated,
    the next prefill is made, and waits while the last token is decoded. Returns the cache."""
    slots = Slots(model, rows, cache_columns(prompt + completion), completion, (), (temperature, top_p, 0))
    group = [[0] * prompt] * max(1, min(rows, PREFILL_TOKENS // prompt))
    lines, logits = prefill(model, group)
    seats = [(row, row % len(group)) for row in range(rows)]
    slots.fill(seats, group[:1] * rows, [np.zeros(completion)] * rows, lines, logits)
    del lines, logits
    waiting = prefill(model, group)
    slots.step(rows, slots.capacity)
    del waiting
    attention = [layer for layer in slots.cache.layers if isinstance(layer, SlotLayer)]
    return [x for layer in attention for x in (layer.keys, layer.values)] + [*slots.recurrent.values()]
