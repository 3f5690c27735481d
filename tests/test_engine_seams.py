"""The seam check on small made-up packages: every way in which an engine may have changed is named; nothing is imported."""

import pytest

from ssdgram.engines.seams import Engine, Seam, differences, fault, installed, signature_of

SOURCE = '''
from elsewhere import helper
import functools

LIMIT = 7
try:
    FAST = True
except ImportError:
    FAST = False

class Table(Base):
    kind = staticmethod(helper)
    rows: int

    def __init__(self, rows: int, *, device: str = "cpu") -> None:
        self.rows = rows
        self.weight = self._make()

    @functools.cache
    def look_up(self, ids, out=None, **more):
        self.start(ids)
        return self.finish(mode="fast")
'''
SEAMS = (
    Seam("a/table.py", "Table", "(self, rows, *, device='cpu')"),
    Seam("a/table.py", "Table.__init__", None, ("self.rows", "self._make")),
    Seam("a/table.py", "Table.look_up", "(self, ids, out=None, **more)", ("self.start", "self.finish", "mode=", "'fast'"), ("cache",),
         ordered=True),
    Seam("a/table.py", "Table.kind", None, ("staticmethod", "helper")),
    Seam("a/table.py", "Table.rows"),
    Seam("a/table.py", "LIMIT", None, ("7",)),
    Seam("a/table.py", "FAST"),
    Seam("a/table.py", "helper"),
)
ENGINE = Engine("vllm", "vllm", "1.2.3", SEAMS)


@pytest.fixture
def package(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/table.py").write_text(SOURCE)
    return tmp_path


def test_files_as_expected_have_no_differences(package):
    assert differences(ENGINE, package) == []
    assert fault(ENGINE, ("1.2.3", package)) is None
    assert fault(ENGINE, ("1.2.3+cu130", package)) is None


@pytest.mark.parametrize(("before", "after", "message"), [
    ("rows: int, *", "rows: int, columns, *", r"Table is \(self, rows, columns, \*, device='cpu'\), expected \(self, rows, \*, device"),
    ('device: str = "cpu"', 'device: str = "cuda"', "Table is .*device='cuda'"),
    ("self._make()", "make()", "Table.__init__ does not mention self._make any more"),
    ("def look_up", "def find", "Table.look_up is gone"),
    ("@functools.cache", "@functools.wraps", "Table.look_up has no decorator cache"),
    ("self.start(ids)", "done = self.finish(ids)\n        self.start(ids)", "expected the order self.start, self.finish"),
    ("'fast'", "'slow'", None),
    ('mode="fast"', 'mode="slow"', "does not mention 'fast' any more"),
    ("class Table(Base)", "class Chart(Base)", "Table is gone"),
    ("LIMIT = 7", "LIMIT = 8", "LIMIT does not mention 7 any more"),
    ("import helper", "import assistant", "helper is gone"),
    ("def look_up", "def look_up(:", "cannot be parsed"),
])
def test_a_change_is_named(package, before, after, message):
    (package / "a/table.py").write_text(SOURCE.replace(before, after))
    found = differences(ENGINE, package)
    if message is None:
        assert found == []
    else:
        import re

        assert any(re.search(message, text) for text in found), found
        assert "not as published" in fault(ENGINE, ("1.2.3", package))


def test_a_file_that_is_gone_is_named(package):
    (package / "a/table.py").unlink()
    assert set(differences(ENGINE, package)) == {"a/table.py is not there"}


def test_another_version_is_refused_before_any_file_is_read(tmp_path):
    assert "written for vLLM 1.2.3, found 1.2.4: install vllm==1.2.3" in fault(ENGINE, ("1.2.4", tmp_path / "nowhere"))


def test_without_the_engine_there_is_nothing_to_be_active_in():
    assert fault(ENGINE, installed("a-package-that-nobody-has")) == "vLLM is not installed"


def test_positional_only_and_star_arguments_keep_their_form():
    import ast

    node = ast.parse("def f(a: int, /, b=2, *rest: str, c: float = 1.0, **more): pass").body[0]
    assert signature_of(node) == "(a, /, b=2, *rest, c=1.0, **more)"
