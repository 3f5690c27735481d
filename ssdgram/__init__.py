"""SSDGram: n-gram memory tables of language models, served from NVMe."""
