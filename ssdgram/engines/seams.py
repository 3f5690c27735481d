"""What a plug-in relies on in an engine's files, as a table, and the check of it against the files as they are installed.

A `Seam` names a file, a function, class or method in it, its exact signature, and what its body must do. The check parses the
files and imports nothing, so the same code runs in the entry point (before anything is replaced), in `ssdgram doctor` and in
the contract tests against the published wheels. Standard library only.
Invariant: a plug-in replaces something only if every seam of its table holds and the version is the one it was written for.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Seam:
    """`file` below the package's folder; `name`: "function", "Class" or "Class.method"; `signature` as `ast.unparse` writes it, with
    annotations left out (None: not looked at); `uses`: dotted names or string constants that its body must mention, in order
    if `ordered`; `decorators`: by name; `why`: what is relied on."""

    file: str
    name: str
    signature: str | None = None
    uses: tuple[str, ...] = ()
    decorators: tuple[str, ...] = ()
    ordered: bool = False
    why: str = ""


@dataclass(frozen=True)
class Engine:
    """A serving engine as the plug-in was written for it."""

    name: str
    package: str                                             # distribution and import package
    version: str
    seams: tuple[Seam, ...]

    @property
    def title(self) -> str:
        return {"vllm": "vLLM", "sglang": "SGLang"}[self.name]


def installed(package: str) -> tuple[str, Path] | None:
    """(version, folder of the import package) of an installed distribution, None without one. Imports nothing."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return None
    return distribution.version, Path(str(distribution.locate_file(package)))


def differences(engine: Engine, folder: Path) -> list[str]:
    """What in `folder` (the engine's import package) is not as the seams say; empty: all is."""
    return [text for seam in engine.seams for text in _check(seam, folder)]


def fault(engine: Engine, found: tuple[str, Path] | None) -> str | None:
    """Why the plug-in cannot be active in what is installed, as one message; None: it can."""
    if found is None:
        return f"{engine.title} is not installed"
    version, folder = found
    base = version.partition("+")[0]
    if base != engine.version:
        return (f"this SSDGram plug-in was written for {engine.title} {engine.version}, found {version}: install {engine.package}=="
                f"{engine.version}, or unset SSDGRAM_STORE to serve with {engine.title}'s own tables")
    changed = differences(engine, folder)
    if changed:
        return (f"{engine.title} {version} is not as published, or was patched; SSDGram replaces nothing in it: {'; '.join(changed)}. "
                f"Unset SSDGRAM_STORE to serve with {engine.title}'s own tables")
    return None


def _check(seam: Seam, folder: Path) -> Iterable[str]:
    place = f"{seam.file}: {seam.name}"
    try:
        tree = _parsed(folder / seam.file)
    except OSError:
        yield f"{seam.file} is not there"
        return
    except SyntaxError as error:
        yield f"{seam.file} cannot be parsed ({error.msg})"
        return
    node = _find(tree, seam.name)
    if node is None:
        yield f"{place} is gone"
        return
    if seam.signature is not None:
        signature = signature_of(node)
        if signature != seam.signature:
            yield f"{place} is {signature}, expected {seam.signature}"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        decorators = [_last_name(decorator) for decorator in node.decorator_list]
        for decorator in seam.decorators:
            if decorator not in decorators:
                yield f"{place} has no decorator {decorator} (found {decorators})"
    words = mentioned(node)
    missing = [use for use in seam.uses if use not in words]
    if missing:
        yield f"{place} does not mention {', '.join(missing)} any more"
    elif seam.ordered and sorted(seam.uses, key=words.index) != list(seam.uses):
        yield f"{place} does {', '.join(sorted(seam.uses, key=words.index))}: expected the order {', '.join(seam.uses)}"


@cache
def _parsed_once(path: Path, size: int, time_ns: int) -> ast.Module:
    return ast.parse(path.read_bytes())


def _parsed(path: Path) -> ast.Module:
    status = path.stat()
    return _parsed_once(path, status.st_size, status.st_mtime_ns)


def _find(tree: ast.Module, name: str) -> ast.AST | None:
    """The definition or assignment of a dotted name, the last one; None without."""
    scope: ast.AST = tree
    for part in name.split("."):
        found: ast.AST | None = None
        for node in _statements(scope):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == part:
                found = node
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == part:
                found = node
            elif isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == part for target in node.targets):
                found = node
            elif isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == part for alias in node.names):
                found = node
        if found is None:
            return None
        scope = found
    return scope


def _statements(scope: ast.AST) -> Iterable[ast.AST]:
    """The statements of a scope, those below `if` and `try` included."""
    for node in getattr(scope, "body", []):
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node)
            yield from _statements(ast.Module(body=list(node.orelse), type_ignores=[]))


def signature_of(node: ast.AST) -> str:
    """A function's parameters without annotations, "(a, b=1, *, c)"; of a class: those of its __init__; "" of anything else."""
    if isinstance(node, ast.ClassDef):
        own = _find(ast.Module(body=node.body, type_ignores=[]), "__init__")
        return "" if own is None else signature_of(own)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    arguments = ast.parse(f"def f({ast.unparse(node.args)}): pass").body[0].args  # type: ignore[attr-defined]
    for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
        if argument is not None:
            argument.annotation = None
    return f"({ast.unparse(arguments)})"


def mentioned(node: ast.AST) -> list[str]:
    """Dotted names and string constants of a definition, in the order of the text; `self.x.y` counts as that and as `self.x`."""
    found = []

    class Visitor(ast.NodeVisitor):
        def visit_Attribute(self, attribute: ast.Attribute) -> None:
            self.generic_visit(attribute)
            found.append((attribute.end_lineno or 0, attribute.end_col_offset or 0, ast.unparse(attribute)))

        def visit_Name(self, name: ast.Name) -> None:
            found.append((name.lineno, name.col_offset, name.id))

        def visit_Constant(self, constant: ast.Constant) -> None:
            if isinstance(constant.value, str | int):
                found.append((constant.lineno, constant.col_offset, repr(constant.value)))

        def visit_BinOp(self, operation: ast.BinOp) -> None:
            self.generic_visit(operation)
            if isinstance(operation.op, ast.LShift):
                found.append((operation.lineno, operation.col_offset, f"<< {ast.unparse(operation.right)}"))

        def visit_keyword(self, keyword: ast.keyword) -> None:
            self.generic_visit(keyword)
            if keyword.arg is not None:
                found.append((keyword.lineno, keyword.col_offset, f"{keyword.arg}="))

    Visitor().visit(node)
    return [text for *_, text in sorted(found)]


def _last_name(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ast.unparse(node)
