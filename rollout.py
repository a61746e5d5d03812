"""Prompts, the exchange (a draft's summary with its answer withheld), and the batched KV-cache sampler.

Read `sample_naive` first: fifteen lines, no cache, no batch, and exactly what `sample` computes faster.
The shape alphabet stands at the head of model.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from model import Pair, cache_argument
from reward import ANSWER_CLOSE, ANSWER_OPEN, THINK_CLOSE, THINK_OPEN, extract_answer

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
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)  # the template wrote its BOS already; a second one hurts


# ---------------------------------------------------------------------------------------------------------------
# s(a): what the challenger reads


def summarize(response: str) -> str:
    """s(a): what the drafter wrote after its closed thought, with its final answer withheld. Never sees the gold.

    Gone: the answer block, boxed values, code blocks, and sentences that conclude ("so the answer is ...", or any
    "= 42", where 42 is what the draft answered). Kept: the worked steps. Role tokens and think/answer tags are defused,
    because they would be tokenised as structure in the challenger's prompt. NO_SUMMARY if the thought never closed.
    """
    closed = response.rfind(THINK_CLOSE)
    if closed < 0:
        return NO_SUMMARY
    text = response[closed + len(THINK_CLOSE) :]
    answer = (extract_answer(response) or "").strip()
    # 1. answer blocks, from the first opening tag to the last closing one; an unclosed block runs to the end
    start = text.find(ANSWER_OPEN)
    if start >= 0:
        end = text.rfind(ANSWER_CLOSE)
        text = text[:start] + (text[end + len(ANSWER_CLOSE) :] if end > start else "")
    # 2. code: for programming problems the program is the answer; an unclosed fence runs to the end
    text = re.sub(r"```.*?(```|\Z)", WITHHELD, text, flags=re.DOTALL)
    # 3. boxes, with balanced braces
    text = mask_boxes(text)
    # 4. role tokens and tags
    text = re.sub(r"<\|[^|<>]{0,40}\|?>|<[^|<>]{1,40}\|>|</?(?:s|bos|eos|pad|unk)>|<(?:start|end)_of_turn>", " ", text)
    for tag in (THINK_OPEN, THINK_CLOSE, ANSWER_OPEN, ANSWER_CLOSE):
        text = text.replace(tag, " ")
    # 5. conclusions in words. Blanks are bounded here and below: unbounded, a loop of blanks takes quadratic time.
    text = re.sub(
        r"(?i)\b(?:final\s+)?(answer|result|solution)\b(\W{0,6}(?:is|are|equals|=|:)\W{0,6}|\W{0,6}:\W{0,6})\S[^\n]*?"
        r"(?=[.!?]?(?:\s|\Z)(?![0-9])|\n|\Z)",
        lambda m: m.group(1) + " " + WITHHELD,
        text,
    )
    # 6. the draft's own answer where a sentence states it: after = / is / equals / to / :, or standing alone
    if answer:
        # 07 and 7 are one number to the checker, so both spellings go
        spelled = f"0*{int(answer)}" if re.fullmatch("[0-9]{1,18}", answer) else re.escape(answer)
        value = rf"(?<![\w.]){spelled}(?![\w]|[.,][0-9])"
        text = re.sub(
            rf"((?:=|\bis|\bare|\bequals|\bget|\bgives|\bto|:)\s{{0,6}}\$?\s{{0,6}}){value}", rf"\1{WITHHELD}", text
        )
        text = re.sub(rf"(?m)^[ \t]{{0,6}}{value}[ \t]{{0,6}}[.!]?[ \t]{{0,6}}$", WITHHELD, text)
    return text.strip()


def mask_boxes(text: str) -> str:
    r"""Replace every \boxed{...} or \fbox{...}, braces balanced, by WITHHELD; one never closed is cut to the end."""
    out, at = [], 0
    for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        if match.start() < at:
            continue  # inside the box just masked
        depth, end = 1, match.end()
        while end < len(text) and depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        out += [text[at : match.start()], WITHHELD]
        at = end
    return "".join(out) + text[at:]


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
        """Decoded completions without their end-of-turn id. Tags survive; text after the end was never sampled."""
        return [
            pair.tokenizer.decode(c[:-1] if f else c, skip_special_tokens=False)
            for c, f in zip(self.completions, self.finished, strict=True)
        ]


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
    return token, logp.gather(-1, token[:, None])[:, 0]


def check_finite(logits: torch.Tensor, rows: Sequence[int], step: int) -> None:
    """NaN here would surface as an out-of-range token id in `choose`: name the row and the step instead."""
    bad = (~torch.isfinite(logits.amax(-1))).nonzero()[:, 0].tolist()  # amax passes NaN on; single -inf are legal
    if bad:
        raise FloatingPointError(f"non-finite logits in row {rows[bad[0]]} at completion token {step}")


@torch.no_grad()
def sample_naive(pair: Pair, adapter, prompts, n=1, *, max_tokens, temperature=1.0, top_p=1.0, seed=0) -> Rollouts:
    """The oracle: one row at a time, a full forward per token, no cache. Same arguments and result as `sample`."""
    model, seen, out = pair.activate(adapter), {}, Rollouts([], [], [], [])
    for prompt in [p for p in prompts for _ in range(n)]:
        k = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
        noise, ids, logprobs = row_noise(prompt, k, max_tokens, seed), list(prompt), []
        while len(logprobs) < max_tokens and not (logprobs and ids[-1] in pair.stop_ids):
            logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[:, -1]  # (1, V)
            u = torch.tensor([noise[len(logprobs)]], device=model.device)  # (1,)
            token, logp = choose(logits, u, temperature, top_p)
            ids.append(token.item())
            logprobs.append(logp.item())
        out.prompts.append(list(prompt))
        out.completions.append(ids[len(prompt) :])
        out.finished.append(ids[-1] in pair.stop_ids)
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
        decode_batch(model, pair, out, order[at : at + max_rows], numbers, max_tokens, temperature, top_p, seed)
    return out


def decode_batch(model, pair, out: Rollouts, batch, numbers, max_tokens, temperature, top_p, seed) -> None:
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
    noise = torch.from_numpy(noise).to(device)  # (B, C)
    stops = torch.tensor(sorted(pair.stop_ids), device=device)  # (S,) S stop ids
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
            token, mask, position, noise, live = token[keep], mask[keep], position[keep], noise[keep], live[keep]
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
        out.finished[r] = out.completions[r][-1] in pair.stop_ids
