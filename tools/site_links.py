"""A hook of mkdocs.yml: links of the manual to files outside docs/ become their names, as the site does not have these files."""

import re
from pathlib import PurePosixPath

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def on_page_markdown(markdown, page, **_):
    depth = len(PurePosixPath(page.file.src_uri).parent.parts)

    def replace(link):
        is_outside = link[2].count("../") > depth
        return link[1] if is_outside else link[0]

    return _LINK.sub(replace, markdown)
