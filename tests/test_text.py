"""Text as documents: what is taken from a machine, and how."""

import gzip
import itertools
import os

import pytest

from ssdgram.tools import text
from ssdgram.tools.text import Document


def put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Every source in a folder of its own, nothing in them."""
    roots = {name: tmp_path / name for name in text._roots()}
    for root in roots.values():
        root.mkdir()
    monkeypatch.setattr(text, "_roots", lambda: roots)
    return roots


def long(line):
    return (line + "\n").encode() * 100


def test_code_is_taken_by_suffix_and_once(machine):
    put(machine["stdlib"] / "a.py", long("x = 1"))
    put(machine["stdlib"] / "site-packages/b.py", long("y = 1"))
    put(machine["packages"] / "again/a.py", long("x = 1"))
    put(machine["packages"] / "b.py", long("z = 1"))
    put(machine["packages"] / "c.txt", long("no code"))
    put(machine["include"] / "d.h", long("int d;"))
    put(machine["include"] / "scrap.h", b"int e;\n")
    assert {document.name for document in text.documents("code")} == {"stdlib/a.py", "packages/b.py", "include/d.h"}


def test_prose_comes_from_documentation_manuals_and_docstrings(machine):
    put(machine["doc"] / "one/changelog.gz", long("* something was changed"))
    put(machine["man"] / "man1/tool.1.gz", long('.TH TOOL 1\n.SH NAME\ntool \\- does it\n.B tool\n\\fIfile\\fR'))
    put(machine["packages"] / "p/README.md", long("# P"))
    put(machine["packages"] / "p/p.py", b'"""Module text, which is certainly longer than forty characters."""\n' + long("x = 1")
        + b'def f():\n    """What f does,\n    and why: a text of more than forty characters.\n    """\n' * 9)
    found = {document.name: document.text for document in text.documents("prose")}
    assert set(found) == {"doc/one/changelog.gz", "man/man1/tool.1.gz", "readme/p/README.md", "docstrings/p/p.py"}
    assert found["man/man1/tool.1.gz"].startswith("NAME\ntool - does it\ntool\nfile\nNAME")
    assert found["docstrings/p/p.py"].startswith("Module text, which") and "x = 1" not in found["docstrings/p/p.py"]
    assert "What f does,\nand why" in found["docstrings/p/p.py"]


def test_the_order_is_the_names_not_the_folders(machine):
    for name in ("a", "b", "c", "d", "e"):
        put(machine["stdlib"] / f"{name}.py", long(f"{name} = 1"))
    first = [document.name for document in text.documents("code")]
    assert first == [document.name for document in text.documents("code")] and first != sorted(first)


def test_sources_take_turns(machine):
    for number in range(3):
        put(machine["stdlib"] / f"{number}.py", long(f"a = {number}"))
        put(machine["perl"] / f"{number}.pm", long(f"my $a = {number};"))
    kinds = [document.name.split("/")[0] for document in text.documents("code")]
    assert kinds == ["stdlib", "perl"] * 3


@pytest.mark.parametrize("data", [b"binary\0" * 100, b"\xff\xfe latin \xe9" * 100, b""])
def test_what_is_no_text_is_left_out(tmp_path, data):
    put(tmp_path / "t/bad.txt", data)
    put(tmp_path / "t/good.txt", b"good")
    assert list(text.from_paths([tmp_path / "t"])) == [Document("t/good.txt", "good")]


def test_a_document_ends_at_its_longest_even_within_a_character(tmp_path):
    path = put(tmp_path / "long.txt", b"x" + "é".encode() * text.LONGEST)
    (document,) = text.from_paths([path])
    assert document.name == "long.txt" and document.text == "x" + "é" * ((text.LONGEST - 1) // 2)


def test_a_damaged_archive_is_left_out(tmp_path):
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"text" * 1000)[:-30])
    assert text._read(tmp_path / "bad.gz") == "" == text._read(tmp_path / "absent.txt")


def test_names_that_are_no_utf8_are_names(tmp_path):
    folder = tmp_path / os.fsdecode(b"n\xff\xfe")
    folder.mkdir()
    (folder / os.fsdecode(b"\xe9.txt")).write_text("a text")
    assert [document.text for document in text.from_paths([folder])] == ["a text"]


def test_links_are_not_followed(tmp_path):
    put(tmp_path / "t/good.txt", b"good")
    (tmp_path / "t/link.txt").symlink_to(tmp_path / "t/good.txt")
    assert len(list(text.from_paths([tmp_path / "t"]))) == 1


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="'poetry'"):
        next(text.documents("poetry"))


def test_this_machine_has_text_without_paths_in_its_names():
    for document in itertools.islice(text.documents("code"), 20):
        assert not document.name.startswith("/") and ".." not in document.name and len(document.text) >= text.SHORTEST
