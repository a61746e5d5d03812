"""One frozen base, two LoRA adapters A and B, and the log-probabilities that the loss needs.

Shape alphabet of the whole project: B rows, T tokens, P prompt, C longest completion, V vocabulary, N group, D width,
M completion tokens of all rows together; a lower-case letter is one chunk or micro-batch of its upper case.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# PEFT imports bitsandbytes, which reports at import that an optional CPU kernel is missing; 4-bit works without it.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in record.msg)

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

ADAPTERS = ("A", "B")  # the two policies; also the names of their folders
EMBEDDED = Path(__file__).resolve().parent / "tiny"  # the base called "tiny"
LOGIT_BUDGET = 2**27  # floats of logits alive at once in token_logprobs: 512 MB in fp32, about 880 tokens at V = 151k


@dataclass
class Pair:
    """Two policies on one base. `parameters[name]` holds adapter `name`'s tensors by name, fixed at creation: an
    optimizer must never be built by filtering on requires_grad, which changes whenever an adapter is activated."""

    model: PeftModel
    tokenizer: object
    stop_ids: frozenset[int]  # every id that ends a turn; a completion keeps the one it stopped at
    parameters: dict[str, dict[str, torch.nn.Parameter]]

    def activate(self, adapter: str | None, train: bool = False) -> PreTrainedModel:
        """The causal LM with exactly this adapter switched on (None: the bare base), ready to sample or to train.

        PEFT's set_adapter() also flips requires_grad of every adapter, and silently: so it is set by hand, last.
        """
        if adapter is None:
            self.model.base_model.disable_adapter_layers()
        else:
            self.model.base_model.enable_adapter_layers()
            self.model.base_model.set_adapter(adapter)
        for name, tensors in self.parameters.items():
            for tensor in tensors.values():
                tensor.requires_grad_(train and name == adapter)
        self.model.train(train)
        return self.model.get_base_model()

    def save(self, folder: Path) -> None:
        """Write folder/A and folder/B, two plain PEFT folders."""
        self.model.save_pretrained(folder, selected_adapters=list(ADAPTERS))


def load_pair(
    base: str | Path,
    run: Path | None = None,
    *,
    rank: int = 16,
    alpha: int = 32,
    b_init_std: float = 1e-3,
    four_bit: bool = False,
    device: str | None = None,
    seed: int = 0,
) -> Pair:
    """Load a base (hub id or folder) in 4-bit or its own dtype (fp32 on CPU), with fresh adapters or those of `run`.

    A starts as PEFT's standard init (lora_B = 0: the base itself), B with lora_B drawn from N(0, b_init_std^2), so
    the two differ from step 0 (METHOD, "The two policies"). Adapters are fp32 whatever the base is in.
    Raises ValueError with one line for a base or an adapter that cannot be read.
    """
    base = EMBEDDED if base == "tiny" else base
    if str(base).count("/") != 1 and not Path(base).is_dir():  # a hub id has exactly one slash
        raise ValueError(f"no base model folder {str(base)!r} (give a folder, a hub id owner/name, or 'tiny')")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # bf16 compute is slow on CPUs, and fp32 there makes every equality test meaningful.
    dtype = torch.float32 if device == "cpu" else "auto"
    quantization = None
    if four_bit:
        compute = torch.float32 if device == "cpu" else torch.bfloat16  # bitsandbytes' own default is fp32: slow on GPU
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute,
        )
    # Noise beside our own output, silenced by name: "Loading weights" bars, and PEFT using a renamed attribute.
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    try:
        tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(
            base, dtype=dtype, device_map={"": device}, quantization_config=quantization
        )
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ValueError(f"cannot load the base model {str(base)!r}: {first_line(error)}") from error
    if not tokenizer.encode("1", add_special_tokens=False):  # what the loader makes of a folder without tokenizer.json
        raise ValueError(f"the tokenizer of {str(base)!r} knows no tokens; is tokenizer.json missing?")
    if tokenizer.chat_template is None:
        raise ValueError(f"{str(base)!r} has no chat template; Agon's prompts need an instruction-tuned model")

    # On CPUs with AVX512-BF16, bitsandbytes repacks 4-bit weights at the first inference for a kernel that has no
    # backward: after sampling once, gradients would stop at every frozen layer, without an error.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False

    # PeftModel.from_pretrained would freeze what it loads and ignore missing keys: so both adapters are built first,
    # and a saved file must fill exactly the tensors that are there.
    configs = {
        name: LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", lora_dropout=0.0) for name in ADAPTERS
    }
    if run is not None:
        configs = {name: read_adapter_config(run / name) for name in ADAPTERS}
    torch.manual_seed(seed)  # before the adapters exist, or lora_A would differ between runs of one seed
    try:
        peft_model = get_peft_model(model, configs["A"], adapter_name="A")
        peft_model.add_adapter("B", configs["B"])
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, re.error) as error:
        raise ValueError(
            f"cannot put the adapters of {run or 'a new pair'} on the base: {first_line(error)}"
        ) from error
    parameters = {
        name: {key: p for key, p in peft_model.named_parameters() if f".{name}." in key and "lora_" in key}
        for name in ADAPTERS
    }
    if run is None:
        with torch.no_grad():
            for key, p in parameters["B"].items():
                if "lora_B" in key:
                    p.normal_(0.0, b_init_std)
    else:
        for name in ADAPTERS:
            load_adapter(peft_model, name, run / name)
    assert all(p.dtype == torch.float32 for tensors in parameters.values() for p in tensors.values())
    assert len(parameters["A"]) == len(parameters["B"]) > 0
    return Pair(peft_model, tokenizer, stop_ids(model, tokenizer), parameters)


def stop_ids(model: PreTrainedModel, tokenizer) -> frozenset[int]:
    """Union of the end-of-turn ids of tokenizer, config and generation config: each family hides one elsewhere."""
    found: set[int] = set()
    for source in (tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id):
        found.update([source] if isinstance(source, int) else source or [])
    if not found:
        raise ValueError("the model names no end-of-turn id; its completions would never stop")
    return frozenset(found)


def read_adapter_config(folder: Path) -> LoraConfig:
    if not (folder / "adapter_config.json").is_file():
        raise ValueError(f"no adapter in {folder} (expected adapter_config.json and adapter_model.safetensors)")
    try:
        saved = LoraConfig.from_pretrained(folder)
    except (ValueError, TypeError, KeyError, OSError, RecursionError) as error:
        raise ValueError(f"damaged adapter config in {folder}: {first_line(error)}") from error
    if not isinstance(saved, LoraConfig) or saved.use_rslora or saved.use_dora or saved.init_lora_weights is not True:
        raise ValueError(f"the adapter in {folder} is not the plain LoRA that Agon writes")
    return saved


def load_adapter(peft_model: PeftModel, name: str, folder: Path) -> None:
    """Fill adapter `name` from a PEFT folder; every tensor must be there, and nothing else."""
    expected = {k: v.shape for k, v in get_peft_model_state_dict(peft_model, adapter_name=name).items()}
    try:
        saved = load_file(folder / "adapter_model.safetensors")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"damaged or missing adapter weights in {folder}: {first_line(error)}") from error
    if {k: v.shape for k, v in saved.items()} != expected:
        raise ValueError(f"the adapter in {folder} does not fit this base: {len(expected)} tensors expected")
    if not all(tensor.isfinite().all() for tensor in saved.values()):
        raise ValueError(f"the adapter in {folder} holds values that are not finite")
    set_peft_model_state_dict(peft_model, saved, adapter_name=name)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def cache_argument(model: PreTrainedModel) -> str:
    """The forward's name for its KV cache: transformers 5.24 renamed past_key_values to cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def token_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    temperature: float = 1.0,
    logit_budget: int = LOGIT_BUDGET,
) -> torch.Tensor:
    """log pi(token | everything before it) at `temperature`, (B, C) float32, zero beyond each completion's length.

    Ids in, never text: decoding and encoding again may give other ids than those that were sampled. Each row is
    prompt + completion, right-padded: under a causal mask no real token can see a pad that comes after it, so neither
    an attention mask nor shifted positions are needed, and pad = eos cannot matter. The temperature is the sampler's:
    dividing by any other would score a policy that nobody sampled from. top-p is not mirrored (as in TRL).

    The full (B, T, V) logits never exist: only hidden states that predict a completion token reach the LM head, in
    chunks whose logits are computed again in the backward pass.
    """
    lengths = [len(c) for c in completions]
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)  # (B, T)
    predicts = torch.zeros(len(prompts), width, dtype=torch.bool)  # (B, T) does position t predict a completion token?
    for i, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        ids[i, : len(p) + len(c)] = torch.tensor([*p, *c])
        predicts[i, len(p) - 1 : len(p) + len(c) - 1] = True  # logits at t score token t + 1: hence the - 1
    targets = torch.cat([torch.tensor(c, dtype=torch.long) for c in completions]).to(model.device)  # (M,)

    hidden = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state  # (B, T, D)
    hidden = hidden[predicts.to(model.device)]  # (M, D), row-major, the order of `targets`
    head = model.get_output_embeddings()
    softcap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma bends its logits

    def score(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = head(hidden).float()  # (m, V)
        if softcap:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits / temperature
        return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)  # (m,)

    size = max(1, logit_budget // model.config.get_text_config().vocab_size)  # tokens per chunk
    if len(targets) <= size:
        flat = score(hidden, targets)  # (M,)
    else:
        flat = torch.cat(
            [
                checkpoint(score, h, t, use_reentrant=False)
                for h, t in zip(hidden.split(size), targets.split(size), strict=True)
            ]
        )  # (M,)
    in_completion = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, C) masks come from lengths
    out = flat.new_zeros(len(prompts), max(lengths))  # (B, C)
    return out.masked_scatter(in_completion.to(model.device), flat)
