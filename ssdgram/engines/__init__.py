"""Plug-ins for serving engines: their n-gram tables come from a store. Start with docs/vllm.md or docs/sglang.md.

    settings.py   the SSDGRAM_* variables          seams.py    what of an engine's files is relied on, and the check of it
    watch.py      acting when a module is imported  windows.py  the hash windows of a step, packed on the GPU for the planner
    stager.py     the step under way: rows into the engine's buffers    early.py    prompts' bundles before they are scheduled
    opening.py    a store opened for a rank, checked against the model     ranks.py    tables divided among ranks that share no memory
    slim.py       a checkpoint without its tables
    vllm/, sglang/                                  the two engines: a table of seams, an entry point, the replacements

Invariant: a plug-in is active as a whole or not at all. Unless SSDGRAM_STORE is set nothing is touched; if it is set, whatever
is not as expected stops the start with one message.
"""
