"""Owns the line protocol between `keepwarm bench engine` and one engine's process.

Never knows an engine. A runner builds an `Engine` and calls `main`; the driver writes one JSON object a line:

    {"op": "prefill", "prompt": [ids]}                           time until the first token of a cold prompt
    {"op": "decode", "contexts": [[ids], ...], "num_tokens": n}  time of n steps after the contexts are in KV

and reads one answer a line, `{"seconds": s}` or `{"error": "..."}`. The first line that a runner prints is
`{"ready": true, "engine", "version", "settings", "weight_bytes", "precision", "load_s"}`. End of input ends
it. By hand: echo '{"op": "prefill", "prompt": [504, 1000]}' | PYTHON run_x.py --model FILE.gguf
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Protocol


class Engine(Protocol):
    name: str
    version: str
    settings: str
    weight_bytes: int
    """Bytes of weights that one decode step has to read."""
    precision: str
    """Of its matrix products: `int8` or `fp32`."""

    def prefill(self, prompt: list[int]) -> float:
        """Seconds from the call to the first sampled token; nothing of `prompt` may be cached."""
        ...

    def decode(self, contexts: list[list[int]], num_tokens: int) -> float:
        """Seconds for `num_tokens` greedy steps of all `contexts` together, prefill not counted."""
        ...


def main(build: Callable[[argparse.Namespace], Engine]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="try another setting"
    )
    args = parser.parse_args()
    args.set = dict(pair.split("=", 1) for pair in args.set)
    # Libraries print to standard output; answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    started = time.perf_counter()
    engine = build(args)
    load_s = time.perf_counter() - started
    fields = ("version", "settings", "weight_bytes", "precision")
    facts = {name: getattr(engine, name) for name in fields}
    print(json.dumps({"ready": True, "engine": engine.name, **facts, "load_s": load_s}), file=answers)
    for line in sys.stdin:
        try:
            answer: dict[str, object] = {"seconds": _run(engine, json.loads(line))}
        except Exception as error:  # An answer for the driver; it decides whether to go on.
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def _run(engine: Engine, command: dict) -> float:
    if command["op"] == "prefill":
        return engine.prefill(command["prompt"])
    if command["op"] == "decode":
        return engine.decode(command["contexts"], command["num_tokens"])
    raise ValueError(f"unknown op {command['op']!r}")
