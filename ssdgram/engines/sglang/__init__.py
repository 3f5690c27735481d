"""The entry point of the SGLang plug-in (group sglang.srt.plugins).

SGLang calls `activate` in every process of the server, and goes on without a plug-in that raises. So this does nothing unless
SSDGRAM_STORE is set, and then whatever is not as expected is a SystemExit: another version, a seam that changed, a hook that did
not take. The replacements themselves are in plugin.py, registered with SGLang's HookRegistry, and in ple.py.
Invariant: with SSDGRAM_STORE set, a server starts with the store or not at all.
"""

from __future__ import annotations

from types import ModuleType

PLE = "sglang.srt.models.qwen4_exp"

_active: list[str] = []


def activate() -> None:
    """What SGLang calls. SystemExit with one message if SSDGRAM_STORE is set and the plug-in cannot be active."""
    from ssdgram.engines.settings import read_settings

    try:
        settings = read_settings()
    except ValueError as error:
        raise SystemExit(f"SSDGram: {error}") from None
    if settings is None or _active:
        return
    from ssdgram.engines.seams import fault, installed
    from ssdgram.engines.sglang.seams import SGLANG
    from ssdgram.engines.watch import when_imported

    text = fault(SGLANG, installed(SGLANG.package))
    if text is not None:
        raise SystemExit(f"SSDGram: {text}")
    try:
        from ssdgram.engines.sglang import plugin

        plugin.register()
        when_imported(PLE, _patch_ple)
    except Exception as error:
        raise SystemExit(f"SSDGram: the SGLang plug-in cannot be active: {type(error).__name__}: {error}") from error
    _active.append(settings.store)


def _patch_ple(module: ModuleType) -> None:
    """As Qwen4Exp's module is imported; SGLang's registry takes an exception there for a model that is not available."""
    try:
        from ssdgram.engines.sglang import ple

        ple.patch(module)
    except Exception as error:
        raise SystemExit(f"SSDGram: the SGLang plug-in cannot be active: {type(error).__name__}: {error}") from error
