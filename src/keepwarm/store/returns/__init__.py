"""When a session calls again: classes of turns, their hazard tables, and the return index made of them."""
