"""An unmodified Hugging Face Llama under torch.compile(backend="fa4"): same logits, attention in one kernel.

    python examples/hf_llama.py [--seqlen 1024] [--layers 4]

Runs on a CPU (attention through SDPA) and on a Hopper GPU (CuTe-DSL kernel, bf16). Weights are random, nothing is
downloaded; replace `build()` by `AutoModelForCausalLM.from_pretrained(...)` for a real model.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fa4_inductor  # noqa: F401 - registers the backend; not needed where the package is installed


def build(layers: int, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """A small Llama whose attention is written out in eager PyTorch: softmax(QK^T + mask) V."""
    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=1024,
        vocab_size=1000,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(device, dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlen", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(args.layers, device, torch.bfloat16 if device == "cuda" else torch.float32)
    ids = torch.randint(1000, (2, args.seqlen), device=device)
    mask = torch.ones_like(ids)
    mask[1, : args.seqlen // 4] = 0  # the second sequence is shorter: left padding

    compiled = torch.compile(model, backend="fa4")
    with torch.no_grad():
        logits = compiled(ids, attention_mask=mask, use_cache=False).logits
        expected = model(ids, attention_mask=mask, use_cache=False).logits
    difference = (logits - expected)[mask.bool()].abs().max().item()
    counters = torch._dynamo.utils.counters["fa4"]
    print(f"attention sites: {counters['found']} found, {counters['matched']} understood, {counters['fused']} fused")
    print(f"largest difference from eager: {difference:.2e}")


if __name__ == "__main__":
    main()
