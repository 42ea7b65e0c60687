"""Spans of a local fleet: where they are kept, and how one trace is shown."""
