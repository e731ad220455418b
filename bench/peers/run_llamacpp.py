"""llama.cpp through the server object of `xllamacpp`, spoken to in process (no HTTP in the figures).

Times are llama.cpp's own (`timings` in its answer). Its best settings on two AVX2 cores: see SETTINGS.
"""

import argparse
import os
import threading

import protocol
import xllamacpp

NUM_SLOTS = 16
SLOT_TOKENS = 2304
SETTINGS = {"flash_attn": "on", "n_batch": "2048", "n_ubatch": "512"}


class LlamaCpp:
    name = "llama.cpp"
    precision = "int8"
    version = f"xllamacpp {xllamacpp.__version__}"

    def __init__(self, args: argparse.Namespace) -> None:
        chosen = {**SETTINGS, **args.set}
        params = xllamacpp.CommonParams()
        params.model.path = args.model
        params.n_ctx = NUM_SLOTS * SLOT_TOKENS
        params.n_parallel = NUM_SLOTS
        # Separate streams: with one shared cache each sequence attends to the cells of all others.
        params.kv_unified = False
        params.n_batch = int(chosen["n_batch"])
        params.n_ubatch = int(chosen["n_ubatch"])
        params.cpuparams.n_threads = args.threads
        params.cpuparams_batch.n_threads = args.threads
        params.cache_prompt = False
        params.cache_ram_mib = 0
        kinds = xllamacpp.llama_flash_attn_type
        params.flash_attn_type = (
            kinds.LLAMA_FLASH_ATTN_TYPE_ENABLED
            if chosen["flash_attn"] == "on"
            else kinds.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self.settings = f"Q4_1, KV f16, {NUM_SLOTS} slots, " + ", ".join(
            f"{k}={v}" for k, v in chosen.items()
        )
        # The embedding is tied to the output projection, so a step reads the whole file.
        self.weight_bytes = os.path.getsize(args.model)
        self._server = xllamacpp.Server(params)

    def prefill(self, prompt: list[int]) -> float:
        (timings,) = self._complete([prompt], 1)
        assert timings["prompt_n"] == len(prompt), timings
        return timings["prompt_ms"] / 1e3

    def decode(self, contexts: list[list[int]], num_tokens: int) -> float:
        # The first token comes out of the prefill; `predicted_ms` starts there.
        answers = self._complete(contexts, num_tokens + 1)
        assert all(timings["predicted_n"] == num_tokens + 1 for timings in answers), answers
        return max(timings["predicted_ms"] for timings in answers) / 1e3

    def _complete(self, prompts: list[list[int]], num_tokens: int) -> list[dict]:
        # One call with several prompts puts them in the queue together, so that they decode in step.
        body = {
            "prompt": prompts if len(prompts) > 1 else prompts[0],
            "n_predict": num_tokens,
            "temperature": 0,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": False,
        }
        answer: list = []
        done = threading.Event()

        def receive(value: object) -> bool:
            answer.append(value)
            done.set()
            return False

        result = self._server.handle_completions(body, receive)
        if not answer:
            answer.append(result)
        value = answer[0]
        items = value if isinstance(value, list) else [value]
        if any("timings" not in item for item in items):
            raise RuntimeError(str(value)[:300])
        return [item["timings"] for item in items]


if __name__ == "__main__":
    protocol.main(LlamaCpp)
