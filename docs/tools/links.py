"""For mkdocs: links that leave ``docs/``, which lead somewhere on GitHub, lead to pages of the site.

An example (``../examples/x.py``) becomes a page that shows its source. Any other link out of the folder is left as it
is, and the strict build refuses it.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

_EXAMPLE = re.compile(r"\]\(((?:\.\./)+)examples/(\w+)\.py\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each example."""
    examples = Path(config["config_file_path"]).resolve().parent / "examples"
    for path in sorted(examples.glob("*.py")):
        text = f"# examples/{path.name}\n\n````python\n{path.read_text()}````\n"
        uri = f"examples/{path.stem}.md"
        files.append(File.generated(config, uri, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links to examples into links to their pages: one folder less up, as those lie beside the docs."""
    return _EXAMPLE.sub(lambda found: f"]({found[1][3:]}examples/{found[2]}.md)", markdown)
