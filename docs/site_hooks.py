"""Hooks of `make docs`: pages from outside docs/, generated pages, and links to files that are not pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")  # where GitHub looks for them
SHOWN = (".py", ".md", ".toml")  # files of the repository that a page may link to: shown as pages of code
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml"}
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside docs/, and make the generated pages from the code as it is now."""
    from hasten.cli.findings import findings_page as findings
    from hasten.cli.techniques import catalogue_page as catalogue

    for name in BESIDE:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=_linked(text, name, config, files, base="")))
    made = {"catalogue.md": catalogue(), "findings.md": findings()}
    for name, text in made.items():
        if (old := files.get_file_from_path(name)) is not None:
            files.remove(old)
        files.append(File.generated(config, name, content=text))
    for file in files.documentation_pages():
        if file.generated_by is None:
            text = Path(str(file.abs_src_path)).read_text(encoding="utf-8")
            _linked(text, file.src_uri, config, files, base="docs")
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links that leave docs/ to the pages made of those files."""
    return _linked(markdown, page.file.src_uri, config, files, base="docs")


def _linked(text: str, source: str, config: Any, files: Files, base: str) -> str:
    """Replace links to files outside docs/ by links to pages of their text; add those pages to the site."""

    def replaced(match: re.Match[str]) -> str:
        words, target, anchor = match[1], match[2], match[3] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(base, posixpath.dirname(source), target))
        if path.startswith("docs/") or (not base and (ROOT / "docs" / path).exists()):
            return match[0]
        if path in BESIDE:
            return f"[{words}]({posixpath.relpath(path, posixpath.dirname(source) or '.')}{anchor})"
        if (ROOT / path).suffix not in SHOWN or not (ROOT / path).is_file():
            return (
                words if (ROOT / path).exists() else match[0]
            )  # a folder: named, not linked; what is not there: warned of
        uri = f"source/{path}.md"
        if files.get_file_from_path(uri) is None:
            language = LANGUAGES[posixpath.splitext(path)[1]]
            code = (ROOT / path).read_text(encoding="utf-8")
            hidden = "---\nsearch: { exclude: true }\n---\n"
            shown = f"{hidden}# {path}\n\n````{language}\n{code}````\n"
            files.append(File.generated(config, uri, content=shown, inclusion=InclusionLevel.NOT_IN_NAV))
        return f"[{words}]({posixpath.relpath(uri, posixpath.dirname(source) or '.')})"

    return _LINK.sub(replaced, text)
