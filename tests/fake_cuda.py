"""Streams, events and captures without a GPU: what the plug-ins ask of torch.cuda, written down in a log in the order it is asked."""

import contextlib

import torch


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for event of", event.recorded_on))


class Event:
    recorded_on = None

    def __init__(self, log=None):
        self.log = log

    def record(self, stream=None):
        stream = torch.cuda.current_stream() if stream is None else stream
        self.recorded_on = stream.name
        if self.log is not None:
            self.log.append((stream.name, "records", ""))


class FakeCuda:
    """Installed by the fixture `cuda`: torch.cuda.current_stream and the like are these."""

    def __init__(self, monkeypatch):
        self.log = []
        self.main, self.current, self.captured = Stream("main", self.log), None, False
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._on)
        log = self.log

        class SideStream(Stream):
            def __init__(self, *_, **__):
                super().__init__("side", log)

        class LoggedEvent(Event):
            def __init__(self, *_, **__):
                super().__init__(log)

        monkeypatch.setattr(torch.cuda, "Stream", SideStream)
        monkeypatch.setattr(torch.cuda, "Event", LoggedEvent)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.captured)

    @contextlib.contextmanager
    def _on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def capture(self):
        """As under torch.cuda.graph."""
        self.captured = True
        try:
            yield
        finally:
            self.captured = False
