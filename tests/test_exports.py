"""The public face: exports equal __all__, sorted, imported lazily; and nothing of ours is imported by a top-level name."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import ssdgram
from ssdgram import errors

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("layout", "cache", "kernels", "tools", "bench")


def test_exports_equal_all():
    assert ssdgram.__all__ == sorted(set(ssdgram.__all__))
    homes = {name for names in ssdgram._HOMES.values() for name in names}
    assert homes | {"__version__"} == set(ssdgram.__all__)
    for name in ssdgram.__all__:
        assert getattr(ssdgram, name) is not None
        assert name in dir(ssdgram)


def test_every_error_is_exported():
    classes = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, errors.SSDGramError)}
    assert classes <= set(ssdgram.__all__)
    assert all(getattr(ssdgram, name) is getattr(errors, name) for name in classes)


def test_the_type_checker_sees_the_same_names():
    tree = ast.parse(Path(ssdgram.__file__).read_text())
    guarded = [node for node in tree.body if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name: node.module for node in imports for alias in node.names}
    assert seen == ssdgram._HOME_OF


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(ssdgram, "no_such_name")


def fresh(program):
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


def test_import_brings_neither_torch_nor_compiled_code():
    heavy = fresh("import sys, ssdgram; print([m for m in ('torch', 'triton', 'numba', 'tokenizers') if m in sys.modules])")
    assert heavy == "[]"


def test_every_export_is_found_without_torch():
    program = ("import sys, ssdgram\nfor name in ssdgram.__all__: getattr(ssdgram, name)\n"
               "print([m for m in ('torch', 'triton') if m in sys.modules])")
    assert fresh(program) == "[]"


@pytest.mark.parametrize("first", ["import ssdgram.token_map", "import ssdgram; ssdgram.token_map",
                                   "from ssdgram.token_map import token_map"])
def test_token_map_is_callable_whichever_way_its_module_came_in(first, tmp_path):
    """The function and its module have one name; importing the module replaces the attribute of the package."""
    program = (f"{first}\nimport ssdgram\ntry: ssdgram.token_map({str(tmp_path)!r})\n"
               "except ssdgram.TokenMapError: print('called')")
    assert fresh(program) == "called"


def python_files():
    for folder in ("ssdgram", "tests", *FOLDERS):
        yield from (ROOT / folder).rglob("*.py")


def test_the_folders_are_imported_as_parts_of_the_package():
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            tops = {name.partition(".")[0] for name in names}
            assert not tops & set(FOLDERS), f"{path.relative_to(ROOT)} line {node.lineno}: import ssdgram.{min(tops)} instead"


def test_every_folder_of_the_package_is_a_package():
    for folder in [ROOT / "ssdgram", *(ROOT / name for name in FOLDERS)]:
        for path in folder.rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), f"{path.parent} has no __init__.py: the wheel would lack it"


def test_every_module_says_what_it_does():
    for path in python_files():
        assert ast.get_docstring(ast.parse(path.read_bytes())) or path.name == "__init__.py" or not path.read_text().strip(), path
