"""Prompts, the exchange (a draft's summary with its answer withheld), and the batched KV-cache sampler.

Read `sample_naive` first: fifteen lines, no cache, no batch, and exactly what `sample` computes faster.
The shape alphabet stands at the head of model.py.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from transformers import DynamicCache

from model import Pair, cache_argument
from reward import THINK_CLOSE, THINK_OPEN, extract_answer, math_equal, rational

# ---------------------------------------------------------------------------------------------------------------
# Prompts. Both open with the problem, so the N challenges of one problem share a long prefix
# (a prefix cache could use that; this sampler does not yet). No worked example
# stands in them: a small model copies whatever answer an example shows.

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


def choose(logits: torch.Tensor, noise: torch.Tensor, temperature: float, top_p: float):
    """Pick one token per row. logits (B, V), noise (B,) in [0, 1) -> (token ids (B,), their log-probs (B,) float32).

    Inverse-CDF sampling: with the noise given, the choice is a plain function of the logits. temperature 0 is greedy.
    The log-prob is that of the tempered softmax before top-p cuts its tail.
    """
    device = logits.device
    if device.type == "mps":  # Apple's GPU has no float64
        logits, noise = logits.cpu(), noise.cpu()
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)  # (B, V)
    if temperature == 0:
        token = logp.argmax(-1)  # (B,)
    else:
        probs = logp.double().exp()  # (B, V)
        if top_p < 1:
            ranked, order = probs.sort(dim=-1, descending=True)  # (B, V)
            ranked[ranked.cumsum(-1) - ranked >= top_p] = 0.0  # the best token always stays: its sum before it is 0
            probs = torch.zeros_like(probs).scatter(-1, order, ranked)
        cdf = probs.cumsum(-1)  # (B, V)
        # First token whose cumulated probability exceeds u * total, so never one of probability 0. The factor keeps
        # u * total below the total where rounding would reach it and point past the last token.
        target = noise.double() * cdf[:, -1] * (1 - 1e-12)  # (B,)
        token = torch.searchsorted(cdf, target[:, None], right=True)[:, 0]  # (B,)
    return token.to(device), logp.gather(-1, token[:, None])[:, 0].to(device)


def check_finite(logits: torch.Tensor, rows: Sequence[int], step: int) -> None:
    """NaN here would surface as an out-of-range token id in `choose`: name the row and the step instead."""
    bad = (~torch.isfinite(logits.amax(-1))).nonzero()[:, 0].tolist()  # amax passes NaN on; single -inf are legal
    if bad:
        raise FloatingPointError(f"non-finite logits in row {rows[bad[0]]} at completion token {step}")


@torch.no_grad()
def sample_naive(pair: Pair, adapter, prompts, n=1, *, max_tokens, temperature=1.0, top_p=1.0, seed=0) -> Rollouts:
    """The oracle: one row at a time, a full forward per token, no cache. Same arguments and result as `sample`."""
    model, seen, out = pair.activate(adapter), {}, Rollouts([], [], [], [])
    stops = pair.of(adapter).stop_ids
    for prompt in [p for p in prompts for _ in range(n)]:
        k = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
        noise, ids, logprobs = row_noise(prompt, k, max_tokens, seed), list(prompt), []
        while len(logprobs) < max_tokens and not (logprobs and ids[-1] in stops):
            logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[:, -1]  # (1, V)
            u = torch.tensor([noise[len(logprobs)]], device=model.device)  # (1,)
            token, logp = choose(logits, u, temperature, top_p)
            ids.append(token.item())
            logprobs.append(logp.item())
        out.prompts.append(list(prompt))
        out.completions.append(ids[len(prompt) :])
        out.finished.append(ids[-1] in stops)
        out.logprobs.append(logprobs)
    return out


@torch.no_grad()
def sample(
    pair: Pair,
    adapter: str | None,
    prompts: Sequence[Sequence[int]],
    n: int = 1,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    max_rows: int = 256,
) -> Rollouts:
    """n completions of every prompt by one adapter, batched, with a KV cache. Same result as `sample_naive`.

    One prefill per distinct prompt, its cache then repeated for all its rows; rows that finish leave the batch. At
    most `max_rows` rows decode at once. Raises FloatingPointError if logits are not finite.
    """
    model = pair.activate(adapter)
    out = Rollouts([list(p) for p in prompts for _ in range(n)], [], [], [])
    rows = len(out.prompts)
    out.completions, out.logprobs, out.finished = [[] for _ in range(rows)], [[] for _ in range(rows)], [False] * rows

    # Number the rows of each distinct prompt (that number keys their noise), then sort by prompt: rows of one prompt
    # share a prefill, and prompts of like length share a batch.
    count: dict[tuple[int, ...], int] = {}
    numbers = []
    for prompt in out.prompts:
        numbers.append(count.get(tuple(prompt), 0))
        count[tuple(prompt)] = numbers[-1] + 1
    order = sorted(range(rows), key=lambda r: (len(out.prompts[r]), out.prompts[r]))
    for at in range(0, rows, max_rows):
        stops = pair.of(adapter).stop_ids
        decode_batch(model, stops, out, order[at : at + max_rows], numbers, max_tokens, temperature, top_p, seed)
    return out


def decode_batch(model, stop_ids, out: Rollouts, batch, numbers, max_tokens, temperature, top_p, seed) -> None:
    """Prefill and decode the rows `batch` of `out` (indices), filling in their completions."""
    device, cache_name = model.device, cache_argument(model)
    distinct = {p: i for i, p in enumerate(dict.fromkeys(tuple(out.prompts[r]) for r in batch))}  # one prefill each
    width = max(map(len, distinct))

    # 1. Prefill, left-padded so that every row's next token sits in the same column. Positions count real tokens.
    ids = torch.zeros(len(distinct), width, dtype=torch.long)  # (b, P) b distinct prompts
    mask = torch.zeros(len(distinct), width, dtype=torch.long)  # (b, P) from lengths, never from token values
    for prompt, i in distinct.items():
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=(mask.cumsum(-1) - 1).clamp(min=0),  # (b, P)
        use_cache=True,
        logits_to_keep=1,  # a prompt's other logits are not needed, and (b, P, V) would dwarf the model
        **{cache_name: cache},
    ).logits[:, -1]  # (b, V)

    # 2. Repeat for the rows of each prompt. reorder_cache copies: no row ever shares a buffer with another.
    source = torch.tensor([distinct[tuple(out.prompts[r])] for r in batch], device=device)  # (B,)
    cache.reorder_cache(source)
    logits, mask = logits[source], mask[source]  # (B, V), (B, P)
    position = mask.sum(-1)  # (B,) position of the row's next token
    noise = np.stack([row_noise(out.prompts[r], numbers[r], max_tokens, seed) for r in batch])
    noise = torch.from_numpy(noise).to("cpu" if device.type == "mps" else device)  # (B, C)
    stops = torch.tensor(sorted(stop_ids), device=device)  # (S,) S stop ids
    alive, live = list(batch), torch.ones(len(batch), dtype=torch.bool, device=device)  # rows of the tensors; (B,)

    # 3. Decode. Rows that stop are only marked; the tensors shrink when a quarter of them is dead weight, so that the
    #    cache is copied a few times in all and not at every stop.
    for step in range(max_tokens):
        check_finite(logits, alive, step)
        token, logp = choose(logits, noise[:, step], temperature, top_p)  # (B,), (B,)
        for r, was_live, t, lp in zip(alive, live.tolist(), token.tolist(), logp.tolist(), strict=True):
            if was_live:
                out.completions[r].append(t)
                out.logprobs[r].append(lp)
        live &= ~torch.isin(token, stops)  # (B,)
        left = int(live.sum())
        if left == 0 or step == max_tokens - 1:
            break
        if left <= 0.75 * len(alive):
            keep = live.nonzero()[:, 0]  # (B',)
            cache.reorder_cache(keep)
            token, mask, position, live = token[keep], mask[keep], position[keep], live[keep]
            noise = noise[keep.to(noise.device)]
            alive = [alive[i] for i in keep.tolist()]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)  # (B, P + step + 1) grown at every step
        logits = model(
            input_ids=token[:, None],  # (B, 1)
            attention_mask=mask,
            position_ids=position[:, None],  # (B, 1)
            use_cache=True,
            **{cache_name: cache},
        ).logits[:, -1]  # (B, V)
        position = position + 1
    for r in batch:
        out.finished[r] = out.completions[r][-1] in stop_ids
