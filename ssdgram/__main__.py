"""`python -m ssdgram`: the command line (see ssdgram.cli)."""

from ssdgram.cli import main

main(prog_name="python -m ssdgram")
