"""What MkDocs does not do by itself: README, changelog and notebooks as pages, formulas as MathML.

Files outside docs/ become pages of the site, and links to them, written so that they work in the repository, are turned
into links to these pages. Links to other files of the repository become plain text: the site does not contain them.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}  # file of the repository -> page of the site
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\!)\[([^\]]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r"\!\[([^\]]*)\]\(([^)\s#]+)\)")
FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![\\$\w])\$([^$\n]+(?:\n[^$\n]+)?)\$(?![\w$])", re.DOTALL)
WIDE = 5  # lines between the columns of a table that is too wide beside the contents
MANY = 4_000  # characters of a printed output that are shown


def on_config(config: Any) -> Any:
    """Every page of a folder that the navigation names, such as `serving/`: its index first."""
    config["nav"] = [_expanded(entry) for entry in config["nav"]]
    return config


def _expanded(entry: Any) -> Any:
    (title, target), *_ = entry.items()
    if not (isinstance(target, str) and target.endswith("/")):
        return entry
    names = sorted(path.name for path in (ROOT / "docs" / target).glob("*.md") if path.name != "index.md")
    more = ["SERVING.md"] if target == "serving/" and (ROOT / "docs" / "SERVING.md").exists() else []
    return {title: [f"{target}index.md", *(f"{target}{name}" for name in names), *more]}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that come from outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links and formulas as the site needs them; code stays as it is. Wide tables get the room of the contents."""
    if max((line.count("|") for line in markdown.splitlines() if line.startswith("| ---")), default=0) > WIDE:
        page.meta.setdefault("hide", ["toc"])
    here = page.file.src_uri
    source = next((name for name, target in PAGES.items() if target == here), f"docs/{here}")
    if here.startswith("notebooks/"):
        source = f"notebooks/{posixpath.basename(here)}"
    parts, last = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [_changed(markdown[last : fence.start()], source, here), fence.group(0)]
        last = fence.end()
    return "".join([*parts, _changed(markdown[last:], source, here)])


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Tables scroll inside the page, by keyboard too; a number stays in one line with its interval."""
    html = re.sub(r" ± (?=\d)", "\u00a0±\u00a0", html)
    wrapped = html.replace("<table>", '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>')
    return wrapped.replace("</table>", "</table></div>") if wrapped.count("</table>") == html.count("<table>") else html


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Name the theme's search dialog for screen readers."""
    dialog = 'data-md-component="search" role="dialog"'
    return output.replace(dialog, f'{dialog} aria-label="Search"')


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same on the page of addresses that do not exist."""
    return on_post_page(output_content, None, config)


def _changed(text: str, source: str, here: str) -> str:
    text = LINK.sub(lambda match: _link(match, source, here), text)
    text = IMAGE.sub(lambda match: f"![{match[1]}]({_target(match[2], source, here) or match[2]})", text)
    return FORMULA.sub(_formula, text)


def _link(match: re.Match[str], source: str, here: str) -> str:
    words, link, anchor = match[1], match[2], match[3] or ""
    if re.match(r"[a-z]+:", link):
        return match[0]
    target = _target(link, source, here)
    return words if target is None else f"[{words}]({target}{anchor})"


def _target(link: str, source: str, here: str) -> str | None:
    """Where a link of a repository's file leads in the site; None where the site has no such page."""
    if re.match(r"[a-z]+:", link):
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
    if path in PAGES:
        path = PAGES[path]
    elif path.startswith("notebooks/"):
        path = f"{posixpath.splitext(path)[0]}.md"
    elif path.startswith("docs/"):
        path = path.removeprefix("docs/")
    elif source.startswith("docs/") and path == "docs/index.md":
        path = "index.md"
    else:
        return None
    return posixpath.relpath(path, posixpath.dirname(here) or ".")


def _formula(match: re.Match[str]) -> str:
    display = match[1] is not None
    made = convert((match[1] or match[2]).strip(), display="block" if display else "inline")
    if display:  # a long one scrolls, by keyboard too
        return f'<div class="scroll" tabindex="0" role="group" aria-label="Formula">{made}</div>'
    return f"<span>{made}</span>"  # a line must not begin with <math>


def notebook(path: Path) -> str:
    """A notebook with its outputs as a page."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _cell(cell)) + "\n"


def _cell(cell: dict[str, Any]) -> list[str]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [text]
    return [f"```py\n{text}\n```", *(shown for output in cell.get("outputs", []) if (shown := _output(output)))]


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "text/html" in data:
        inside = re.sub(r"\n\s*\n", "\n", "".join(data["text/html"]))  # an empty line would end the block of HTML
        return f'<div class="output" tabindex="0" role="group" aria-label="output">\n{inside}\n</div>'
    if "image/svg+xml" in data:
        return f'<div class="output">{"".join(data["image/svg+xml"])}</div>'
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f'<pre class="output" tabindex="0">{html.escape(text[:MANY])}</pre>' if text.strip() else ""
