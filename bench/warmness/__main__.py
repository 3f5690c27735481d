"""How warm must an SSD store be to match DRAM? Placements side by side by warmness and batch, and a decode loop around them.

    ssdgram bench warmness STORE --checkpoint CKPT --out REPORT      a store that is there
    ssdgram bench warmness --quick --folder DIR --out REPORT         a small table made for the run, three minutes on two cores
    ssdgram bench warmness --report B.json --against A.json --out REPORT      two runs: what differs by 10 % or more is marked

Without STORE a table of made-up rows in the real layout is made in --folder, on the drive that is to be measured, and deleted
afterwards. Placements: hbm, dram-uva (a GPU reads pinned rows), dram-copy, ssd-mmap, ssd-pread, ssdgram, ssdgram-hbm (warm, with its
hot set in GPU memory too). States: cold (nothing resident), mixed (half of each step is resident), steady (after one half of the
text, measured on the other), warm (everything resident). A lookup is from token ids in host memory to the rows of all layers, on the
GPU if there is one. --out gets report.html (self-contained), report.json, cells.csv, steps.csv and the plots as PNG.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ssdgram.errors import SSDGramError


@click.command(help=__doc__)
@click.argument("store", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="The folder that STORE was converted from: ssd-mmap maps it.")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default=Path("bench-warmness"), show_default=True,
              help="For the made table and for hot sets: on the drive that is measured.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("warmness-report"), show_default=True)
@click.option("--quick", is_flag=True, help="Small sizes: under three minutes on two cores.")
@click.option("--device", default="auto", show_default=True, help="cpu, cuda, or auto: a GPU if there is one.")
@click.option("--rows", type=click.IntRange(1000), help="Rows a column of a table that is made; 26 kB of drive each.")
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="A token trace (ssdgram trace build); default: code and prose of this machine.")
@click.option("--tokens", type=click.IntRange(4096), help="Tokens of the trace to use.")
@click.option("--dram", help="SSDGram's memory budget; default: 1/8 of the table.")
@click.option("--hbm", help="GPU memory of ssdgram-hbm, 0: without that placement; default: 1/32 of the table.")
@click.option("--queue", default="auto", show_default=True, type=click.Choice(["auto", "uring", "threads", "gds"]))
@click.option("--placement", "placements", multiple=True, help="Only these; may be given many times.")
@click.option("--warmness", multiple=True, type=click.Choice(["cold", "mixed", "steady", "warm"]), help="Only these.")
@click.option("--decode", help="Decode streams, such as 1,64,256.")
@click.option("--prefill", help="Tokens of prefill chunks, such as 512,2048,8192.")
@click.option("--step/--no-step", default=True, help="The step model: tokens/s around the lookups.", show_default=True)
@click.option("--layer-us", help="Your own step times: microseconds of a decode layer by streams, such as 64=250,256=400.")
@click.option("--limit-s", type=float, help="Cells that would begin later than this are not run.")
@click.option("--force-filler", is_flag=True, help="Take a trace that repeats itself; the report says so.")
@click.option("--against", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="The report.json of an earlier run of the same command: cells whose medians moved by 10 % or more are marked.")
@click.option("--report", "reported", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Measure nothing: write the report of this report.json anew.")
@click.option("--keep", is_flag=True, help="Leave the made table for the next run.")
def main(store: Path | None, checkpoint: Path | None, folder: Path, out: Path, quick: bool, device: str, rows: int | None,
         trace: Path | None, tokens: int | None, dram: str | None, hbm: str | None, queue: str, placements: tuple[str, ...],
         warmness: tuple[str, ...], decode: str | None, prefill: str | None, step: bool, layer_us: str | None,
         limit_s: float | None, force_filler: bool, against: Path | None, reported: Path | None, keep: bool) -> None:
    """Parse, run, report."""
    from ssdgram._budget import parse_size
    from ssdgram.bench.warmness import compare
    from ssdgram.bench.warmness.bars import bars
    from ssdgram.bench.warmness.run import NAMES, Options, run
    from ssdgram.bench.warmness.sizes import PRESETS, WARMNESS

    earlier = compare.load(against) if against else None     # before anything is measured
    if reported:
        result = compare.load(reported)
        _write(result | {"bars": bars(result)}, earlier, out)
        return
    unknown = set(placements) - set(NAMES)
    if unknown:
        raise click.BadParameter(f"{', '.join(sorted(unknown))}: there are {', '.join(NAMES)}", param_hint="--placement")
    if device == "auto":
        device = "cuda" if _has_gpu() else "cpu"
    preset = PRESETS["quick" if quick else "cpu" if device == "cpu" else "gpu"]
    sizes = preset.changed(rows=rows, trace_tokens=tokens, decode=_numbers(decode, "--decode"), prefill=_numbers(prefill, "--prefill"),
                           limit_s=limit_s)
    result = run(Options(folder=folder, sizes=sizes, store=store, checkpoint=checkpoint, trace=trace, device=device, queue=queue,
                         dram=parse_size(dram, "--dram") if dram else None, hbm=parse_size(hbm, "--hbm") if hbm else None,
                         placements=placements or NAMES, warmness=warmness or WARMNESS, force_filler=force_filler, keep=keep,
                         step=step, layer_us=_times(layer_us)),
                 say=lambda text: click.echo(f"  {text}"))
    _write(result, earlier, out)


def _write(result: dict[str, Any], earlier: dict[str, Any] | None, out: Path) -> None:
    """Show and write a result, compared with an earlier one if there is one."""
    from ssdgram.bench.warmness import compare, report

    if earlier is not None:
        try:
            compare.mark(result, earlier)
        except SSDGramError as error:                        # what was measured is not thrown away
            click.echo(f"not compared: {error}", err=True)
    report.show(result)
    for path in report.write(result, out):
        click.echo(f"written: {path}")


def _numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        numbers = tuple(int(word) for word in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1 or max(numbers) > 1 << 16:
        raise click.BadParameter(f"{text!r}: expected numbers from 1 to 65536 with commas between them", param_hint=option)
    return numbers


def _times(text: str | None) -> dict[int, float]:
    """"64=250,256=400" as numbers."""
    try:
        times = {int(batch): float(us) for batch, us in (entry.split("=") for entry in text.split(","))} if text else {}
    except ValueError:
        times = {0: 0.0}
    if any(batch < 1 or not 0 < us < 1e7 for batch, us in times.items()):
        raise click.BadParameter(f"{text!r}: expected STREAMS=MICROSECONDS with commas between them", param_hint="--layer-us")
    return times


def _has_gpu() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return bool(torch.cuda.is_available())


if __name__ == "__main__":
    from ssdgram.cli import run_module

    run_module(main)
