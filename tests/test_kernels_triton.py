"""Runs the kernel checks of tests/kernels: under Triton's interpreter everywhere, on the GPU where there is one.

They run in processes of their own, because Triton decides when it is imported whether its functions are interpreted. The
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

COMPILE = Path(__file__).parent / "kernels" / "check_compile.py"
CHECKS = sorted(path for path in COMPILE.parent.glob("check_*.py") if path != COMPILE)


def run(checks, workers, **environment):
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    options = ["-q", "-n", str(workers), "-p", "no:cacheprovider", "-o", "addopts="]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *map(str, checks)], env=variables, capture_output=True,
                          text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    print(done.stdout[-300:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_under_the_interpreter():
    if np.lib.NumpyVersion(np.__version__) >= "2.5.0":
        pytest.skip("Triton's interpreter does not run with NumPy 2.5")
    run(CHECKS, min(4, len(os.sched_getaffinity(0))), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiling_for_an_h200(tmp_path):
    run([COMPILE], 0, TRITON_CACHE_DIR=str(tmp_path), CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_the_gpu():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    run(CHECKS, min(6, len(os.sched_getaffinity(0))))
