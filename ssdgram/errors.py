"""Every error that SSDGram raises, as one tree.

    SSDGramError
    ├── ConfigError (ValueError)              a model config that is no n-gram model, or contradicts itself
    ├── TokenMapError (ValueError)            a tokenizer that does not give the compressed size of the config
    ├── TokenError (ValueError)               a token id that is negative or beyond the vocabulary
    ├── CheckpointError (ValueError)          safetensors header, index or tensor that is not as it must be
    ├── ConversionError (ValueError)          OUT belongs to another source, or a conversion that cannot go on
    │   └── NoSpaceError (OSError)            not enough room for the result
    ├── FormatError (ValueError)              manifest, page file or hot set that is not of this format
    │   ├── ManifestError                     manifest.json is missing, malformed, or of another version
    │   ├── IdentityError                     a file that belongs to another store, table, column or place
    │   └── HotSetError                       a hot-set file that cannot be used
    ├── BudgetError (ValueError)              a DRAM or HBM budget that cannot hold what it must
    ├── UnavailableError (OSError)            this machine or installation lacks what was asked for (queue, device, package)
    ├── StoreError
    │   ├── StoreClosedError                  the store was closed
    │   ├── ForkedStoreError                  the store belongs to the parent process
    │   ├── StoreReplacedError                the files under the open store were replaced
    │   ├── ServerDiedError (ConnectionError) the server that the store was attached to is gone
    │   ├── BatchReleasedError                the batch was released
    │   ├── BatchTooLargeError (ValueError)   more distinct bundles than the store has slots
    │   └── StoreBusyError (TimeoutError)     no slots within the time-out: other batches hold them
    └── ReadError (OSError)                   rows that could not be read
        ├── RowCheckError                     rows that were read and are not the right bytes
        └── ReadTimeoutError (TimeoutError)   rows that did not arrive in time

Messages say what was found, what was expected, and what to do. This module imports nothing of the package.
"""

from __future__ import annotations

from collections.abc import Sequence


class SSDGramError(Exception):
    """Base class of all errors of this package."""


class ConfigError(SSDGramError, ValueError):
    """A model configuration without n-gram layers, or one whose fields contradict each other."""


class TokenMapError(SSDGramError, ValueError):
    """A tokenizer whose compressed vocabulary is not the one that the model was trained with."""


class TokenError(SSDGramError, ValueError):
    """A token id that is negative (a placeholder) or beyond the vocabulary, at a position that takes part."""


class CheckpointError(SSDGramError, ValueError):
    """A checkpoint file that is malformed, or lacks a tensor, or has one of another dtype or shape."""


class ConversionError(SSDGramError, ValueError):
    """A conversion that cannot start or go on, for example into a folder of another source."""


class NoSpaceError(ConversionError, OSError):
    """The file systems of the result have less room than it takes."""


class FormatError(SSDGramError, ValueError):
    """A file of a store that is not of this format."""


class ManifestError(FormatError):
    """manifest.json is missing, malformed, of an unknown version, or names something outside its roots."""


class IdentityError(FormatError):
    """A file that belongs to another store, layer, column or place."""


class HotSetError(FormatError):
    """A hot-set file that is malformed or belongs to another store."""


class BudgetError(SSDGramError, ValueError):
    """A memory budget that cannot hold what the store needs at the least."""


class UnavailableError(SSDGramError, OSError):
    """This machine or installation lacks what was asked for by name."""


class StoreError(SSDGramError):
    """A call that the store or batch cannot serve in its present state."""


class StoreClosedError(StoreError):
    """The store was closed."""


class ForkedStoreError(StoreError):
    """The store belongs to the parent of this process; open one in the child."""


class StoreReplacedError(StoreError):
    """The manifest under the open store was replaced by that of another conversion."""


class ServerDiedError(StoreError, ConnectionError):
    """The server that the store was attached to ended, was stopped, or put this client out. Attach again once it runs."""


class BatchReleasedError(StoreError):
    """The batch was released; its slots may hold other bundles by now."""


class BatchTooLargeError(StoreError, ValueError):
    """A batch with more distinct bundles than the store has slots.

    `need`: distinct bundles of the batch (a lower bound if counting stopped there); `have`: slots of the store.
    """

    def __init__(self, need: int, have: int) -> None:
        super().__init__(need, have)
        self.need, self.have = need, have

    def __str__(self) -> str:
        return (f"the batch needs {self.need} distinct bundles at once, the store has {self.have} slots: "
                f"split the batch, or open the store with a larger dram= budget (hbm= with queue='gds')")


class StoreBusyError(StoreError, TimeoutError):
    """No slots within the time-out, because unreleased batches hold them. `tickets`: those batches, oldest first."""

    def __init__(self, message: str, tickets: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tickets = tuple(tickets)


class ReadError(SSDGramError, OSError):
    """Rows that could not be read. `layer`, `file`, `page`, `rows` (in the column) and `positions` (in the batch) say which."""

    def __init__(self, message: str, *, layer: int | None = None, file: str | None = None, page: int | None = None,
                 rows: Sequence[int] = (), positions: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.layer, self.file, self.page = layer, file, page
        self.rows, self.positions = tuple(rows), tuple(positions)


class RowCheckError(ReadError):
    """Rows that were read, several times and by two paths, and whose checksum is not that of the right bytes."""


class ReadTimeoutError(ReadError, TimeoutError):
    """Rows that did not arrive in time. `outstanding`: page reads that the layer still waits for; `age_s`: how long."""

    def __init__(self, message: str, *, layer: int | None = None, outstanding: int = 0, age_s: float = 0.0) -> None:
        super().__init__(message, layer=layer)
        self.outstanding, self.age_s = outstanding, age_s
