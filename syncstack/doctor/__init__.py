"""Checks as records over :class:`syncstack.facts.Facts`, and their rendering."""
