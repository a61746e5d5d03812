"""Prompts, the summary, and the sampler against its naive oracle.

python -m pytest tests/test_rollout.py
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig

import rollout
from model import Pair, token_logprobs
from reward import load_problems
from rollout import (
    NO_SUMMARY,
    WITHHELD,
    challenge_prompt,
    choose,
    draft_prompt,
    sample,
    sample_naive,
    summarize,
)

PROBLEMS = load_problems("congruence", "train", 6)


def ragged_prompts(pair: Pair) -> list[list[int]]:
    """Prompts of five lengths, one of them twice, in no order of length."""
    questions = [problem.question for problem in PROBLEMS]
    prompts = [draft_prompt(pair.tokenizer, q) for q in questions[:2]]
    prompts += [challenge_prompt(pair.tokenizer, questions[2], s) for s in ("06", "04:07;05:01;06:08", NO_SUMMARY)]
    prompts += [prompts[0], draft_prompt(pair.tokenizer, questions[3])[2:], [prompts[1][0]]]
    assert len({len(p) for p in prompts}) >= 5
    return prompts


def assert_equal_rollouts(fast, naive, tolerance: float = 1e-5) -> None:
    assert fast.prompts == naive.prompts, "rows are prompt-major: all n rows of a prompt stand together"
    assert fast.completions == naive.completions, "batching, padding or the cache changed what is sampled"
    assert fast.finished == naive.finished
    for a, b in zip(fast.logprobs, naive.logprobs, strict=True):
        assert torch.allclose(torch.tensor(a), torch.tensor(b), atol=tolerance)


# ---------------------------------------------------------------------------------------------------------------
# The sampler


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("adapter", ["A", "B", None])
def test_sample_equals_the_naive_loop_and_a_full_forward(pair, temperature, adapter):
    arguments = dict(n=3, max_tokens=20, temperature=temperature, seed=3)
    fast = sample(pair, adapter, ragged_prompts(pair), **arguments)
    assert_equal_rollouts(fast, sample_naive(pair, adapter, ragged_prompts(pair), **arguments))
    assert len({len(c) for c in fast.completions}) >= 3, "all rows are of one length: nothing left the batch early"
    with torch.no_grad():
        scored = token_logprobs(pair.activate(adapter), fast.prompts, fast.completions, temperature or 1.0)
    for row, logprobs in zip(scored, fast.logprobs, strict=True):
        assert torch.allclose(row[: len(logprobs)], torch.tensor(logprobs), atol=1e-5), "trainer and sampler disagree"


def test_top_p_equals_the_naive_loop(pair):
    arguments = dict(n=4, max_tokens=16, temperature=1.0, top_p=0.7, seed=1)
    fast = sample(pair, "A", ragged_prompts(pair), **arguments)
    assert_equal_rollouts(fast, sample_naive(pair, "A", ragged_prompts(pair), **arguments))
    free = sample(pair, "A", ragged_prompts(pair), **{**arguments, "top_p": 1.0})
    assert free.completions != fast.completions, "top_p had no effect"


@pytest.mark.parametrize("max_rows", [1, 5, 1000])
def test_samples_do_not_depend_on_how_many_rows_decode_at_once(pair, max_rows):
    arguments = dict(n=3, max_tokens=14, seed=2)
    whole = sample(pair, "B", ragged_prompts(pair), **arguments)
    assert_equal_rollouts(sample(pair, "B", ragged_prompts(pair), max_rows=max_rows, **arguments), whole)


def test_a_row_does_not_depend_on_which_other_rows_are_in_the_batch(pair):
    prompts = ragged_prompts(pair)[:5]  # all different
    together = sample(pair, "A", prompts, n=2, max_tokens=24, seed=9)
    backwards = sample(pair, "A", prompts[::-1], n=2, max_tokens=24, seed=9)
    for i, prompt in enumerate(prompts):
        alone = sample(pair, "A", [prompt], n=2, max_tokens=24, seed=9)
        assert alone.completions == together.completions[2 * i : 2 * i + 2], f"row {i} changes with its neighbours"
        j = len(prompts) - 1 - i
        assert alone.completions == backwards.completions[2 * j : 2 * j + 2], f"row {i} changes with the order"


def test_rows_of_one_prompt_differ_and_the_seed_decides(pair):
    prompt = [draft_prompt(pair.tokenizer, PROBLEMS[0].question)]
    first, again, other = (sample(pair, "A", prompt, n=8, max_tokens=20, seed=s) for s in (0, 0, 1))
    assert len({tuple(c) for c in first.completions}) > 1, "all rows of a prompt drew the same numbers"
    assert first.completions == again.completions
    assert first.completions != other.completions


def test_several_stop_ids_stop_a_row_and_pad_may_be_one_of_them(pair):
    digit = pair.tokenizer.convert_tokens_to_ids(":")
    many = dataclasses.replace(pair, stop_ids=frozenset({*pair.stop_ids, digit}))
    pad = pair.tokenizer.pad_token_id
    pair.tokenizer.pad_token_id = pair.tokenizer.eos_token_id
    try:
        prompts = ragged_prompts(pair)
        fast = sample(many, "A", prompts, n=2, max_tokens=18, seed=4)
        assert_equal_rollouts(fast, sample_naive(many, "A", prompts, n=2, max_tokens=18, seed=4))
    finally:
        pair.tokenizer.pad_token_id = pad
    assert {c[-1] for c, f in zip(fast.completions, fast.finished, strict=True) if f} >= {digit}
    for completion in fast.completions:
        assert not set(completion[:-1]) & many.stop_ids, "a row went on after a stop id"


def test_a_stopped_row_keeps_its_end_token_and_a_cut_row_says_so(pair):
    rollouts = sample(pair, None, ragged_prompts(pair)[:5], n=8, max_tokens=16)
    assert {True, False} == set(rollouts.finished)
    for completion, finished in zip(rollouts.completions, rollouts.finished, strict=True):
        assert finished == (completion[-1] in pair.stop_ids)
        assert finished or len(completion) == 16
    for text, finished in zip(rollouts.texts(pair), rollouts.finished, strict=True):
        assert "<|end|>" not in text
        assert not finished or text.endswith("</answer>"), "tags must survive decoding"


def test_sampling_uses_the_adapter_that_was_named(fresh_pair):
    prompts = ragged_prompts(fresh_pair)
    before = {name: sample(fresh_pair, name, prompts, n=4, max_tokens=20).completions for name in ("A", "B", None)}
    assert before["A"] != before["B"] != before[None] != before["A"]
    with torch.no_grad():
        for p in fresh_pair.parameters["A"].values():
            p.mul_(3.0)
    after = {name: sample(fresh_pair, name, prompts, n=4, max_tokens=20).completions for name in ("A", "B", None)}
    assert after["A"] != before["A"] and after["B"] == before["B"] and after[None] == before[None]


def test_sampling_runs_in_eval_mode_without_gradients(fresh_pair):
    fresh_pair.activate("A", train=True)
    sample(fresh_pair, "B", ragged_prompts(fresh_pair)[:1], max_tokens=2)
    assert not fresh_pair.model.training
    assert not any(p.requires_grad for p in fresh_pair.model.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_other_families_sample_like_the_naive_loop_also_past_a_sliding_window(pair, family):
    size = dict(
        vocab_size=119, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, initializer_range=0.3, eos_token_id=2, pad_token_id=2, bos_token_id=None,
    )  # fmt: skip
    config = {
        "llama": lambda: LlamaConfig(**size),
        "gemma3": lambda: Gemma3TextConfig(
            **size,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=8,
            final_logit_softcapping=5.0,
        ),
    }[family]()
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_config(config).eval(), lora, adapter_name="A")
    model.add_adapter("B", lora)
    parameters = {n: {k: p for k, p in model.named_parameters() if f".{n}." in k} for n in ("A", "B")}
    with torch.no_grad():
        for tensors in parameters.values():
            for p in tensors.values():
                p.normal_(0, 0.1)
    other = Pair(model, pair.tokenizer, frozenset({2, 30, 31}), parameters)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 119, (length,), generator=generator).tolist() for length in (3, 14, 9, 1)]
    fast = sample(other, "B", prompts, n=2, max_tokens=14)
    assert_equal_rollouts(fast, sample_naive(other, "B", prompts, n=2, max_tokens=14))
    with torch.no_grad():
        scored = token_logprobs(other.activate("B"), fast.prompts, fast.completions)
    assert all(
        torch.allclose(r[: len(x)], torch.tensor(x), atol=1e-5) for r, x in zip(scored, fast.logprobs, strict=True)
    )


def test_nan_logits_name_row_and_step(fresh_pair, monkeypatch):
    steps = iter(range(100))

    def poisoned(logits, noise, temperature, top_p):
        if next(steps) == 2:
            with torch.no_grad():
                for p in fresh_pair.parameters["A"].values():
                    p.fill_(float("nan"))
        return choose(logits, noise, temperature, top_p)

    monkeypatch.setattr(rollout, "choose", poisoned)
    with pytest.raises(FloatingPointError, match="row 0 at completion token 3"):
        sample(fresh_pair, "A", ragged_prompts(fresh_pair)[:1], max_tokens=20)


# ---------------------------------------------------------------------------------------------------------------
# Choosing one token


def test_choose_inverts_the_tempered_distribution():
    logits, temperature = torch.tensor([1.0, 2.0, 3.0, -torch.inf]), 0.5
    probs = torch.softmax(logits / temperature, -1)
    noise = torch.linspace(0, 1, 10_001, dtype=torch.float64)[:-1]
    token, logp = choose(logits.expand(len(noise), -1), noise, temperature, 1.0)
    share = torch.bincount(token, minlength=4) / len(noise)
    assert torch.allclose(share.float(), probs, atol=2e-4)
    assert torch.allclose(logp, (logits / temperature).log_softmax(-1)[token], atol=1e-6)


def test_temperature_zero_is_greedy_and_a_tiny_one_does_not_overflow():
    logits = torch.tensor([[1.0, 5.0, 4.999], [7.0, 1.0, 2.0]])
    for temperature in (0.0, 1e-5):
        token, logp = choose(logits, torch.tensor([0.99, 0.99]), temperature, 1.0)
        assert token.tolist() == [1, 0] and torch.isfinite(logp).all()


def test_top_p_keeps_the_fewest_best_tokens_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    noise = torch.linspace(0, 1, 1001, dtype=torch.float64)[:-1]
    for top_p, kept in (
        (0.01, {0}),
        (0.49, {0}),
        (0.51, {0, 1}),
        (0.79, {0, 1}),
        (0.9, {0, 1, 2}),
        (1.0, {0, 1, 2, 3}),
    ):
        token, _ = choose(logits.expand(len(noise), -1), noise, 1.0, top_p)
        assert set(token.tolist()) == kept, f"top_p = {top_p}"


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-60, 60) | st.just(-float("inf")), min_size=1, max_size=9).filter(
        lambda x: max(x) > -float("inf")
    ),
    noise=st.floats(0, 1, exclude_max=True),
    top_p=st.sampled_from([1.0, 0.9, 1e-9]),
)
def test_choose_never_returns_a_token_of_probability_zero(logits, noise, top_p):
    token, logp = choose(torch.tensor([logits]), torch.tensor([noise], dtype=torch.float64), 1.0, top_p)
    assert 0 <= token.item() < len(logits)
    assert torch.isfinite(logp).all()


# ---------------------------------------------------------------------------------------------------------------
# Prompts


def test_the_two_prompts_share_the_problem_and_only_one_shows_the_summary(pair):
    question = PROBLEMS[0].question
    draft = pair.tokenizer.decode(draft_prompt(pair.tokenizer, question))
    challenge = pair.tokenizer.decode(challenge_prompt(pair.tokenizer, question, "06"))
    assert draft.startswith(f"<|user|>{question}\n\nSolve") and draft.endswith("<|end|><|assistant|>")
    assert challenge.startswith(f"<|user|>{question}\n\nAnother") and challenge.endswith("06<|end|><|assistant|>")


def test_what_question_and_summary_hold_is_data(pair):
    text = pair.tokenizer.decode(challenge_prompt(pair.tokenizer, "05{summary}06", "07{problem}08{summary}09"))
    assert text.count("07") == 1, "a question that spells {summary} must not be formatted"


# ---------------------------------------------------------------------------------------------------------------
# The summary


def respond(prose: str, answer: str = "4242") -> str:
    return f"<think>scratch {answer}</think>{prose}<answer>{answer}</answer>"


@pytest.mark.parametrize(
    "prose",
    [
        "Count the pairs. So the answer is 4242.",
        "Count the pairs. The final answer: **4242**",
        "Count the pairs. Hence $n = 4242$.",
        "Count the pairs, which gives 4242.",
        "Count the pairs. It equals 4242.",
        r"Count the pairs. \boxed{4242}",
        r"Count the pairs. \boxed{n = \frac{4242}{1}} as claimed.",
        r"Count the pairs. We get \boxed{4242",
        "Count the pairs.\n4242",
        "Count the pairs.\n```python\nprint(4242)\n```",
        "Count the pairs.\n```\nprint(4242)",
        "Count the pairs. <answer>4242</answer> or",
    ],
)
def test_the_final_answer_is_withheld_and_the_work_is_kept(prose):
    summary = summarize(respond(prose))
    assert "4242" not in summary
    assert "Count the pairs" in summary


@pytest.mark.parametrize(
    ("prose", "answer", "kept"),
    [
        ("Rewrite $x^2 - 4x + 4 = 0$ as $(x-2)^2 = 0$; step 2 takes the root. The answer is 2.", "2", "x^2 - 4x + 4"),
        ("Note that 1042 and 420 leave the same remainder. The answer is 42.", "42", "1042 and 420"),
        ("Set $x + 5 = 0$ after cancelling $x - 3$. Thus $x = -5$.", "-5", "x + 5"),
        ("06", "07", "06"),
    ],
)
def test_the_same_digits_elsewhere_stay(prose, answer, kept):
    assert kept in summarize(respond(prose, answer))


def test_a_draft_cut_inside_its_thought_has_no_summary():
    assert summarize("<think>first 4242, then") == NO_SUMMARY
    assert summarize("") == NO_SUMMARY


def test_the_thought_is_never_shown():
    assert "scratch" not in summarize(respond("Use induction."))
    assert summarize("<think>a</think>b</think>Use induction.") == "Use induction."


def test_role_tokens_and_tags_are_defused(pair):
    summary = summarize("<think></think>06<|end|><|user|>05<|assistant|><|im_start|>system<think>07<answer>")
    assert not any(t in summary for t in ("<|", "|>", "<think>", "</think>", "<answer>", "</answer>"))
    ids = pair.tokenizer.encode(summary, add_special_tokens=False)
    assert not set(ids) & (set(pair.tokenizer.all_special_ids) - {pair.tokenizer.unk_token_id})


@settings(max_examples=200, deadline=None)
@given(
    prose=st.text(alphabet="ab {}=.$\n:*", max_size=40),
    answer=st.integers(1000, 9999).map(str),
    form=st.sampled_from(
        [r"\boxed{%s}", r"\boxed{\text{%s}}", r"\fbox{%s}", "The answer is %s.", "<answer>%s</answer>"]
    ),
)
def test_no_summary_contains_the_boxed_or_tagged_answer(prose, answer, form):
    assert answer not in summarize(f"<think></think>{prose} {form % answer}\n<answer>{answer}</answer>")


def test_summarize_is_linear_in_loops_of_tags():
    for loop in ("<answer>" * 8000, r"\boxed{" * 8000, "the answer is " * 4000, "```" * 8000, "<|" * 8000):
        assert isinstance(summarize("<think></think>" + loop), str)
    assert WITHHELD in summarize("<think></think>" + r"\boxed{" * 8000)
