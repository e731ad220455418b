"""Owns llama.cpp as an OpenAI-compatible server: the server object of `xllamacpp` with its own HTTP side.

Used by bench/replay.py. Prints `ready` when requests are served, runs until it is told to stop (SIGTERM).
"""

import argparse
import signal
import threading

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, required=True, help="sequences at the same time")
    parser.add_argument("--context", type=int, required=True, help="KV of all slots together, in tokens")
    parser.add_argument("--host-cache-mib", type=int, default=8192, help="memory for prompts without a slot")
    args = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.hostnames = ["127.0.0.1"]
    params.port = args.port
    params.n_parallel = args.slots
    params.n_ctx = args.context
    params.kv_unified = False
    params.n_batch = 2048
    params.n_ubatch = 512
    params.cache_ram_mib = args.host_cache_mib
    params.cpuparams.n_threads = args.threads
    params.cpuparams_batch.n_threads = args.threads
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    server = xllamacpp.Server(params)
    print("ready", server.listening_address, flush=True)
    stop.wait()


if __name__ == "__main__":
    main()
