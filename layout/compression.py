"""The token map of a conversion, made in a process of its own while the columns stream.

It is a second of pure Python. In a thread it would hold the interpreter lock for 5 ms at each turn, and the dozen threads that
stream need that lock a few times a block: the conversion all but stood still meanwhile (measured). If the process cannot be
started, or ends with an error, the map is made here, so that errors are the ones that `ssdgram.token_map` raises.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import ssdgram
from ssdgram.token_map import token_map

SMALL_BYTES = 1 << 20                                        # a map that is made here, in less time than a process takes to start
_CODE = ("import sys; from ssdgram.token_map import token_map; "
         "sys.stdout.buffer.write(token_map(sys.argv[1]).astype('<i4').tobytes())")


class TokenMapProcess:
    """The map of one tokenizer.json on its way. Use as a context manager: the process does not outlive it."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__; a pipe would fill up and stop the process)
        package = str(Path(ssdgram.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        with contextlib.suppress(OSError):
            if tokenizer.stat().st_size < SMALL_BYTES:
                return
            self._process = subprocess.Popen(
                [sys.executable or "python3", "-c", _CODE, str(tokenizer)], stdin=subprocess.DEVNULL, stdout=self._output,
                stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": path})

    def __enter__(self) -> TokenMapProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def done(self) -> bool:
        """Whether `result` will not wait."""
        return self._process is None or self._process.poll() is not None

    def result(self) -> np.ndarray:
        """The map, int32 [raw vocabulary]; waits for it. TokenMapError as `ssdgram.token_map`."""
        if self._process is not None and self._process.wait() == 0:
            self._output.seek(0)
            data = self._output.read()
            if data and len(data) % 4 == 0:
                return np.frombuffer(data, "<i4").astype(np.int32)
        return token_map(self._tokenizer)
