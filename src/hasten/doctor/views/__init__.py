"""Views of a diagnosis: terminal, HTML page, live page, and the comparison of two runs."""

from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")
