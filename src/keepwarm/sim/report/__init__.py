"""What a replay says at the end: rows, a table, a page."""
