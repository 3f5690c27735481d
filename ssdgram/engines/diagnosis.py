"""Whether a plug-in would be active in this environment, and if not, why: findings for `ssdgram doctor --engine`.

It looks at what the entry point will look at (settings, version, seams), and at what can go wrong around it: the entry point's
registration, the engine's allow-list, the store, the budgets. It imports no engine and opens no store.
Invariant: the last finding says in one line whether it would be active.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ssdgram import machine
from ssdgram._budget import parse_size
from ssdgram.doctor import MISSING, NOTE, Finding, judge
from ssdgram.engines import seams
from ssdgram.engines.opening import is_socket
from ssdgram.engines.ranks import is_split
from ssdgram.engines.settings import Settings, read_settings
from ssdgram.engines.sglang.seams import SGLANG
from ssdgram.engines.vllm.seams import VLLM
from ssdgram.errors import ConfigError, SSDGramError
from ssdgram.geometry import ENGRAM
from ssdgram.layout.manifest import Manifest

ENGINES = {engine.name: engine for engine in (VLLM, SGLANG)}
GROUPS = {"vllm": "vllm.general_plugins", "sglang": "sglang.srt.plugins"}
ALLOW_LISTS = {"vllm": "VLLM_PLUGINS", "sglang": "SGLANG_PLUGINS"}


def examine_engine(name: str, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """All findings about engine "vllm" or "sglang" in this environment; the last one is the verdict."""
    findings = list(_findings(ENGINES[name], environment))
    reasons = [finding for finding in findings if finding.verdict == MISSING]
    title = ENGINES[name].title
    found = f"would be active in {title}" if not reasons else f"would not be active: {'; '.join(reason.subject for reason in reasons)}"
    return [*findings, judge("plug-in", found, "active", not reasons, "see above, line by line", MISSING)]


def _findings(engine: seams.Engine, environment: Mapping[str, str]) -> Iterator[Finding]:
    found = seams.installed(engine.package)
    fault = seams.fault(engine, found)
    shown = "not installed" if found is None else found[0]
    text = f"{shown}, {len(engine.seams)} seams as published" if fault is None else shown if found is None else f"{shown}: {fault}"
    yield judge(engine.title, text, f"{engine.version}, as published", fault is None, f"pip install {engine.package}=={engine.version}",
                MISSING)
    group = GROUPS[engine.name]
    registered = [entry for entry in metadata.entry_points(group=group) if entry.name == "ssdgram"]
    yield judge("entry point", f"ssdgram in {group}" if registered else f"no ssdgram in {group}", "registered", bool(registered),
                "install the package with pip (a bare folder on PYTHONPATH registers nothing)", MISSING)
    allowed = environment.get(ALLOW_LISTS[engine.name])
    if allowed is not None and (allowed or engine.name == "vllm"):
        names = [part.strip() for part in allowed.split(",")]
        yield judge(ALLOW_LISTS[engine.name], allowed or "empty", "ssdgram in it, or unset", "ssdgram" in names,
                    f"add ssdgram to {ALLOW_LISTS[engine.name]}, or unset it", MISSING)
    try:
        settings = read_settings(environment)
    except ValueError as error:
        yield Finding("settings", str(error), "known variables with values that can be read", MISSING, "correct it, or unset it")
        return
    if settings is None:
        yield Finding("SSDGRAM_STORE", "not set", "the store's folder", MISSING, "export SSDGRAM_STORE=FOLDER (made by `ssdgram convert`)")
        return
    yield from _store(settings, engine.name)
    for package in ("torch", "triton"):
        version = machine.version_of(package)
        yield judge(package, version.rpartition(" ")[2] if version else "not installed", "the engine's own", version is not None,
                    f"pip install {package}", MISSING)


def _store(settings: Settings, engine: str) -> Iterator[Finding]:
    if is_socket(settings.store):
        yield from _split(settings, engine, ENGRAM)
        yield Finding("store", f"{settings.store}: the socket of a server", "a running `ssdgram serve`", NOTE,
                      "each rank attaches to it at the start; its own check of model and store comes then")
        yield from _attached_budgets(settings)
        return
    try:
        manifest = Manifest.load(Path(settings.store))
        geometry = manifest.geometry
        yield judge("store", f"{settings.store}: {geometry.family}, layers {list(geometry.layers)}, rows of {geometry.row_bytes} bytes",
                    "Engram, or PLE in bf16 or fp8", geometry.encoding != "nvfp4",
                    "NVFP4 PLE tables are not served by the plug-ins: unset SSDGRAM_STORE, or convert another checkpoint", MISSING)
    except (SSDGramError, OSError) as error:
        yield Finding("store", f"{settings.store}: {error}", "a store", MISSING, "make one with `ssdgram convert`")
        return
    yield from _split(settings, engine, geometry.family)
    try:
        budgets = parse_size(settings.dram, "SSDGRAM_DRAM"), parse_size(settings.hbm, "SSDGRAM_HBM")
    except SSDGramError as error:
        yield Finding("budgets", str(error), "sizes such as 8GiB", MISSING, "correct them")
        return
    there = machine.memory()[0]
    yield judge("budgets", f"{settings.dram} of DRAM, {settings.hbm} of GPU memory for each rank; this machine has {there >> 30} GiB",
                "below the machine's memory", budgets[0] <= there, "lower SSDGRAM_DRAM", MISSING)
    yield Finding("settings", f"queue {settings.queue}, early {settings.early} tokens, hot set {settings.hotset or 'none'}, metrics "
                              f"{'none' if settings.metrics is None else f'from port {settings.metrics} on'}", "as you mean them", NOTE)


def _attached_budgets(settings: Settings) -> Iterator[Finding]:
    """The budgets of a rank that attaches to a server: DRAM is the server's, GPU memory is refused by `ssdgram.attach`."""
    try:
        hbm = parse_size(settings.hbm, "SSDGRAM_HBM")
    except SSDGramError as error:
        yield Finding("SSDGRAM_HBM", str(error), "0, or unset", MISSING,
                      "unset it: a rank that attaches to a server keeps no rows in GPU memory")
        return
    yield judge("SSDGRAM_HBM", f"{settings.hbm}, with a server's socket" if hbm else "0; DRAM is the server's (`ssdgram serve --dram`)",
                "0, or unset", hbm == 0,
                "unset it: a rank that attaches to a server keeps no rows in GPU memory; or let SSDGRAM_STORE be the store's folder",
                MISSING)


def _split(settings: Settings, engine: str, family: str) -> Iterator[Finding]:
    try:
        if is_split(settings, engine, family):
            yield Finding("SSDGRAM_SPLIT", f"{settings.split}: each rank of a tensor-parallel group reads and keeps its part",
                          "only where ranks share no node", NOTE, "on one node let them share an `ssdgram serve`")
    except ConfigError as error:
        yield Finding("SSDGRAM_SPLIT", str(error), "none, or what the engine can put together", MISSING, "correct it, or unset it")
