"""transformers on PyTorch, fp32 weights dequantised from the GGUF, SDPA, its own dynamic cache.

A bare loop of forward calls: `generate` would add its own overhead to each step.
"""

import argparse
import time
from pathlib import Path

import protocol
import torch
import transformers


class Transformers:
    name = "transformers"
    precision = "fp32"
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        attention = args.set.get("attn", "sdpa")
        path = Path(args.model)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation=attention
        ).eval()
        self.weight_bytes = sum(weight.nbytes for weight in self._model.parameters())
        self.settings = f"fp32, {attention}, dynamic cache, last logits only"

    @torch.inference_mode()
    def prefill(self, prompt: list[int]) -> float:
        ids = torch.tensor([prompt])
        started = time.perf_counter()
        int(self._model(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - started

    @torch.inference_mode()
    def decode(self, contexts: list[list[int]], num_tokens: int) -> float:
        answer = self._model(torch.tensor(contexts), use_cache=True, logits_to_keep=1)
        ids = answer.logits[:, -1].argmax(-1, keepdim=True)
        started = time.perf_counter()
        for _ in range(num_tokens):
            answer = self._model(ids, cache=answer.past_key_values, use_cache=True, logits_to_keep=1)
            ids = answer.logits[:, -1].argmax(-1, keepdim=True)
        ids.tolist()
        return time.perf_counter() - started


if __name__ == "__main__":
    protocol.main(Transformers)
