"""vLLM's own Qwen4Exp PLE classes on a CPU, with and without the plug-in (ssdgram.bench.engines_vllm_ple). Run by test_engine_real.py.

    python tests/engines_real_ple.py ENGINES FOLDER         makes checkpoints and stores in FOLDER, prints what came of it

ENGINES holds vLLM's files and the packages that they import, as tests/fetch_engines.py leaves them. CUDA's streams are stand-ins.
"""

import json
import os
import sys
from pathlib import Path


def main(engines, folder, steps=30):
    os.environ.update(CUDA_VISIBLE_DEVICES="", SSDGRAM_DRAM="16MiB")
    sys.path.insert(0, str(engines / "vllm"))
    sys.path.append(str(engines / "site"))
    import torch
    from _pytest.monkeypatch import MonkeyPatch
    from fake_cuda import FakeCuda

    from ssdgram.bench import engines_vllm_ple

    FakeCuda(MonkeyPatch())
    torch.Tensor.record_stream = lambda self, stream: None
    print(json.dumps(engines_vllm_ple.identity(folder, 700, steps, "cpu")))


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]
    main(*(Path(argument) for argument in sys.argv[1:3]))
