"""A Sphinx extension: a source file or folder that a page links to is a page of the site, not a download.

A file is shown with its syntax highlighted, a folder as the list of its source files, of which those that a page links
to are links: each page costs a second of the build.
"""

import html
import os
from pathlib import Path

import code_widths
from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from sphinx import addnodes
from sphinx.transforms import SphinxTransform

#: Where these pages lie on the site.
FOLDER = "source"
#: What source files end with; a link to another file stays a download.
SUFFIXES = (".py", ".cpp", ".h")


class LinkToSources(SphinxTransform):
    """Links to what is no document lead to the page that shows it."""

    default_priority = 10  # before Sphinx collects downloads

    def apply(self):
        for node in list(self.document.findall(self.may_be_a_source)):
            target, _, _ = node["reftarget"].partition("#")
            relative, path = self.env.relfn2path(target, self.env.docname)
            if target and (os.path.isdir(path) or (path.endswith(SUFFIXES) and os.path.exists(path))):
                linked(self.env).add(relative)
                uri = self.app.builder.get_relative_uri(self.env.docname, page(relative))
                link = nodes.reference("", "", *node.children, internal=True, refuri=uri)
                node.replace_self(link)

    @staticmethod
    def may_be_a_source(node):
        return isinstance(node, addnodes.download_reference) or (
            isinstance(node, addnodes.pending_xref) and node["reftype"] == "myst" and not node.get("refdomain")
        )


def linked(env):
    """Paths of what pages link to, relative to the repository; kept with what Sphinx read."""
    if not hasattr(env, "linked_sources"):
        env.linked_sources = set()
    return env.linked_sources


def merge(app, env, names, other):
    """Take over what another process found, which read some of the documents."""
    linked(env).update(linked(other))


def page(relative):
    return f"{FOLDER}/{relative}"


def pages(app):
    """The pages: (name, context, template)."""
    root = Path(app.srcdir)
    folders = {relative: files_in(root / relative) for relative in linked(app.env) if (root / relative).is_dir()}
    files = {relative for relative in linked(app.env) if (root / relative).is_file()}
    for relative in sorted(files):
        yield page(relative), {"title": relative, "body": title(relative) + shown(app, root / relative)}, "page.html"
    for relative, listed in sorted(folders.items()):
        here = page(relative)
        names = {path.name: f"{relative}/{path.name}" for path in listed}
        uris = {name: app.builder.get_relative_uri(here, page(path)) for name, path in names.items() if path in files}
        entries = [f'<a href="{uris[name]}">{name}</a>' if name in uris else name for name in names]
        items = "".join(f"<li>{entry}</li>" for entry in entries)
        yield here, {"title": relative, "body": f"{title(relative)}<ul>{items}</ul>"}, "page.html"


def files_in(folder):
    """The source files of a folder."""
    return sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in SUFFIXES)


def title(relative):
    return f"<h1>{html.escape(relative)}</h1>"


def shown(app, path):
    """The text of a file in HTML."""
    text = path.read_text(encoding="utf-8")
    language = get_lexer_for_filename(path.name).aliases[0]
    block = app.builder.highlighter.highlight_block(text, language)
    classes = [f"highlight-{language}", "notranslate", *code_widths.classes(text, language)]
    return f'<div class="{" ".join(classes)}">{block}</div>'


def setup(app):
    app.add_transform(LinkToSources)
    app.connect("env-merge-info", merge)
    app.connect("html-collect-pages", pages)
    return {"parallel_read_safe": True}
