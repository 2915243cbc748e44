"""A Sphinx extension: docstrings here have Google's sections and Markdown inside, which becomes reStructuredText.

Only what the docstrings use: inline code, tables of pipes, indented examples, several errors in a line. Runs before
napoleon, which reads the sections.
"""

import re

#: A line that opens one of the sections that napoleon reads; what is indented below it is text, not code.
SECTION = re.compile(r"(Args|Arguments|Attributes|Example|Examples|Note|Notes|Raises|Returns|Yields|Warns):$")
#: Inline code and the letter after it, or characters that reStructuredText would read as markup.
INLINE = re.compile(r"`([^`]+)`(?=(\w?))|(\*\*?(?=\w)|\|(?=\S)|(?<=\w)_(?=\W|$))")
#: What may be a name in the reference; other code is only shown.
NAME = re.compile(r"[A-Za-z_][\w.]*")
#: Where the next error begins in a line that names several.
NEXT_ERROR = re.compile(r"(?<=\.) (?=\w+Error(?:, \w+Error)*: )")


def setup(app):
    app.connect("autodoc-process-docstring", convert, priority=100)
    app.connect("autodoc-skip-member", skip_tuple_fields)
    return {"parallel_read_safe": True}


def convert(app, what, name, obj, options, lines):
    lines[:] = to_rst(lines)


def skip_tuple_fields(app, what, name, obj, skip, options):
    """Fields of a named tuple are described under its Attributes."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field number") else None


def to_rst(lines):
    """The lines of a docstring with tables and examples as directives."""
    out, position, in_section = [], 0, False
    while position < len(lines):
        line = lines[position]
        if SECTION.match(line):
            in_section = True
        elif line and not line[0].isspace():
            in_section = False
        if line.lstrip().startswith("|"):
            rows, position = take(lines, position, lambda text: text.lstrip().startswith("|"))
            out += ["", *table(rows), ""]
        elif indented(line) and not in_section and (not out or not out[-1].strip()):
            block, position = take(lines, position, lambda text: indented(text) or not text.strip())
            out += ["", *code(block), ""]
        else:
            margin = line[: len(line) - len(line.lstrip())]
            out += [escaped(part if part.startswith(margin) else margin + part) for part in NEXT_ERROR.split(line)]
            position += 1
    return out


def indented(line):
    return line.startswith("    ") and bool(line.strip())


def take(lines, position, wanted):
    """The lines from `position` on that are wanted, and where they end."""
    end = position
    while end < len(lines) and wanted(lines[end]):
        end += 1
    return lines[position:end], end


def escaped(line):
    """A line of text: names in code may become links; stars, bars and trailing underscores stand for themselves."""

    def replacement(match):
        code, letter, sign = match.groups()
        if code is None:
            return "\\" + sign.replace("**", "*\\*")
        return (f"`{code}`" if NAME.fullmatch(code) else f"``{code}``") + ("\\ " if letter else "")

    return INLINE.sub(replacement, line)


def table(rows):
    """A Markdown table as a list-table."""
    margin = " " * (len(rows[0]) - len(rows[0].lstrip()))
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip().strip("|"))] for row in rows]
    out = [f"{margin}.. list-table::", f"{margin}   :header-rows: 1", ""]
    for row in [cells[0], *cells[2:]]:
        for number, cell in enumerate(row):
            out.append(f"{margin}   {'*' if number == 0 else ' '} - {escaped(cell)}".rstrip())
    return out


def code(block):
    """An indented example as a literal block, highlighted where it is Python."""
    text = "\n".join(line[4:] for line in block)
    try:
        compile(text, "docstring", "exec")
        language = "python"
    except SyntaxError:
        language = "text"
    return [f".. code-block:: {language}", "", *block]
