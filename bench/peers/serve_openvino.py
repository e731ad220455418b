"""Owns OpenVINO GenAI as an OpenAI-compatible server: chat completions, streaming or not, nothing else.

OpenVINO GenAI brings no server. This one adds as little as it can: a thread for each connection, and one
thread that steps the continuous-batching pipeline. How many tokens came from the prefix cache is not told by
the library, so usage leaves it out. Used by bench/replay.py; prints `ready`, runs until SIGTERM.
"""

import argparse
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openvino_genai


class Pipeline:
    """One continuous-batching pipeline, shared by all connections."""

    def __init__(self, args: argparse.Namespace) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.num_kv_blocks = args.blocks
        scheduler.max_num_batched_tokens = args.batch_tokens
        scheduler.max_num_seqs = args.sequences
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            args.model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": args.threads}
        )
        self.tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count(1)
        # Guards the pipeline, and wakes the stepper on arrival and the readers after each step.
        self._changed = threading.Condition()
        threading.Thread(target=self._step_forever, daemon=True).start()

    def generate(self, ids: openvino_genai.TokenizedInputs, body: dict) -> Iterator[list[int]]:
        """Yield the new tokens of a request after each step that gave any."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or 256)
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        if not config.ignore_eos:
            config.set_eos_token_id(self.tokenizer.get_eos_token_id())
        with self._changed:
            handle = self._pipeline.add_request(next(self._ids), ids.input_ids, config)
            self._changed.notify_all()
        running = openvino_genai.GenerationStatus.RUNNING
        while True:
            with self._changed:
                while not handle.can_read() and handle.get_status() == running:
                    self._changed.wait()
                new = list(handle.read().values()) if handle.can_read() else []
            if not new:
                return
            yield list(new[0].generated_ids)

    def _step_forever(self) -> None:
        while True:
            with self._changed:
                while not self._pipeline.has_non_finished_requests():
                    self._changed.wait()
                self._pipeline.step()
                self._changed.notify_all()
            # Without this pause the lock is taken again before a new request gets in.
            threading.Event().wait(0.0002)


def make_handler(pipeline: Pipeline) -> type[BaseHTTPRequestHandler]:
    tokenizer = pipeline.tokenizer

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "smol", "object": "model"}]})

        def do_POST(self) -> None:
            if self.path != "/v1/chat/completions":
                self._send(404, {"error": {"message": f"no {self.path} here"}})
                return
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            messages = [{"role": m["role"], "content": m["content"]} for m in body["messages"]]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
            ids = tokenizer.encode(text, add_special_tokens=False)
            num_prompt = ids.input_ids.get_shape()[1]
            if body.get("stream"):
                self._stream(pipeline.generate(ids, body), num_prompt)
                return
            tokens = [token for new in pipeline.generate(ids, body) for token in new]
            message = {"role": "assistant", "content": tokenizer.decode(tokens)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._send(200, {"choices": [choice], "usage": usage(num_prompt, len(tokens))})

        def _stream(self, parts: Iterator[list[int]], num_prompt: int) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            tokens: list[int] = []
            sent = ""
            for new in parts:
                tokens += new
                text = tokenizer.decode(tokens)
                # A token may end inside a character; the rest of it comes with the next one.
                if text.endswith("\ufffd"):
                    continue
                self._event({"choices": [{"index": 0, "delta": {"content": text[len(sent) :]}}]})
                sent = text
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self._event({"choices": [], "usage": usage(num_prompt, len(tokens))})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, data: dict) -> None:
            self.wfile.write(b"data: " + json.dumps(data).encode() + b"\n\n")
            self.wfile.flush()

        def _send(self, status: int, data: dict) -> None:
            content = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    return Handler


def usage(num_prompt: int, num_output: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--blocks", type=int, required=True, help="KV blocks; a CPU block is 32 tokens")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--batch-tokens", type=int, default=512)
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", args.port), make_handler(Pipeline(args)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    print("ready", args.port, flush=True)
    stop.wait()


if __name__ == "__main__":
    main()
