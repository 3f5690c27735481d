"""Fetch the published wheels of the engines by pip and unpack their Python files: for `make test-engines`, never in the default suite.

    python tests/fetch_engines.py FOLDER        leaves FOLDER/vllm/vllm/..., FOLDER/sglang/sglang/...
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ssdgram.engines.sglang.seams import SGLANG
from ssdgram.engines.vllm.seams import VLLM


def fetch(engine, folder):
    """Unpack the engine's Python files below `folder`, unless that version is there."""
    target, mark = folder / engine.package, folder / engine.package / f"{engine.version}.complete"
    if mark.exists():
        return
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", wheels,
                        f"{engine.package}=={engine.version}"], check=True)
        (wheel,) = Path(wheels).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target, [name for name in archive.namelist() if name.endswith((".py", "METADATA", "entry_points.txt"))])
    mark.touch()


if __name__ == "__main__":
    for engine in (VLLM, SGLANG):
        fetch(engine, Path(sys.argv[1]))
