"""Tools around a store: made-up checkpoints, real text of this machine, traces of tokens and bundles."""
