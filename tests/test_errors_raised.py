"""Every error class is raised by the package and by some test: an error nobody has seen is a promise nobody keeps."""

import ast
import functools
import inspect
from pathlib import Path

import pytest

from ssdgram import errors

ROOT = Path(__file__).resolve().parent.parent
CLASSES = {name: value for name, value in vars(errors).items()
           if inspect.isclass(value) and issubclass(value, errors.SSDGramError)}
LEAVES = sorted(name for name, value in CLASSES.items() if not value.__subclasses__())


def names_in(node):
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} | \
        {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


@functools.cache
def expected_by_tests():
    """Names within pytest.raises(...), or within a parametrize(...) of a test that has a pytest.raises."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.name == Path(__file__).name:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("raises", "parametrize"):
                found |= names_in(node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List | ast.Tuple | ast.Dict):
                found |= names_in(node.value)                # a table of cases that a parametrize names
    return found


@functools.cache
def raised_by_package():
    found = set()
    for folder in ("ssdgram", "layout", "cache", "kernels", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name == "errors.py":
                continue
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.Call | ast.Return | ast.Raise):
                    found |= names_in(node)
    return found


@pytest.mark.parametrize("name", LEAVES)
def test_every_error_is_raised_by_some_test(name):
    assert name in expected_by_tests(), f"no test expects {name}"


@pytest.mark.parametrize("name", LEAVES)
def test_every_error_is_raised_by_the_package(name):
    assert name in raised_by_package(), f"nothing raises {name}: take it out of errors.py, or raise it"


def test_the_tree_in_the_text_is_the_tree_of_classes():
    lines = [line for line in errors.__doc__.splitlines() if "── " in line or line.strip() == "SSDGramError"]
    drawn = {}
    stack = []
    for line in lines:
        text = line.lstrip(" │├└─")
        depth = len(line) - len(text)
        name = text.split()[0]
        while stack and stack[-1][0] >= depth:
            stack.pop()
        drawn[name] = stack[-1][1] if stack else "Exception"
        stack.append((depth, name))
    assert drawn == {name: value.__mro__[1].__name__ for name, value in CLASSES.items()}
