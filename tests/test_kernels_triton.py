"""Runs the kernel checks of tests/kernels: under Triton's interpreter everywhere, on the GPU where there is one.

Each file runs in a process of its own, because Triton decides when it is imported whether its functions are interpreted. The
interpreter's known faults (bf16 results cut instead of rounded, e4m3 NaN codes read as 480, bf16 products, NumPy 2.5) are
dealt with in the checks, never in a kernel.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

CHECKS = sorted(path for path in (Path(__file__).parent / "kernels").glob("check_*.py") if path.stem != "check_compile")


def run(check, **environment):
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", str(check)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_under_the_interpreter(check):
    if np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        pytest.skip("Triton's interpreter does not run with NumPy 2.5")
    run(check, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_compiling_for_an_h200(tmp_path):
    run(Path(__file__).parent / "kernels" / "check_compile.py", TRITON_CACHE_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS, ids=lambda path: path.stem)
def test_on_the_gpu(check):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    run(check)
