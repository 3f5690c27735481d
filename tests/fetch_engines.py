"""Fetch the published wheels of the engines by pip and unpack their Python files: for `make test-engines`, never in the default suite.

    python tests/fetch_engines.py FOLDER        leaves FOLDER/vllm/vllm/..., FOLDER/sglang/sglang/..., FOLDER/site/...

FOLDER/site gets what vLLM's files import when some of its classes are run without its compiled part (tests/engines_real_ple.py): a
folder to put behind the others on a path, not an environment.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ssdgram.engines.sglang.seams import SGLANG
from ssdgram.engines.vllm.seams import VLLM

PACKAGES = """aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types anyio apache-tvm-ffi==0.1.11 attrs blake3 cachetools cbor2
certifi cloudpickle compressed-tensors diskcache einops fastapi<0.137 filelock frozenlist fsspec gguf h11 httpcore httpx httpx2
huggingface-hub idna jinja2 jsonschema llguidance loguru markupsafe mpmath msgspec multidict openai openai-harmony packaging
partial-json-parser pillow prometheus-client propcache protobuf psutil py-cpuinfo pybase64 pydantic pydantic-core pyyaml pyzmq regex
requests sniffio starlette sympy tqdm transformers==5.24.0 typing-inspection uvloop xgrammar==0.2.8 yarl"""


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


def fetch_packages(folder):
    """Install what vLLM's files import into `folder`/site, unless it is there; without torch and what torch brings."""
    mark = folder / "site.complete"
    if mark.exists():
        return
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--upgrade", "--target",
                    str(folder / "site"), *PACKAGES.split()], check=True)
    mark.touch()


if __name__ == "__main__":
    for engine in (VLLM, SGLANG):
        fetch(engine, Path(sys.argv[1]))
    fetch_packages(Path(sys.argv[1]))
