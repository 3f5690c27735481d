"""One store for several processes of a node: `ssdgram serve` owns it, `ssdgram.attach` uses it (see docs/serve.md)."""
