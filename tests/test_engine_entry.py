"""The plug-ins' entry points in processes of their own: silent without SSDGRAM_STORE, loud where an engine is not as expected."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGRAM = "vllm/models/deepseek_v41/common/engram.py"


@pytest.fixture
def package(tmp_path):
    """A made-up distribution of vLLM: package(version, files) puts it on a path."""

    def build(version="0.33.0", **files):
        information = tmp_path / f"vllm-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        for name, text in {ENGRAM: "LOADED = True\n", **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            for parent in path.relative_to(tmp_path).parents:
                if str(parent) != ".":
                    (tmp_path / parent / "__init__.py").touch()
        return tmp_path

    return build


def run(script, path=None, **environment):
    places = [str(ROOT), *([str(path)] if path else []), *[place for place in sys.path if "site-packages" in place]]
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100,
                          env={"PYTHONPATH": ":".join(places), "PATH": "/usr/bin", **environment})


def test_without_a_store_nothing_happens_and_only_the_standard_library_is_loaded():
    found = run("import sys; from ssdgram.engines.vllm import activate; activate(); names = {n.partition('.')[0] for n in sys.modules};"
                "print(sorted(names & {'numpy', 'torch', 'numba', 'vllm', 'click'}), len(sys.meta_path))")
    plain = run("import sys; print([], len(sys.meta_path))")
    assert found.stdout == plain.stdout and found.returncode == 0, found.stderr


def test_another_version_ends_the_start(package):
    found = run("from ssdgram.engines.vllm import activate; activate(); print('went on')", package("0.34.0"), SSDGRAM_STORE="/store")
    assert found.returncode == 1 and "went on" not in found.stdout
    assert "written for vLLM 0.33.0, found 0.34.0" in found.stderr and "Traceback" not in found.stderr


def test_without_vllm_there_is_one_message():
    found = run("from ssdgram.engines.vllm import activate; activate()", SSDGRAM_STORE="/store")
    assert found.returncode == 1 and found.stderr.strip() == "SSDGram: vLLM is not installed"


def test_changed_files_end_the_import_of_the_model_and_not_before(package):
    script = ("from ssdgram.engines.vllm import activate; activate(); activate(); print('started')\n"
              "try:\n    import vllm.models.deepseek_v41.common.engram\nexcept Exception: print('swallowed')")
    found = run(script, package(), SSDGRAM_STORE="/store")
    assert found.stdout == "started\n" and found.returncode == 1
    assert "SSDGram: vLLM 0.33.0 is not as published" in found.stderr and "Engram is gone" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_module_that_is_loaded_already_is_checked_at_once(package):
    found = run("import vllm.models.deepseek_v41.common.engram\nfrom ssdgram.engines.vllm import activate\nactivate()\nprint('went on')",
                package(), SSDGRAM_STORE="/store")
    assert found.returncode == 1 and "is not as published" in found.stderr and not found.stdout


def test_what_is_not_served_is_refused_when_its_model_is_imported(package):
    found = run("from ssdgram.engines.vllm import activate; activate()\nimport vllm.models.qwen4_exp.amd.model",
                package(**{"vllm/models/qwen4_exp/amd/model.py": ""}), SSDGRAM_STORE="/store")
    assert found.returncode == 1 and "Qwen4Exp on ROCm is not served" in found.stderr


@pytest.mark.parametrize("module", ["ngram_embedding", "model_state"])
def test_changed_ple_files_end_the_import_of_their_model(package, module):
    found = run(f"from ssdgram.engines.vllm import activate; activate()\nimport vllm.models.qwen4_exp.nvidia.{module}",
                package(**{f"vllm/models/qwen4_exp/nvidia/{module}.py": ""}), SSDGRAM_STORE="/store")
    assert found.returncode == 1 and "SSDGram: vLLM 0.33.0 is not as published" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize(("name", "value", "message"), [
    ("SSDGRAM_DRAMM", "1GiB", "SSDGRAM_DRAMM: no such setting; the plug-in knows SSDGRAM_STORE, SSDGRAM_DRAM"),
    ("SSDGRAM_EARLY", "many", "SSDGRAM_EARLY='many': expected a number"),
    ("SSDGRAM_SPLIT", "rows", "SSDGRAM_SPLIT='rows': expected one of none, columns, owner"),
    ("SSDGRAM_TIMEOUT", "-1", "SSDGRAM_TIMEOUT='-1': expected a number"),
])
def test_settings_that_are_wrong_are_named(name, value, message):
    found = run("from ssdgram.engines.vllm import activate; activate()", SSDGRAM_STORE="/store", **{name: value})
    assert found.returncode == 1 and message in found.stderr


def test_a_watched_module_runs_its_actions_once_and_keeps_its_own_loader(tmp_path, monkeypatch):
    from ssdgram.engines.watch import forget, when_imported

    (tmp_path / "watched_module.py").write_text("VALUE = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    when_imported("watched_module", lambda module: seen.append(module.VALUE))
    when_imported("watched_module", lambda module: seen.append(module.__loader__.__class__.__name__))
    import watched_module

    assert seen == [1, "SourceFileLoader"] and watched_module.__spec__.loader is watched_module.__loader__
    when_imported("watched_module", lambda module: seen.append("again"))
    assert seen[-1] == "again"
    forget(["watched_module"])
    del sys.modules["watched_module"]
    import watched_module

    assert len(seen) == 3
