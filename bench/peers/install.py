"""Owns the peers' environments: one under `.venv-peers/` for each, with the versions that are compared with.

Never touches Keepwarm's own environment. Run by hand, once: python bench/peers/install.py [name ...]
An environment that was completed with the same packages is left alone.
"""

import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PACKAGES = {
    "llamacpp": ["xllamacpp==2026.10.11549"],
    "openvino": ["openvino-genai==2026.4.1.0", "openvino==2026.4.1", "numpy==2.4.6"],
    # The very torch that Keepwarm uses; accelerate and gguf are what transformers wants for GGUF files.
    "transformers": ["torch==2.13.0", "transformers==5.24.0", "gguf==0.19.0", "accelerate"],
    # Not a peer: what the outside replay client of bench/replay.py needs.
    "client": ["aiohttp==3.14.5", "numpy==2.4.6", "tokenizers>=0.23,<0.24"],
}


def install(name: str) -> None:
    folder = ROOT / ".venv-peers" / name
    marker = folder / "installed.txt"
    wanted = "\n".join(PACKAGES[name])
    if marker.is_file() and marker.read_text() == wanted:
        print(f"{name}: already installed")
        return
    print(f"{name}: installing {', '.join(PACKAGES[name])}", flush=True)
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES[name]]
    subprocess.run(command, check=True)
    marker.write_text(wanted)


def main() -> None:
    names = sys.argv[1:] or list(PACKAGES)
    unknown = sorted(set(names) - set(PACKAGES))
    if unknown:
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(PACKAGES)}")
    for name in names:
        install(name)


if __name__ == "__main__":
    main()
