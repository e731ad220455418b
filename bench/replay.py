"""Owns the end-to-end comparison: recorded agent dialogues against our server and its peers, in alternation.

The replay client is an outside program (`--client PATH`): it speaks to any OpenAI-compatible server, sends
the recorded dialogues closed loop and writes one JSON result a run. This script starts a fresh server for
each run, calls the client, and prints medians and ratios. Counts (amplification) are the gate; times are
reported.

    .venv/bin/python bench/peers/install.py
    .venv/bin/python bench/replay.py --client agent_replay.py --traces dialogues.jsonl.gz --runs 3

Results go to bench/out/replay/ (each run) and bench/out/replay.json (medians). Exit status 1 when one of our
runs failed or ours computed more than the condition allows.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "bench" / "out"
PEERS = ROOT / "bench" / "peers"
OURS = "keepwarm"
START_TIMEOUT_S = 300
STOP_TIMEOUT_S = 30

# The workload of every condition: short enough for two cores, long enough that context matters.
WORKLOAD = [
    "--max-context",
    "2600",
    "--max-turns",
    "5",
    "--max-tokens",
    "24",
    "--seed",
    "1",
    "--warm-request",
]
AMPLE_TOKENS = 46_400
"""Device KV that holds every agent's context at once."""
TIGHT_TOKENS = 3_584
"""27 % of the live set of 16 agents, the shared system prompt counted once."""
HOST_BYTES = 4 << 30
HOST_MIB = 8192
OPENVINO_BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Condition:
    name: str
    num_agents: int
    num_tasks: int
    device_tokens: int
    max_amplification: float

    @property
    def is_tight(self) -> bool:
        return self.device_tokens == TIGHT_TOKENS


CONDITIONS = (
    Condition("ample-1", 1, 2, AMPLE_TOKENS, 1.10),
    Condition("ample-4", 4, 8, AMPLE_TOKENS, 1.10),
    Condition("ample-16", 16, 16, AMPLE_TOKENS, 1.10),
    Condition("tight-16", 16, 16, TIGHT_TOKENS, 1.20),
)

METRICS = ("task_s_mean", "wall_s", "ttft_first_mean", "ttft_later_mean", "ttft_later_p95", "tpot_mean")
COUNTS = ("amplification", "computed_tokens", "fresh_tokens", "out_tokens", "server_cpu_s", "errors")


def our_server(args: argparse.Namespace, condition: Condition, port: int) -> list[str]:
    command = [sys.executable, "-m", "keepwarm", "serve", "--port", str(port), "--model", str(args.model)]
    command += ["--served-model-name", "smol", "--num-threads", str(args.threads), "--log-level", "warning"]
    command += ["--kv-device-tokens", str(condition.device_tokens), "--kv-host-bytes", str(HOST_BYTES)]
    return command + args.serve_args.split()


def llamacpp_server(args: argparse.Namespace, condition: Condition, port: int) -> list[str]:
    slots = 1 if condition.is_tight else condition.num_agents
    context = TIGHT_TOKENS if condition.is_tight else slots * 3072
    command = [str(ROOT / ".venv-peers/llamacpp/bin/python"), str(PEERS / "serve_llamacpp.py")]
    command += ["--model", str(args.model), "--port", str(port), "--threads", str(args.threads)]
    return [*command, "--slots", str(slots), "--context", str(context), "--host-cache-mib", str(HOST_MIB)]


def openvino_server(args: argparse.Namespace, condition: Condition, port: int) -> list[str]:
    command = [str(ROOT / ".venv-peers/openvino/bin/python"), str(PEERS / "serve_openvino.py")]
    command += ["--model", str(args.model), "--port", str(port), "--threads", str(args.threads)]
    return [*command, "--blocks", str(condition.device_tokens // OPENVINO_BLOCK_TOKENS)]


Server = Callable[[argparse.Namespace, Condition, int], list[str]]
SERVERS: dict[str, Server] = {
    OURS: our_server,
    "llama.cpp": llamacpp_server,
    "openvino": openvino_server,
}


@contextlib.contextmanager
def running(command: list[str], port: int, log_path: Path) -> Iterator[int]:
    """A server in a process group of its own, ready when this yields its process id."""
    with log_path.open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until_ready(server, port, log_path)
        yield server.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.send_signal(signal.SIGTERM)
        try:
            server.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended: {last_line(log_path)} (log: {log_path})")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"the server was not ready within {START_TIMEOUT_S} s (log: {log_path})")


def last_line(path: Path) -> str:
    lines = path.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def client_python(args: argparse.Namespace) -> str:
    python = args.client_python or ROOT / ".venv-peers/client/bin/python"
    if not Path(python).exists():
        sys.exit(f"{python} is missing; run: {sys.executable} {PEERS / 'install.py'} client")
    return str(python)


def prepare_tasks(args: argparse.Namespace) -> Path:
    """Turn the traces into the client's own task file, counting tokens with the model's tokenizer."""
    from keepwarm.gateway.text.assets import load_text_assets

    if args.tasks:
        return Path(args.tasks)
    tokenizer = OUT / "replay" / "tokenizer.json"
    tokenizer.write_text(load_text_assets(args.model).tokenizer_json, encoding="utf-8")
    tasks = OUT / "replay" / "tasks.jsonl.gz"
    command = [client_python(args), args.client, "prepare", "--traces", args.traces]
    command += ["--tokenizer", str(tokenizer), "--out", str(tasks)]
    if args.tool_times:
        command += ["--tool-times", args.tool_times]
    subprocess.run(command, check=True)
    return tasks


def replay(args: argparse.Namespace, tasks: Path, condition: Condition, engine: str, run: int) -> dict:
    """One run against one fresh server; the client's summary, or an error."""
    name = f"{condition.name}-{engine}-{run}"
    result_path = OUT / "replay" / f"{name}.json"
    result_path.unlink(missing_ok=True)
    port = free_port()
    log_path = OUT / "replay" / f"{name}.log"
    try:
        with running(SERVERS[engine](args, condition, port), port, log_path) as pid:
            command = [client_python(args), args.client, "run", "--tasks", str(tasks), *WORKLOAD]
            command += ["--base-url", f"http://127.0.0.1:{port}", "--model", "smol", "--pid", str(pid)]
            command += ["--agents", str(condition.num_agents), "--num-tasks", str(condition.num_tasks)]
            command += ["--label", f"{engine} {condition.name}", "--out", str(result_path)]
            subprocess.run([*command, *args.client_args.split()], check=False, stdout=subprocess.DEVNULL)
    except RuntimeError as error:
        return {"error": str(error)}
    if not result_path.is_file():
        return {"error": f"the client wrote no result (server log: {log_path})"}
    summary: dict = json.loads(result_path.read_text())["summary"]
    return summary


def medians(summaries: list[dict]) -> dict:
    """Medians of what every run has; the largest number of errors; the spread of task times."""
    good = [summary for summary in summaries if "error" not in summary]
    out: dict = {"runs": len(good), "failed_runs": [s["error"] for s in summaries if "error" in s]}
    for name in METRICS + COUNTS:
        values = [summary[name] for summary in good if isinstance(summary.get(name), int | float)]
        out[name] = (max(values) if name == "errors" else statistics.median(values)) if values else None
    times = [summary["task_s_mean"] for summary in good if summary.get("task_s_mean")]
    out["spread"] = max(times) / min(times) if times else None
    return out


def compare(results: dict[tuple[str, str], list[dict]], conditions: list[Condition]) -> list[dict]:
    """One row for each condition and engine. Ratios are its time over ours: above 1, ours is faster."""
    rows = []
    for condition in conditions:
        ours = medians(results.get((condition.name, OURS), []))
        for (name, engine), summaries in results.items():
            if name != condition.name:
                continue
            row = {"condition": name, "engine": engine, **medians(summaries)}
            for metric in METRICS:
                has_both = row[metric] and ours[metric]
                row[f"{metric}_over_ours"] = row[metric] / ours[metric] if has_both else None
            if engine == OURS:
                amplification = row["amplification"]
                is_counted = amplification is not None and amplification <= condition.max_amplification
                row["is_passed"] = is_counted and not row["errors"] and not row["failed_runs"]
            rows.append(row)
    return rows


def print_rows(rows: list[dict]) -> None:
    def text(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    print(
        f"{'condition':<10} {'engine':<10} {'runs':>4} {'task s':>8} {'TTFT 1st':>8} {'TTFT later':>10} "
        f"{'amplif.':>8} {'CPU s':>7} {'errors':>6} {'spread':>6}  over ours: task, TTFT later"
    )
    for row in rows:
        errors = "-" if row["errors"] is None else f"{row['errors']:.0f}"
        print(
            f"{row['condition']:<10} {row['engine']:<10} {row['runs']:>4} {text(row['task_s_mean']):>8} "
            f"{text(row['ttft_first_mean']):>8} {text(row['ttft_later_mean']):>10} "
            f"{text(row['amplification'], 3):>8} {text(row['server_cpu_s'], 0):>7} {errors:>6} "
            f"{text(row['spread']):>6}  {text(row['task_s_mean_over_ours'])}, "
            f"{text(row['ttft_later_mean_over_ours'])}"
        )
        for error in row["failed_runs"]:
            print(f"{'':<10} failed: {error}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", required=True, help="the replay client, a Python program")
    parser.add_argument("--traces", help="recorded dialogues, as the client's `prepare` reads them")
    parser.add_argument("--tool-times", help="recorded tool times, for pauses")
    parser.add_argument("--tasks", help="a task file that `prepare` wrote earlier, instead of --traces")
    parser.add_argument("--model", help="GGUF file; default: the default model")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--conditions", nargs="+", choices=[c.name for c in CONDITIONS], default=None)
    parser.add_argument("--engines", nargs="+", choices=list(SERVERS), default=list(SERVERS))
    parser.add_argument("--serve-args", default="", help="more flags for `keepwarm serve`, in one string")
    parser.add_argument("--client-args", default="", help="more flags for the client's `run`, in one string")
    parser.add_argument("--client-python", help="interpreter of the client; default: .venv-peers/client")
    args = parser.parse_args()
    if not args.tasks and not args.traces:
        parser.error("give --traces or --tasks")
    return args


def main() -> int:
    from keepwarm.supply.models import ensure_default_model

    args = parse_args()
    args.model = Path(args.model) if args.model else ensure_default_model()
    conditions = [c for c in CONDITIONS if args.conditions is None or c.name in args.conditions]
    (OUT / "replay").mkdir(parents=True, exist_ok=True)
    tasks = prepare_tasks(args)
    results: dict[tuple[str, str], list[dict]] = {}
    for run in range(1, args.runs + 1):
        for condition in conditions:
            # Another engine goes first each time: a machine that warms up or slows down favours nobody.
            turn = (run - 1) % len(args.engines)
            for engine in args.engines[turn:] + args.engines[:turn]:
                started = time.monotonic()
                summary = replay(args, tasks, condition, engine, run)
                results.setdefault((condition.name, engine), []).append(summary)
                said = summary.get("error") or f"task {summary['task_s_mean']:.1f} s"
                print(
                    f"run {run} {condition.name} {engine}: {said} ({time.monotonic() - started:.0f} s)",
                    flush=True,
                )
    rows = compare(results, conditions)
    (OUT / "replay.json").write_text(json.dumps(rows, indent=1))
    print_rows(rows)
    return 0 if all(row.get("is_passed", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
