"""The engines' own Engram modules with the plug-ins, on a GPU: outputs bit for bit, and the Engram part of a decode step in time.

    python -m ssdgram.bench.engines --peer FOLDER [--steps 200] [--sections vllm,time,vllm_ple,sglang,sglang_time,tp2] [--out FOLDER]

FOLDER/vllm and FOLDER/sglang hold the engines' published Python files, as tests/fetch_engines.py unpacks them; what these import
beside torch has to be installed (docs/vllm.md). vllm: the real `Engram` with its own pinned table and the same one with the plug-in,
over steps of mixed prefill and decode: eager, piecewise, whole graph. time: ids ready to rows staged, both layers, all hits, against
the engine's own lookup of a pinned table in a graph of its own; then all misses. vllm_ple: Qwen4Exp's PLE modules, bf16 and fp8.
sglang, sglang_time: SGLang's `Engram` likewise. tp2 (by itself, on two GPUs): vLLM's `Engram` with TP 2 over NCCL, two ranks on one
server. Each section stands alone and says what failed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import click

import ssdgram
from ssdgram.bench.facts import write_results
from ssdgram.errors import UnavailableError

VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
SECTIONS = ("vllm", "time", "vllm_ple", "sglang", "sglang_time")
ORDER = (*SECTIONS, "tp2")                                   # SGLang replaces a function of Triton's that vLLM's kernels call: vLLM first
ROWS = 30_011                                                # rows a column of the made-up tables


def build(folder: Path, rows: int) -> tuple[Path, Path]:
    """(checkpoint, store) of about `rows` rows a column under `folder`, made if they are not there."""
    if not (folder / "store" / "manifest.json").exists():
        ssdgram.synthesize(folder / "checkpoint", vocab_size=rows, seed=1, hidden_size=512)
        ssdgram.convert(folder / "checkpoint", folder / "store")
    return folder / "checkpoint", folder / "store"


def leave(status: int) -> None:
    """End the process at once. The engines leave process groups and threads behind that wait for each other: with both engines' in one
    process it did not end by itself."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@click.command()
@click.option("--peer", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder with the engines' Python files.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where the made-up checkpoint and store go (about 2 GiB).")
@click.option("--steps", type=int, default=200, show_default=True, help="Steps of each mode.")
@click.option("--rows", type=int, default=ROWS, show_default=True, help="Rows of a column of the made-up tables.")
@click.option("--table-gib", type=int, default=32, show_default=True, help="Pinned table that the engine's own lookup is timed on.")
@click.option("--sections", default=",".join(SECTIONS), show_default=True, help="What to run.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for engines.json.")
def main(peer: Path, folder: Path | None, steps: int, rows: int, table_gib: int, sections: str, out: Path | None) -> None:
    """Run the engines' Engram modules with the plug-ins and say what differs; exit status 1 if anything does or fails."""
    from ssdgram.bench import engines_sglang, engines_sglang_time, engines_tp2, engines_vllm, engines_vllm_ple

    wanted = {name.strip() for name in sections.split(",")}
    if unknown := wanted - set(ORDER):
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: expected some of {', '.join(ORDER)}", param_hint="--sections")
    peer = peer.resolve()
    found = {name for name in VERSIONS if (peer / name / name / "__init__.py").is_file()}
    if not found:
        raise UnavailableError(f"{peer}: neither vllm/vllm nor sglang/sglang is there; `make test-engines` fetches them into .peer/engines")
    for name, version in VERSIONS.items():
        sys.path.insert(0, str(peer / name))
        about = peer / name / f"{name}-{version}.dist-info"  # vLLM takes a package without a version for one without Triton
        about.mkdir(parents=True, exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    results: dict[str, Any] = {}
    failed = []
    with tempfile.TemporaryDirectory() as own:
        place = folder or Path(own)
        checkpoint, store = build(place, rows)
        os.environ["SSDGRAM_STORE"] = str(store)
        os.environ.setdefault("SSDGRAM_DRAM", "2GiB")
        runs = {"vllm": lambda: engines_vllm.identity(checkpoint, store, steps),
                "time": lambda: engines_vllm.timing(checkpoint, store, table_gib),
                "vllm_ple": lambda: engines_vllm_ple.identity(place, rows, steps),
                "sglang": lambda: engines_sglang.identity(checkpoint, store, steps),
                "sglang_time": lambda: engines_sglang_time.timing(checkpoint, store, table_gib),
                "tp2": lambda: engines_tp2.identity(checkpoint, store, steps)}
        for section in sorted(wanted, key=ORDER.index):
            print(f"== {section}", flush=True)
            try:
                results[section] = runs[section]()
                print(json.dumps(results[section], indent=1), flush=True)
                if results[section].get("wrong", 0):
                    failed.append(section)
            except Exception as error:                       # one section's peer may be incomplete: the others still count
                traceback.print_exc()
                results[section] = {"failed": f"{type(error).__name__}: {error}"}
                failed.append(section)
            path = write_results("engines", results)
            if out is not None:
                shutil.copy(path, out)
    if failed:
        click.echo(f"Error: not as wanted: {', '.join(failed)}", err=True)
    leave(1 if failed else 0)


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
