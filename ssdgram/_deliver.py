"""Delivery: the wanted rows of a page that was read are checked and put into their bundles' slots.

    page   | row 0 | row 1 | ... | row n-1 | n CRCs | trailer |          row = codes, then scales
    slot   | codes head 0 | codes head 1 | ... | scales head 0 | scales head 1 | ... |

Runs on a reader's thread. A row is copied only after its checksum, which binds it to store, layer, column and row number,
was found right; so a slot never holds a byte of a wrong row. It knows nothing of batches or of the cache.
"""

from __future__ import annotations

import numpy as np

from ssdgram._compiled import address_of, compiled_inner, copy_bytes, load_u32
from ssdgram._state import (P_CODE_BYTES, P_GENERATION, P_ROWS_PER_PAGE, P_SCALE_BYTES, P_SLOT_STRIDE, READ_CHECK, READ_OK)
from ssdgram.layout.page import TRAILER, row_crc


@compiled_inner
def deliver(state, index, page):  # type: ignore[no-untyped-def]
    """Check and place the targets of page record `index`, whose 4096 bytes are at address `page`. READ_OK or READ_CHECK.

    The good rows of a page are placed even if another is bad; bad ones are marked in their targets.
    """
    params, targets = state.params, state.targets
    code_bytes, scale_bytes = params[P_CODE_BYTES], params[P_SCALE_BYTES]
    row_bytes = code_bytes + scale_bytes
    rows_per_page = params[P_ROWS_PER_PAGE]
    file = state.files[state.pages[index].file]
    first = state.pages[index].number * rows_per_page
    checks = page + TRAILER - 4 * rows_per_page
    slab = address_of(state.slab, 0)
    scales = file.heads * code_bytes
    status = READ_OK
    target = state.pages[index].target
    while target >= 0:
        place = np.int64(targets[target].place)
        row = page + place * row_bytes
        found = row_crc(row, row_bytes, params[P_GENERATION], file.layer, file.column, first + place)
        if found == load_u32(checks + 4 * place):
            bundle = slab + targets[target].slot * params[P_SLOT_STRIDE]
            copy_bytes(bundle + file.position * code_bytes, row, code_bytes)
            if scale_bytes > 0:
                copy_bytes(bundle + scales + file.position * scale_bytes, row + code_bytes, scale_bytes)
            targets[target].bad = 0
        else:
            targets[target].bad = 1
            status = READ_CHECK
        target = targets[target].next
    return status
