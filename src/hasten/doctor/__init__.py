"""Doctor: evidence -> findings -> verdict; checks of source code. Reads plain data; imports no torch."""
