"""What the site needs and the theme does not do: small mends of the written pages, each with its reason.

A mend that finds nothing to mend warns, which fails the build: then the theme has changed and the mend can go.
"""

import re
from pathlib import Path

from sphinx.util import logging

MENDS = {
    # docutils puts bibliography entries into a role="list", which only takes listitem (axe: aria-required-children)
    'role="doc-biblioentry"': 'role="listitem"',
    # the title in the side bar stands in no landmark (axe: region)
    '<div id="pst-primary-sidebar" class="bd-sidebar-primary bd-sidebar">':
        '<div id="pst-primary-sidebar" class="bd-sidebar-primary bd-sidebar" role="complementary" aria-label="Book">',
}  # fmt: skip


FIGURE = re.compile(r'<img [^>]*src="(?:\.\./)*_images/([^"/]+\.png)"[^>]*>')


def framed(text, images):
    """Each figure in a frame that knows its width in pixels: in a narrow column it keeps its print readable and scrolls (book.css, book.js)."""

    def frame(match):
        width = int.from_bytes((images / match[1]).read_bytes()[16:20], "big")  # from the header of a PNG file
        return f'<span class="figure-frame" style="--pixels: {width}px">{match[0]}</span>'

    return FIGURE.sub(frame, text)


def mend(app, exception):
    if exception is not None or app.builder.format != "html":
        return
    used = set()
    for path in Path(app.outdir).rglob("*.html"):
        text = mended = path.read_text(encoding="utf-8")
        for wrong, right in MENDS.items():
            if wrong in mended:
                used.add(wrong)
                mended = mended.replace(wrong, right)
        mended = framed(mended, Path(app.outdir) / "_images")
        if mended != text:
            path.write_text(mended, encoding="utf-8")
    for wrong in set(MENDS) - used:
        logging.getLogger(__name__).warning("nothing to mend: no page holds %s", wrong)


def setup(app):
    app.connect("build-finished", mend)
    app.add_js_file("book.js", loading_method="defer")
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
