"""The entry point of the vLLM plug-in (group vllm.general_plugins).

vLLM calls `activate` in the front end, the engine core, every worker and the model inspector. It does nothing unless
SSDGRAM_STORE is set, and imports nothing but the standard library until a table is really to be served. With a store, another
version of vLLM ends the process; and when the module that holds the Engram classes is imported, every seam is checked against the
files as they are, and only then the classes are changed (plugin.py).
Invariant: with SSDGRAM_STORE set, a server starts with the store or not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType

ENGRAM = "vllm.models.deepseek_v41.common.engram"
MODEL_STATE = "vllm.models.deepseek_v41.nvidia.model_state"
PREFETCH = "vllm.models.deepseek_v41.nvidia.specialized_decode.engram.prefetch"
PLE = "vllm.models.qwen4_exp.nvidia.ngram_embedding"
PLE_STATE = "vllm.models.qwen4_exp.nvidia.model_state"
CHANGES = ((ENGRAM, "plugin", "patch_engram"), (MODEL_STATE, "plugin", "patch_state"), (PREFETCH, "plugin", "patch_prefetch"),
           (PLE, "ple", "patch_ngram"), (PLE_STATE, "ple", "patch_state"))
ROCM = {"vllm.models.deepseek_v41.amd.model": "DeepSeek-V4.1 on ROCm", "vllm.models.qwen4_exp.amd.model": "Qwen4Exp on ROCm"}

_active: list[str] = []


def activate() -> None:
    """What vLLM calls. SystemExit with one message if SSDGRAM_STORE is set and the plug-in cannot be active."""
    from ssdgram.engines.settings import read_settings

    try:
        settings = read_settings()
    except ValueError as error:
        raise SystemExit(f"SSDGram: {error}") from None
    if settings is None or _active:
        return
    from ssdgram.engines.seams import installed
    from ssdgram.engines.vllm.seams import VLLM
    from ssdgram.engines.watch import when_imported

    found = installed(VLLM.package)
    if found is None or found[0].partition("+")[0] != VLLM.version:
        from ssdgram.engines.seams import fault

        raise SystemExit(f"SSDGram: {fault(VLLM, found)}")
    _active.append(settings.store)
    for module, plugin, function in CHANGES:
        when_imported(module, _change(plugin, function))
    for module, model in ROCM.items():
        when_imported(module, _refusal(model))


def _checked() -> None:
    from ssdgram.engines.seams import fault, installed
    from ssdgram.engines.vllm.seams import VLLM

    text = fault(VLLM, installed(VLLM.package))
    if text is not None:
        raise SystemExit(f"SSDGram: {text}")


def _change(plugin: str, function: str) -> Callable[[ModuleType], None]:
    """What is done to a module of vLLM once it is imported: every seam is checked, then ssdgram.engines.vllm.PLUGIN's FUNCTION runs."""

    def change(module: ModuleType) -> None:
        _checked()
        getattr(import_module(f"ssdgram.engines.vllm.{plugin}"), function)(module)

    return change


def _refusal(model: str):  # type: ignore[no-untyped-def]
    def refuse(module: ModuleType) -> None:
        raise SystemExit(f"SSDGram: {model} is not served by this plug-in: unset SSDGRAM_STORE to serve it with vLLM's own tables")

    return refuse
