"""Folders of untrained models as the hub has them, one per family: shared by tests, and usable with real sizes.

The weights are random but large, so that logits are far from flat; the tokenizer is the embedded base's. The parts that
go wrong are really there: towers for images and sound, windows shorter than a row, layers that share keys and values,
per-layer embeddings, linear attention, capped logits.
"""

import json
import shutil
from pathlib import Path

import torch
import transformers

from model import EMBEDDED

FAMILIES = ("qwen3", "qwen3_5", "gemma3", "gemma4", "llama")
WINDOW = 6  # tokens that a sliding layer sees
# Widths are multiples of 64, the block that NF4 has one scale for.
TEXT = dict(
    vocab_size=119, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=128, max_position_embeddings=256, initializer_range=0.15,
    bos_token_id=None, eos_token_id=2, pad_token_id=1,
)  # fmt: skip
GEMMA = dict(sliding_window=WINDOW, full_attention_interval=2, final_logit_softcapping=3.0)
OWN = {  # what a family's text config has beside TEXT; the last layer of each interval has full attention
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_5": dict(
        full_attention_interval=2, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4, tie_word_embeddings=True,
    ),
    "gemma3": dict(**GEMMA, query_pre_attn_scalar=16),
    "gemma4": dict(
        **GEMMA, global_head_dim=32, hidden_size_per_layer_input=64, num_kv_shared_layers=2, use_double_wide_mlp=True,
    ),
    "llama": {"tie_word_embeddings": False},
}  # fmt: skip
# Towers stay this small whatever the text's size.
QWEN_EYES = dict(
    depth=1, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4, temporal_patch_size=1,
    num_position_embeddings=16, spatial_merge_size=1,
)  # fmt: skip
GEMMA_EYES = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=16, patch_size=4, position_embedding_size=16, pooling_kernel_size=1,
)  # fmt: skip
GEMMA_EARS = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=32, subsampling_conv_channels=[16, 8]
)


def make_base(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **sizes) -> Path:
    """Write an untrained base of `family` into `folder`. sizes go to the text config, over the small defaults.

    The ids that stand for images and sound keep their real values: in a small vocabulary no row can hold one.
    """
    text = {**TEXT, **OWN[family], **sizes}
    if family.startswith("gemma"):
        every = text.pop("full_attention_interval")
        kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(text["num_hidden_layers"])]
        text.setdefault("layer_types", kinds)
    if family == "gemma4":
        text.setdefault("vocab_size_per_layer_input", text["vocab_size"])
        config = transformers.Gemma4Config(text_config=text, vision_config=GEMMA_EYES, audio_config=GEMMA_EARS)
    elif family == "qwen3_5":
        vision = {**QWEN_EYES, "out_hidden_size": text["hidden_size"]}
        tied = text["tie_word_embeddings"]
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    else:
        kind = {"qwen3": "Qwen3Config", "gemma3": "Gemma3TextConfig", "llama": "LlamaConfig"}[family]
        config = getattr(transformers, kind)(**text)
    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        if family == "qwen3_5":  # AutoModelForCausalLM knows its text half alone
            model = transformers.Qwen3_5ForConditionalGeneration(config)
        else:
            model = transformers.AutoModelForCausalLM.from_config(config)
    model.to(dtype).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, folder)
    if family == "qwen3_5":  # transformers cuts words its own way there, whatever the file says: so none is to be cut
        path = Path(folder) / "tokenizer.json"
        spec = json.loads(path.read_text(encoding="utf-8"))
        words, added = spec["model"]["vocab"], spec["added_tokens"]
        words |= {str(digit): words.pop(str(90 + digit)) for digit in range(10)}  # a byte-level vocabulary has digits
        known = {token["content"] for token in added}
        added += [{**added[-1], "content": word, "id": i} for word, i in words.items() if word not in known]
        path.write_text(json.dumps(spec), encoding="utf-8")
    return Path(folder)
