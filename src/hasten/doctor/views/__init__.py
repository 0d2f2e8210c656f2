"""Views of a diagnosis: the terminal, the page, the live page, the comparison."""

from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")
