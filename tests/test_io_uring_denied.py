"""With io_uring refused by a real seccomp filter, as in a container with the default profile: `auto` is `threads`.

The whole suite is run so by `make test-denied`.
"""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent

SMOKE = """
import sys
from pathlib import Path
from queue_pages import make_columns, running
from ssdgram import queues
from ssdgram.errors import UnavailableError
name, reason = queues.resolve("auto")
assert name == "threads", name
assert "seccomp" in reason, reason
try:
    queues.resolve("uring")
except UnavailableError as error:
    assert "seccomp" in str(error), error
else:
    raise SystemExit("uring was not refused")
folder = Path(sys.argv[1])
rows = make_columns(folder)
with running(folder, "auto") as rig:
    assert rig.queue.name == "threads"
    rig.want(0, 1, 3, [7])
    assert list(rig.serve([0])) == [0]
    rig.check(rows)
print("served by", rig.queue.name)
"""


def run_denied(*command):
    """Run a Python command with io_uring refused."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.run([sys.executable, str(TESTS / "deny_io_uring.py"), sys.executable, *command], capture_output=True,
                          text=True, timeout=300, env=environment)


def test_auto_serves_by_threads_and_says_why(tmp_path):
    result = run_denied("-c", SMOKE, str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "served by threads\n"
