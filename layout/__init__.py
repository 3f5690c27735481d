"""The store's files: page format, checkpoint reading, conversion, verification, inspection (design section 4)."""
