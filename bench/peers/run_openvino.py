"""OpenVINO GenAI, continuous batching, reading the GGUF directly. Driven step by step with token ids."""

import argparse
import os
import time

import numpy
import openvino
import openvino_genai
import protocol

SETTINGS = {"max_num_batched_tokens": "2048", "dynamic_split_fuse": "1", "cache_gb": "2"}


class OpenVino:
    name = "openvino"
    precision = "int8"
    version = f"openvino-genai {openvino_genai.get_version()}"

    def __init__(self, args: argparse.Namespace) -> None:
        chosen = {**SETTINGS, **args.set}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = int(chosen["max_num_batched_tokens"])
        scheduler.dynamic_split_fuse = chosen["dynamic_split_fuse"] == "1"
        scheduler.cache_size = int(chosen["cache_gb"])
        scheduler.max_num_seqs = 16
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": args.threads}
        properties.update({name: value for name, value in chosen.items() if name.isupper()})
        self.settings = "Q4_1 as its reader converts it, " + ", ".join(f"{k}={v}" for k, v in chosen.items())
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)
        # What its reader makes of the file is not told; the file is the best guess.
        self.weight_bytes = os.path.getsize(args.model)
        self._next_id = 0

    def prefill(self, prompt: list[int]) -> float:
        handles = [self._add(prompt, 1)]
        started = time.perf_counter()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - started
        assert self._lengths(handles) == [1]
        return seconds

    def decode(self, contexts: list[list[int]], num_tokens: int) -> float:
        handles = [self._add(context, num_tokens + 1) for context in contexts]
        # Contexts fit one batch, so one step prefills them all and gives each its first token.
        self._pipeline.step()
        started = time.perf_counter()
        num_steps = 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            num_steps += 1
        seconds = time.perf_counter() - started
        assert self._lengths(handles) == [num_tokens + 1] * len(contexts)
        assert num_steps == num_tokens, (
            f"{num_steps} steps for {num_tokens} tokens: contexts did not start together"
        )
        return seconds

    def _add(self, prompt: list[int], num_tokens: int) -> openvino_genai.py_openvino_genai.GenerationHandle:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
        return self._pipeline.add_request(self._next_id, ids, config)

    def _lengths(self, handles: list) -> list[int]:
        return [len(handle.read_all()[0].generated_ids) for handle in handles]


if __name__ == "__main__":
    protocol.main(OpenVino)
