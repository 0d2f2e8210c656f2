"""Terminal and HTML views of what was measured."""
