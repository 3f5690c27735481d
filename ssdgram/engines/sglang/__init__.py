"""The entry point of the SGLang plug-in (group sglang.srt.plugins)."""
