"""Placements of other projects, measured beside ours."""
