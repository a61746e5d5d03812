"""What token_logprobs saves: peak memory and time of log-probs + backward, against the naive form, in one run.

The naive form holds the logits of every completion token, their log-softmax, and the gradient of both. 16 rows of 1,024
tokens at V = 151,936 need 30 GB in that form; by default this runs 2 rows, whose naive form fits an ordinary machine.
--bf16 keeps the model, and the naive form's logits, in bf16: then 16 rows need 19 GB.

Run:  python tests/bench_logprobs.py [--rows 2] [--tokens 1024] [--width 1024] [--device cpu] [--bf16]
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def bare_model(width: int, vocabulary: int, device: str):
    """A Qwen3 of one thin layer: next to nothing but the LM head, the worst case for computing its logits twice."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, intermediate_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)  # one small thing to train, after all layers
    return model.train()


def naive_logprobs(model, prompts, completions, temperature=1.0):
    """The textbook: all logits, log_softmax, gather. Rows of one length."""
    import torch

    ids = torch.tensor([[*p, *c] for p, c in zip(prompts, completions, strict=True)], device=model.device)  # (B, T)
    length = len(completions[0])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=length + 1).logits[:, :-1]  # (B, C, V)
    return (logits / temperature).log_softmax(-1).gather(-1, ids[:, -length:, None])[..., 0]  # (B, C)


def measure(form: str, rows: int, tokens: int, width: int, vocabulary: int, device: str, bf16: bool) -> None:
    """Print peak bytes beyond the model, seconds, and the norm of the gradient, in a process of its own."""
    import torch

    from model import peak_memory, token_logprobs

    torch.set_num_threads(1)
    model = bare_model(width, vocabulary, device).to(torch.bfloat16 if bf16 else torch.float32)
    generator = torch.Generator().manual_seed(0)
    completions = torch.randint(vocabulary, (rows, tokens), generator=generator).tolist()
    prompts = [[1, 2, 3, 4]] * rows
    logprobs = token_logprobs if form == "ours" else naive_logprobs
    logprobs(model, prompts[:1], [completions[0][:8]]).sum().backward()  # load what is loaded once
    model.model.norm.weight.grad = None
    if device == "cpu":
        Path("/proc/self/clear_refs").write_text("5")  # resets the process's peak
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, started = peak_memory(device), time.perf_counter()
    logprobs(model, prompts, completions, 0.6).sum().backward()
    gradient = model.model.norm.weight.grad.norm().item()
    print(peak_memory(device) - before, time.perf_counter() - started, gradient)


def compare(
    rows: int, tokens: int, width: int, vocabulary: int, device: str, bf16: bool = False
) -> dict[str, tuple[float, float, float]]:
    """{"naive": (bytes, seconds, gradient norm), "ours": ...}, each measured in a process of its own."""
    # glibc keeps freed memory for later unless told to map each block by itself: the peak would not be of what is used.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    results = {}
    for form in ("naive", "ours"):
        arguments = [form, *map(str, (rows, tokens, width, vocabulary)), device, *["--bf16"] * bf16]
        done = subprocess.run(
            [sys.executable, __file__, "--measure", *arguments], env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{form} form: exit code {done.returncode}: {done.stderr.strip()[-300:]}")
        results[form] = tuple(map(float, done.stdout.split()))
    return results


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], *map(int, sys.argv[3:7]), sys.argv[7], "--bf16" in sys.argv)
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 2), ("tokens", 1024), ("width", 1024), ("vocabulary", 151_936)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    found = compare(**vars(args))
    for form, (size, seconds, gradient) in found.items():
        print(f"{form:6} peak {size / 2**30:6.2f} GiB   {seconds:7.2f} s   gradient norm {gradient:.6f}")
    (naive, slow, _), (ours, fast, _) = found["naive"], found["ours"]
    print(f"ours / naive: memory {ours / naive:.3f}, time {fast / slow:.2f}")
