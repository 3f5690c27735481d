"""SSDGram: n-gram memory tables of language models, served from NVMe.

The public names, and nothing else. Each is imported when it is first used, so `import ssdgram` costs milliseconds and
brings neither torch nor compiled code. What is not in `__all__` may change without notice.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ssdgram.batch import Batch
    from ssdgram.errors import (
        BatchReleasedError,
        BatchTooLargeError,
        BudgetError,
        CheckpointError,
        ConfigError,
        ConversionError,
        ForkedStoreError,
        FormatError,
        HotSetError,
        IdentityError,
        ManifestError,
        NoSpaceError,
        ReadError,
        ReadTimeoutError,
        RowCheckError,
        ServerDiedError,
        SSDGramError,
        StoreBusyError,
        StoreClosedError,
        StoreError,
        StoreReplacedError,
        TokenError,
        TokenMapError,
        UnavailableError,
    )
    from ssdgram.geometry import Geometry
    from ssdgram.history import History
    from ssdgram.layout.convert import convert
    from ssdgram.layout.manifest import Manifest
    from ssdgram.layout.verify import Report, verify
    from ssdgram.sequence import Sequence
    from ssdgram.serve.client import attach
    from ssdgram.store import Store, open
    from ssdgram.token_map import token_map
    from ssdgram.tools.synth import synthesize

__version__ = "0.1.0"

_HOMES = {
    "ssdgram.batch": ("Batch",),
    "ssdgram.errors": (
        "BatchReleasedError", "BatchTooLargeError", "BudgetError", "CheckpointError", "ConfigError", "ConversionError",
        "ForkedStoreError", "FormatError", "HotSetError", "IdentityError", "ManifestError", "NoSpaceError", "ReadError",
        "ReadTimeoutError", "RowCheckError", "SSDGramError", "ServerDiedError", "StoreBusyError", "StoreClosedError",
        "StoreError", "StoreReplacedError", "TokenError", "TokenMapError", "UnavailableError",
    ),
    "ssdgram.geometry": ("Geometry",),
    "ssdgram.history": ("History",),
    "ssdgram.layout.convert": ("convert",),
    "ssdgram.layout.manifest": ("Manifest",),
    "ssdgram.layout.verify": ("Report", "verify"),
    "ssdgram.sequence": ("Sequence",),
    "ssdgram.serve.client": ("attach",),
    "ssdgram.store": ("Store", "open"),
    "ssdgram.token_map": ("token_map",),
    "ssdgram.tools.synth": ("synthesize",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ssdgram' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))


__all__ = [
    "Batch",
    "BatchReleasedError",
    "BatchTooLargeError",
    "BudgetError",
    "CheckpointError",
    "ConfigError",
    "ConversionError",
    "ForkedStoreError",
    "FormatError",
    "Geometry",
    "History",
    "HotSetError",
    "IdentityError",
    "Manifest",
    "ManifestError",
    "NoSpaceError",
    "ReadError",
    "ReadTimeoutError",
    "Report",
    "RowCheckError",
    "SSDGramError",
    "Sequence",
    "ServerDiedError",
    "Store",
    "StoreBusyError",
    "StoreClosedError",
    "StoreError",
    "StoreReplacedError",
    "TokenError",
    "TokenMapError",
    "UnavailableError",
    "__version__",
    "attach",
    "convert",
    "open",
    "synthesize",
    "token_map",
    "verify",
]
