"""How warm must an SSD store be to match DRAM? Placements side by side, by warmness and batch, and the decode step around them.

    text.py         a trace and the steps that are cut from it; repeated filler is refused
    meter.py        what a lookup costs besides time: processor, faults, switches, reads, page cache
    placements.py   where the table may be (CPU side); device.py: the same with a GPU at the end
    states.py       SSDGram stores that are cold, mixed, steady or warm
    cells.py        the matrix: interleaved lookups, percentiles, refusals
    steps.py        the step model: a decode loop with stand-in compute (stand_in.py) around the lookups
    report.py, plots.py, html.py     what comes out; compare.py: whether it repeats

Everything is one command, `ssdgram bench warmness` (__main__.py).
"""
