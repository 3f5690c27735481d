"""The published files of vLLM and SGLang against the plug-ins' tables. `make test-engines` fetches the wheels; skipped without them."""

import os
import shutil
from pathlib import Path

import pytest

from ssdgram.engines.seams import differences
from ssdgram.engines.sglang.seams import SGLANG
from ssdgram.engines.vllm.seams import VLLM

FOLDER = Path(os.environ.get("SSDGRAM_TEST_ENGINES", Path(__file__).parents[1] / ".peer/engines"))
pytestmark = [pytest.mark.engines, pytest.mark.skipif(not FOLDER.is_dir(), reason="the wheels are not there: make test-engines")]
ENGINES = pytest.mark.parametrize("engine", [VLLM, SGLANG], ids=lambda engine: engine.name)


def package_of(engine):
    return FOLDER / engine.package / engine.package


@ENGINES
def test_every_seam_holds_in_the_published_files(engine):
    assert differences(engine, package_of(engine)) == []


@ENGINES
def test_every_seam_notices_when_its_name_changes(engine, tmp_path):
    """Each seam on a copy of its file in which the last part of its name is spelled otherwise."""
    import re

    for number, seam in enumerate(engine.seams):
        copy = tmp_path / str(number) / seam.file
        copy.parent.mkdir(parents=True)
        name = seam.name.rpartition(".")[2]
        copy.write_text(re.sub(rf"\b{name}\b", f"{name}_changed", (package_of(engine) / seam.file).read_text()))
        changed = type(engine)(engine.name, engine.package, engine.version, (seam,))
        assert differences(changed, tmp_path / str(number)), seam


@ENGINES
def test_every_signature_notices_a_parameter_more(engine, tmp_path):
    for number, seam in enumerate(seam for seam in engine.seams if seam.signature):
        copy = tmp_path / str(number) / seam.file
        copy.parent.mkdir(parents=True)
        shutil.copy(package_of(engine) / seam.file, copy)
        import ast

        tree = ast.parse(copy.read_text())
        from ssdgram.engines.seams import _find

        node = _find(tree, seam.name)
        node = _find(node, "__init__") if isinstance(node, ast.ClassDef) else node
        node.args.kwonlyargs.append(ast.arg("one_more"))
        node.args.kw_defaults.append(ast.Constant(None))
        copy.write_text(ast.unparse(tree))
        changed = type(engine)(engine.name, engine.package, engine.version, (seam,))
        assert any("one_more" in text for text in differences(changed, tmp_path / str(number))), seam


@ENGINES
def test_every_use_notices_when_it_goes(engine, tmp_path):
    """A word that a body must mention, taken out of the file."""
    import re

    for seam in engine.seams:
        text = (package_of(engine) / seam.file).read_text()
        for use in seam.uses:
            if use.startswith(("<<", "'")) or use.endswith("="):
                continue
            copy = tmp_path / "one" / seam.file
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(re.sub(rf"(?<![\w.]){re.escape(use)}\b", "1" if use.isdigit() else "changed", text))
            changed = type(engine)(engine.name, engine.package, engine.version, (seam,))
            assert differences(changed, tmp_path / "one"), (seam, use)
