"""The draft and challenge prompts under the chat templates of the model families that this code is meant for.

tests/data/templates holds, for each family, a template of our own that renders a single user turn as the released one
does, and the two prompts as they should read, typed by hand from what each family documents. TRL carries the originals:
where it is installed, `test_rendering_is_the_released_one` compares. A byte-level tokenizer with the family's special
tokens stands in for the real one, so nothing is downloaded.

Run:  pytest tests/test_prompts.py
"""

from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import rollout
from model import stop_ids
from reward import extract_answer, format_score

TEMPLATES = Path(__file__).parent / "data" / "templates"
QUESTION = "How many {summary} are there with x < 3, if “{problem}” holds?\nThe second line: x ≤ 2 & x > −1."
SUMMARY = "It took x < 3 first, then {problem} and {summary}.\nThen {{ x }} and {% if %}."
EMPTY_THOUGHT = "<think>\n\n</think>"
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
THINK = ("<think>", "</think>")
GEMMA4 = ("<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>")
LLAMA3 = ("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>")


@dataclass(frozen=True)
class Family:
    bos: str | None
    eos: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()  # whole tokens too, but not flagged special
    opens: bool = False  # the prompt opens the thought
    switch: bool = False  # enable_thinking changes the prompt
    released: str | None = None  # the released template in trl/chat_templates


FAMILIES = {
    "qwen3": Family(None, "<|im_end|>", CHATML, THINK, switch=True, released="qwen3"),
    "qwen3_thinking_2507": Family(None, "<|im_end|>", CHATML, THINK, opens=True),
    "qwen3_5": Family(None, "<|im_end|>", CHATML, THINK, opens=True, switch=True, released="qwen3_5_nothink"),
    "gemma3": Family("<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>"), released="gemma3"),
    "gemma4": Family("<bos>", "<eos>", GEMMA4, switch=True, released="gemma4"),
    "llama3": Family("<|begin_of_text|>", "<|eot_id|>", LLAMA3, released="llama3_2"),
}


class Day(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2031, 1, 2)


@pytest.fixture(autouse=True)
def one_day(monkeypatch):
    """Llama 3.2 writes the day into its prompt, unless it is told another."""
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Day)


@pytest.fixture(params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture
def family(name) -> Family:
    return FAMILIES[name]


@pytest.fixture
def tokenizer(name, family):
    """One token a byte, and the family's own tokens whole; where there is a BOS, plain encoding adds it, as some do."""
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True) for t in (family.bos, family.eos, *family.special) if t])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.plain])
    if family.bos:
        bos = (family.bos, backend.token_to_id(family.bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[bos])
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos, chat_template=template
    )


@pytest.fixture
def prompts(tokenizer) -> dict[str, list[int]]:
    return {
        "draft": rollout.draft_prompt(tokenizer, QUESTION),
        "challenge": rollout.challenge_prompt(tokenizer, QUESTION, SUMMARY),
    }


def render(tokenizer, messages=({"role": "user", "content": QUESTION},), **switches) -> str:
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **switches)


@pytest.mark.parametrize("kind", ["draft", "challenge"])
def test_prompt_reads_as_documented(name, tokenizer, prompts, kind):
    assert tokenizer.decode(prompts[kind]) == (TEMPLATES / f"{name}.{kind}.txt").read_bytes().decode()


def test_one_bos_where_there_is_one(family, tokenizer, prompts):
    for ids in prompts.values():
        if family.bos:
            assert [i for i, t in enumerate(ids) if t == tokenizer.bos_token_id] == [0]
            assert tokenizer.encode("x")[0] == tokenizer.bos_token_id, "encoding adds none: this test cannot fail"
        else:
            assert tokenizer.bos_token is None


def test_thinking_is_on(name, family, tokenizer, prompts):
    on, off = (render(tokenizer, enable_thinking=switch) for switch in (True, False))
    assert (on != off) == family.switch
    for ids in prompts.values():
        text = tokenizer.decode(ids)
        assert EMPTY_THOUGHT not in text
        assert not text.endswith("<channel|>")  # how the larger Gemma 4 end a prompt with thinking off
        assert text.endswith("<think>\n") == family.opens
        assert (tokenizer.convert_tokens_to_ids("<|think|>") in ids) == (name == "gemma4")


def test_opens_thought(family, tokenizer, prompts):
    for ids in prompts.values():
        assert rollout.opens_thought(tokenizer, ids) == family.opens


def test_a_closed_or_a_quoted_thought_is_not_open(tokenizer):
    for text in (EMPTY_THOUGHT + "\n\n", "<think>\nhm", "Write <think>\n</think>\n"):
        assert not rollout.opens_thought(tokenizer, tokenizer.encode(text, add_special_tokens=False))


END_OF_TURN = {"gemma3": "<end_of_turn>", "gemma4": "<turn|>", "llama3": "<|eot_id|>"}  # the others': <|im_end|>


def test_the_end_of_a_turn_stops_a_row_even_where_no_file_names_it(name, tokenizer):
    """Gemma's tokenizers name <eos>; the end of a turn stands in generation_config.json, which a folder may lack."""
    text = SimpleNamespace(eos_token_id=None)
    config = SimpleNamespace(eos_token_id=None, get_text_config=lambda: text)
    stops = stop_ids(SimpleNamespace(config=config, generation_config=text), tokenizer)
    assert tokenizer.convert_tokens_to_ids(END_OF_TURN.get(name, "<|im_end|>")) in stops


def test_responses_read_alike_in_all_families(name, family, tokenizer, prompts):
    """What the template has opened is part of the response, and a thought in the family's own marks is a thought."""
    body = "I try.</think>It took one try.<answer>4</answer>"
    completion = body if family.opens else "<think>" + body
    if name == "gemma4":
        completion = "<|channel>thought\nI try.<channel|>It took one try.<answer>4</answer>"
    ids = tokenizer.encode(completion, add_special_tokens=False)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN.get(name, "<|im_end|>"))
    rollouts = rollout.Rollouts([prompts["draft"]] * 2, [[*ids, end], ids], [True, False], [[], []])
    for text in rollouts.texts(SimpleNamespace(tokenizer=tokenizer)):
        assert format_score(text) == 1 and extract_answer(text) == "4"
        assert rollout.summarize(text) == "It took one try."
        assert text.count("<think>") == 1 and text.split("</think>")[0].endswith("I try.")


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL, which carries the released templates, is not installed")
def test_rendering_is_the_released_one(family, tokenizer):
    folder = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
    if family.released is None or not (folder / f"{family.released}.jinja").is_file():
        pytest.skip("TRL does not carry this one")
    released = (folder / f"{family.released}.jinja").read_text(encoding="utf-8")
    user, system = {"role": "user", "content": f" {QUESTION}\n"}, {"role": "system", "content": "Be brief."}
    for messages in ([user], [system, user]):
        for switches in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
            ours = render(tokenizer, messages, **switches)
            assert ours == render(tokenizer, messages, chat_template=released, **switches)
